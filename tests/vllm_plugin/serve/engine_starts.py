"""One process: engines that must not start, one that must, one that is unhooked while it runs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_files import VOCAB, write
from scenarios import NGRAM

#: What the user writes, beside a speculation that is there or not.
STARTS: dict[str, tuple[dict[str, Any], bool]] = {
    "misspelled": ({"polcy": "undo"}, True),
    "bad value": ({"policy": "undoo"}, True),
    "wrong type": ({"policy": "undo", "max_rows": "64"}, True),
    "no such backend": ({"policy": "undo", "backend": "abacus"}, True),
    "not on this device": ({"policy": "undo", "backend": "cudagraph"}, True),
    "no graphs here": ({"policy": "undo", "acceptance": "graph"}, True),
    "no room": ({"policy": "auto", "max_rows": 1, "required": True}, True),
    "required": ({"policy": "undo", "required": True}, False),
    "stock": ({"policy": "undo"}, False),
}


#: Where the engine has processes of its own, one mistake stands for all: the check is the same.
IN_PROCESSES = ("misspelled", "not on this device", "required", "stock")


def arguments(
    model: str, kvtxn: dict[str, Any], *, speculates: bool = True, **more: Any
) -> dict[str, Any]:
    """The arguments of an engine."""
    usual = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "num_gpu_blocks_override": 26,
        "max_model_len": 288,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "speculative_config": NGRAM if speculates else None,
        "additional_config": {"kvtxn": kvtxn},
    }
    return usual | more


def build(model: str, kvtxn: dict[str, Any], *, processes: bool = False, **more: Any) -> Any:
    """An engine, in this process or in others; ``more`` as for ``arguments``."""
    from vllm import LLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    return LLM(**arguments(model, kvtxn, **more))


def tokens(llm: Any) -> list[int]:
    """A continuation with drafts, some right, some wrong."""
    from vllm import SamplingParams, TokensPrompt

    assert llm.reset_prefix_cache()
    prompt = TokensPrompt(prompt_token_ids=[i % 5 % VOCAB for i in range(20)])
    settings = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    return list(llm.generate([prompt], settings, use_tqdm=False)[0].outputs[0].token_ids)


@contextlib.contextmanager
def only_workers_check() -> Any:
    """Let the check before the engine pass, as where the engine's core runs without a front end."""
    from kvtxn.integrations.vllm_plugin import plugin

    check = plugin._before_engine
    plugin.unregister()
    plugin._before_engine = lambda config: None
    plugin.register()
    try:
        yield
    finally:
        plugin.unregister()
        plugin._before_engine = check
        plugin.register()


def start(model: str, name: str, *, processes: bool) -> dict[str, Any]:
    """Try it; returns the error, if there was one."""
    from kvtxn.integrations.vllm_plugin import snapshots

    kvtxn, speculates = STARTS[name]
    print(f"--- {name} in {'processes' if processes else 'this process'}", flush=True)
    try:
        llm = build(model, kvtxn, speculates=speculates, processes=processes)
    except Exception as error:
        return {"type": type(error).__name__, "says": str(error)}
    return {"type": None, "active": [counts["kvtxn_active"] for counts in snapshots(llm)]}


def unhooked(model: str, policy: str) -> dict[str, Any]:
    """A running engine's classes and tokens, hooked and unhooked."""
    from kvtxn.integrations.vllm_plugin import plugin

    llm = build(model, {"policy": policy})
    report = {"hooked": (classes(llm), tokens(llm))}
    plugin.unregister()
    return report | {"unhooked": (classes(llm), tokens(llm))}


def stock(model: str) -> tuple[list[str], list[int]]:
    """Classes and tokens of an engine that never had any hooks."""
    from kvtxn.integrations.vllm_plugin import plugin

    plugin.unregister()
    llm = build(model, {"policy": "undo"})
    return classes(llm), tokens(llm)


def classes(llm: Any) -> list[str]:
    """Names of the classes of whatever kvtxn hooks, and of attributes that it left there."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    objects = [llm.llm_engine.engine_core, runner, *(layer.impl for layer in layers)]
    left = {name for each in objects for name in vars(each) if name.startswith("kvtxn")}
    return [type(each).__name__ for each in objects] + sorted(left)


def apart(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in a fork of this process, in which no engine ever was."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(function(*args, **kwargs)))
    child.start()
    theirs.close()
    found = ours.recv()  # EOFError: it died, and has said why
    child.join()
    return found


def starts(folder: Path) -> dict[str, Any]:
    """Report every start."""
    model = prepared(folder)
    report: dict[str, Any] = {}
    for processes in (False, True):
        where = "processes" if processes else "one process"
        names = IN_PROCESSES if processes else STARTS
        report[where] = {name: apart(start, model, name, processes=processes) for name in names}
        with only_workers_check():
            report[f"{where}, workers alone"] = {
                name: apart(start, model, name, processes=processes)
                for name in ("misspelled", "required")[: 1 if processes else 2]
            }
    return report


def unhooking(folder: Path) -> dict[str, Any]:
    """Report what unhooking does to each policy's engine, and an engine that never had hooks."""
    model = prepared(folder)
    report = {policy: apart(unhooked, model, policy) for policy in ("undo", "deferred")}
    return report | {"stock": apart(stock, model)}


def prepared(folder: Path) -> str:
    """Load vLLM's plug-ins, once for all forks; returns the path of a model."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return write("llama", folder)
