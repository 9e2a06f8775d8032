"""Requests that a hybrid's cache holds at once, stock beside one state per request.

An engine for each policy, length and cache mode, all with the same bytes of cache. vLLM *reports*
how many requests of its longest length fit. Then more requests than that come at once, and how many
of them *run* at once is counted, and how often one was preempted.

The model has fewer layers than the one it is named after, of each kind in the same proportion:
pages, and so how many requests fit into how many bytes per layer, are the whole model's.

With ``--scheduler-alone`` vLLM plans the caches and schedules the requests, and no model runs: that
needs no GPU, and vLLM decides as it does with one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from ...cli import natural
from ..common import machine
from ..common.markdown import machine_line, table
from ..common.model_shapes import Shape
from . import hybrids
from .hybrids import RECURRENT
from .load import Work
from .models import MODELS, Model
from .process import EngineSpec, running

#: vLLM's cache modes for states: none are kept, or those at the ends of blocks are.
CACHES: Final = {"none": False, "align": True}

#: Tokens that each request generates; those before them are its prompt.
_TOKENS: Final = 256

#: Requests for each one that vLLM reports to fit.
_MORE: Final = 1.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    shapes = {name: model.shape for name, model in MODELS.items()}
    names = [name for name, each in shapes.items() if each.states and not each.feeding]
    parser.add_argument("--model", choices=names, default=names[0])
    parser.add_argument("--layers", type=natural, default=4, help="of the model; default: 4")
    parser.add_argument(
        "--policies", nargs="+", choices=["stock", *RECURRENT], default=["stock", "exact"]
    )
    parser.add_argument("--lengths", type=natural, nargs="+", default=[1024, 4096])
    parser.add_argument("--caches", nargs="+", choices=list(CACHES), default=list(CACHES))
    parser.add_argument("--drafts", type=natural, default=4)
    parser.add_argument("--mebibytes", type=natural, default=3072, help="of the cache")
    parser.add_argument(
        "--scheduler-alone", action="store_true", help="without a model, and without a GPU"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one engine")
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Count in all engines, side by side, and print a table."""
    if args.scheduler_alone:
        return schedule(args)
    if not torch.cuda.is_available():
        print("the benchmark of capacity needs a CUDA device")
        return 2
    found: dict[str, Any] = {"suite": "capacity", "layers": args.layers, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        cases = list(itertools.product(args.caches, args.lengths, args.policies))
        specs = [spec_of(args, Path(folder), *case) for case in cases]
        with running(specs) as engines:
            for (cache, length, policy), engine in zip(cases, engines, strict=True):
                reported = engine.reported()
                held = engine.hold(work_of(length, reported, MODELS[args.model]))
                row = {"cache": cache, "length": length, "policy": policy, "reported": reported}
                found["rows"].append({**row, **attrs.asdict(held)})
                print(found["rows"][-1], flush=True)
                if args.save:
                    machine.write(args.save, found)
    print(tabulated(found["rows"]))
    return 0


def schedule(args: argparse.Namespace) -> int:
    """Count what vLLM's scheduler does without a model, and print a table."""
    from ...integrations.vllm_plugin.internals.measuring import Scheduled

    found: dict[str, Any] = {"suite": "capacity", "layers": args.layers, "rows": []}
    model = cut(MODELS[args.model], args.layers)
    layers = caches_of(model.shape, args.drafts)
    with tempfile.TemporaryDirectory() as folder:
        for cache, length, policy in itertools.product(args.caches, args.lengths, args.policies):
            # Nothing of the model is read but how long a request may be.
            given = MODELS["tiny"].arguments(Path(folder) / f"{cache}-{length}", length)
            arguments = given | common(args, cache, length)
            one_state = policy in RECURRENT
            caches = Scheduled(arguments, layers, args.mebibytes << 20, one_state=one_state)
            reported = caches.reported()
            count, prompt = round(_MORE * reported) + 4, length - _TOKENS - 8

            def ran(at_once: int) -> Any:
                return caches.run(count, prompt, _TOKENS, at_once)  # noqa: B023 - called here

            first = ran(count)
            quiet = most_without_preemption(lambda most: ran(most).preempted, first.most)
            row = {"cache": cache, "length": length, "policy": policy, "reported": reported}
            found["rows"].append({**row, **attrs.asdict(first), "quiet": quiet})
            print(found["rows"][-1], flush=True)
    if args.save:
        machine.write(args.save, found)
    print(tabulated(found["rows"]))
    return 0


def most_without_preemption(preempted: Callable[[int], int], most: int) -> int:
    """Return the most requests that may run at once so that none is preempted.

    Args:
        preempted: how often requests are, if so many may run at once.
        most: requests that run at once where there is no limit.
    """
    if not preempted(most):
        return most
    fits, many = 1, most
    while many - fits > 1:
        middle = (fits + many) // 2
        if preempted(middle):
            many = middle
        else:
            fits = middle
    return fits


def caches_of(shape: Shape, drafts: int) -> Any:
    """Describe a hybrid's caches for vLLM's planning."""
    from ...integrations.vllm_plugin.internals.measuring import Layers

    states = shape.states
    assert states is not None
    channels = 2 * states.key_heads * states.key_size + states.heads * states.value_size
    return Layers(
        attention=shape.attention,
        recurrent=states.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head,
        past=(hybrids.TAPS - 1 + drafts, channels),
        state=(states.heads, states.value_size, states.key_size),
    )


def common(args: argparse.Namespace, cache: str, length: int) -> dict[str, Any]:
    """Choose the arguments of vLLM that engines have with and without a model."""
    speculation = {
        "method": "ngram",
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
        "num_speculative_tokens": args.drafts,
    }
    return {
        "enable_prefix_caching": CACHES[cache],
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 1 << 20 if args.scheduler_alone else 1 << 15,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "speculative_config": speculation,
        "seed": 0,
    }


def spec_of(
    args: argparse.Namespace, folder: Path, cache: str, length: int, policy: str
) -> EngineSpec:
    """Describe an engine whose longest requests have ``length`` tokens."""
    model = cut(MODELS[args.model], args.layers)
    where = folder / f"{cache}-{length}"
    arguments = {
        **model.arguments(where, length),
        **hybrids.arguments(),
        **common(args, cache, length),
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": args.mebibytes << 20,
    }
    return EngineSpec(
        policy=policy,
        arguments=arguments,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        timeout=args.timeout,
        label=f"{cache}-{length}-{policy}",
    )


def cut(model: Model, layers: int) -> Model:
    """Return a hybrid with fewer layers, of both kinds in the same proportion."""
    shape = model.shape
    assert shape.states is not None
    states = attrs.evolve(shape.states, layers=layers * shape.states.layers // shape.layers)
    return attrs.evolve(model, shape=attrs.evolve(shape, layers=layers, states=states))


def work_of(length: int, reported: float, model: Model) -> Work:
    """Make more requests of ``length`` tokens than fit; no two begin with the same tokens."""
    draw = random.Random(0)
    count, prompt = round(_MORE * reported) + 4, length - _TOKENS - 8
    prompts = [[draw.randrange(2, model.shape.vocab) for _ in range(prompt)] for _ in range(count)]
    return Work(prompts=prompts, max_tokens=_TOKENS)


def tabulated(rows: list[Mapping[str, Any]]) -> str:
    """Draw a table: a line for each length and cache mode, stock beside the others."""
    lines = []
    for cache, length in dict.fromkeys((row["cache"], row["length"]) for row in rows):
        mine = {r["policy"]: r for r in rows if (r["cache"], r["length"]) == (cache, length)}
        stock = mine.get("stock")
        for policy, row in mine.items():
            if stock is None or policy == "stock":
                continue
            line = [f"{length} tokens, {'prefix cache' if CACHES[cache] else 'no prefix cache'}"]
            line += [policy]
            for figure in ("reported", "most", "quiet"):
                if figure in stock and figure in row:
                    line += [f"{stock[figure]:.0f}", f"{row[figure]:.0f}"]
                    line += [f"{row[figure] / stock[figure]:.2f}"]
                else:
                    line += ["-"] * 3
            lines.append([*line, f"{stock['preempted']}, {row['preempted']}"])
    header = ["requests of", "states", "stock reports", "here", "of stock"]
    header += ["stock runs", "here", "of stock", "without preemption", "here", "of stock"]
    return table([*header, "preempted"], lines)


def report(found: Mapping[str, Any]) -> str:
    """Draw the table for the documents."""
    return f"{tabulated(found['rows'])}\n\n{machine_line(found['machine'])}."
