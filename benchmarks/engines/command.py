"""``kvtxn bench vllm``: whole engines, stock against policies and audits, taking turns.

One engine per policy, each in processes of its own, all up at once; every cell repeats in
rounds of one run per engine, so drift hits all alike. The order within a round rotates, and
ratios are taken within rounds. Results are written after every cell; one that an engine's failure
or the end of the time leaves out is listed as not measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ...errors import KVTxnError
from ...integrations.audit_command.shown_arguments import shown
from ..common import machine
from . import files as vllm_files
from . import hybrids
from . import options as vllm_options
from .audits import complaints
from .cell import measure
from .load import Point, make
from .models import DRAFTERS, MODELS, Model
from .process import Engine, EngineSpec, running

add_arguments = vllm_options.add_arguments


def run(args: argparse.Namespace) -> int:
    """Start the engines, measure every cell, write the result and print its files.

    The result is written after each cell, and with the reason if a later one raises.

    Returns:
        0; or 1 if an audit found a violation, or could not judge every request: the standard
        error stream says which.

    Raises:
        ConfigError: options would have no effect.
        Exception: what ended the run.
    """
    vllm_options.check(args)
    begin = time.time()
    result: dict[str, Any] = {
        "format": vllm_files.FORMAT,
        "machine": machine.describe(),
        "settings": _settings(args),
        "conditions": {"started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin))},
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = engine_arguments(args, MODELS[args.model], Path(folder))
        text = MODELS[args.model].text(Path(arguments["model"]))
        with running(specs(args, arguments)) as engines:
            result["conditions"] |= _conditions(engines)
            result["cells"] = []
            try:
                for point in vllm_options.points(args):
                    result["cells"].append(_measure(args, engines, point, text))
                    path = _write(args, result, begin)
                    print(vllm_files.line(result["cells"][-1]), file=sys.stderr, flush=True)
            except BaseException as error:
                result["conditions"]["ended"] = _reason(error)
                vllm_files.publish(_write(args, result, begin))
                raise
    for made in vllm_files.publish(path):
        print(made)
    found = complaints(result["cells"])
    for each in found:
        print(f"kvtxn bench: the audit found: {each}", file=sys.stderr)
    return 1 if found else 0


def _write(args: argparse.Namespace, result: dict[str, Any], begin: float) -> Path:
    """Write the JSON with the cells measured so far and the seconds so far; return its path."""
    result["conditions"]["seconds"] = time.time() - begin
    return vllm_files.write(args.folder, _name(args), result)


def _reason(error: BaseException) -> str:
    """Return one line that says why cells of the result are missing."""
    if isinstance(error, KVTxnError):
        return error.problem.partition("\n")[0]
    return f"the run ended with {type(error).__name__}"


def _measure(
    args: argparse.Namespace, engines: Sequence[Engine], point: Point, text: Sequence[int] | int
) -> dict[str, Any]:
    """Measure one cell of the result; every engine must be ready."""
    work = partial(
        make,
        point,
        text=text,
        drafts=args.drafts,
        arrivals=args.arrivals or _ARRIVALS,
    )
    return measure(
        engines,
        point,
        work,
        args.rounds,
        first_token_rounds=args.first_token_rounds,
        clock=args.clock,
    )


def _conditions(engines: Sequence[Engine]) -> dict[str, Any]:
    """Return the other conditions of a run: processors, settings, environment, state of the GPU.

    The engines are asked for the memory of their audits, and for their lines in the log.
    """
    spec = engines[0].spec
    memory = {engine.spec.label: engine.memory() for engine in engines if engine.spec.audited}
    return {
        **({"audit_memory": memory} if memory else {}),
        "engines": len(engines),
        "processors": os.cpu_count(),
        "announced": {engine.spec.label: engine.announced() for engine in engines},
        "arguments": {key: value for key, value in spec.arguments.items() if key != "model"},
        "environment": {
            **{name: value for name, value in os.environ.items() if name.startswith("VLLM_")},
            **spec.environment,
        },
        "gpu": machine.gpu_state(),
    }


#: Requests per second, where nothing else is said.
_ARRIVALS: Final = 16.0

_NOT_SETTINGS: Final = ("log_level", "command", "suite", "folder")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that a result's file names; an engine's arguments may have secrets."""
    named = {key: value for key, value in vars(args).items() if key not in _NOT_SETTINGS}
    return {**named, "engine_args": shown(named["engine_args"])}


def _name(args: argparse.Namespace) -> str:
    """Return the name of the result's files, given or made of model and drafter."""
    return args.output or f"vllm-{args.model}-{args.drafter}"


def specs(args: argparse.Namespace, arguments: Mapping[str, Any]) -> list[EngineSpec]:
    """Make a spec for each policy named; a policy named again has "#2", "#3", ... in its label."""
    return [
        EngineSpec(
            policy=policy,
            arguments={**arguments, **_cache(args, policy), **args.engine_args},
            environment=_environment(),
            timeout=args.timeout,
            label=f"{policy}#{again + 1}" if again else policy,
        )
        for number, policy in enumerate(args.policies)
        for again in [args.policies[:number].count(policy)]
    ]


def _environment() -> dict[str, str]:
    """Choose the environment that every engine's process has before it imports vLLM.

    Nothing on a GPU; on a CPU settings for engines that share it, unless the user's own are there.
    """
    if torch.cuda.is_available():
        return {}
    # Several engines share the memory, and threads that wait for each other the processors.
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def _cache(args: argparse.Namespace, policy: str) -> dict[str, Any]:
    """Return a hybrid's ``kv_cache_memory_bytes``; empty for other models, and without a GPU.

    With ``--equal-cache`` it is the same for every policy; else all requests fit.
    """
    shape = MODELS[args.model].shape
    if shape.states is None or not torch.cuda.is_available():
        return {}
    if args.equal_cache is not None:
        tokens = max(each.context + each.tokens for each in vllm_options.points(args))
        given = args.equal_cache, tokens + args.drafts, args.drafts
        return {"kv_cache_memory_bytes": hybrids.equal_cache_bytes(shape, *given)}
    sizes = [
        hybrids.cache_bytes(
            shape, each.requests, each.context + each.tokens + args.drafts, args.drafts, policy
        )
        for each in vllm_options.points(args)
    ]
    return {"kv_cache_memory_bytes": max(sizes) + (256 << 20)}


def engine_arguments(args: argparse.Namespace, model: Model, folder: Path) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``, the same for every policy.

    On a GPU the cache has room for all requests of the largest cell. ``--engine-args`` win.
    Configurations of models are written into ``folder``.
    """
    loads = vllm_options.points(args)
    length = max(point.context + point.tokens for point in loads) + args.drafts + 8
    requests = max(point.requests for point in loads)
    speculation = DRAFTERS[args.drafter](folder, model, length) | {
        "method": args.drafter,
        "num_speculative_tokens": args.drafts,
    }
    if any(point.acceptance is not None for point in loads):
        speculation["rejection_sample_method"] = "synthetic"
        speculation["synthetic_acceptance_rates"] = [0.5] * args.drafts  # set before every run
    settings: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}
    if torch.cuda.is_available():
        # Engines that start together must not measure each other's memory: its size is given.
        held = (
            point.requests * (point.context + point.tokens + args.drafts + 72) for point in loads
        )
        cache = max(held) * model.token_bytes + (256 << 20)
        settings = {"kv_cache_memory_bytes": cache, "gpu_memory_utilization": 0.05}
        settings["dtype"] = "bfloat16"
    return {
        **model.arguments(folder, length),
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": requests,
        "speculative_config": speculation,
        "seed": 0,
        **settings,
        **(hybrids.arguments() if model.shape.states is not None else {}),
        **args.engine_args,
    }
