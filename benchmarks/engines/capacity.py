"""Requests that a hybrid's cache holds at once, stock beside one state per request.

An engine for each policy, length and cache mode, all with the same bytes of cache. vLLM *reports*
how many requests of its longest length fit. Then more requests than that come at once, and how many
of them *run* at once is counted, and how often one was preempted.

The model is Qwen3.5-9B with fewer layers, of each kind in the same proportion: pages, and so how
many requests fit into how many bytes per layer, are the whole model's.

With ``--scheduler-alone`` vLLM plans the caches and schedules the requests, and no model runs: that
needs no GPU, and vLLM decides as it does with one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import torch

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

#: Tokens of the longest requests; each generates the last 256 of them.
_LENGTHS: Final = (1024, 4096)
_TOKENS: Final = 256

#: Requests for each one that vLLM reports to fit.
_MORE: Final = 1.3

_LAYERS: Final = 4
_DRAFTS: Final = 4
_CACHE_BYTES: Final = 3 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument(
        "--policies", nargs="+", choices=["stock", *RECURRENT], default=["stock", "exact"]
    )
    parser.add_argument(
        "--scheduler-alone", action="store_true", help="without a model, and without a GPU"
    )
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Count in engines, or by the scheduler alone; print each row, and then a table.

    With ``--save`` the result is written after each row.

    Returns:
        The exit code: 2 if it needs a CUDA device that is not there.
    """
    if not args.scheduler_alone and not torch.cuda.is_available():
        print("the benchmark of capacity needs a CUDA device")
        return 2
    found: dict[str, Any] = {"suite": "capacity", "layers": _LAYERS, "rows": []}
    cases = list(itertools.product(CACHES, _LENGTHS, args.policies))
    with tempfile.TemporaryDirectory() as folder:
        counts = scheduled if args.scheduler_alone else in_engines
        for case, row in zip(cases, counts(Path(folder), cases), strict=True):
            where = dict(zip(("cache", "length", "policy"), case, strict=True))
            found["rows"].append({**where, **row})
            print(found["rows"][-1], flush=True)
            if args.save:
                machine.write(args.save, found)
    print(tabulated(found["rows"]))
    return 0


def in_engines(folder: Path, cases: Sequence[tuple[str, int, str]]) -> Iterator[dict[str, Any]]:
    """Yield what each case's real engine holds, a row for the result; all start side by side.

    First comes what vLLM reports, then the fields of ``Held`` for more requests than that.
    """
    with running([spec_of(folder, *case) for case in cases]) as engines:
        for (_, length, _), engine in zip(cases, engines, strict=True):
            reported = engine.reported()
            yield {"reported": reported, **attrs.asdict(engine.hold(work_of(length, reported)))}


def scheduled(folder: Path, cases: Sequence[tuple[str, int, str]]) -> Iterator[dict[str, Any]]:
    """Count what vLLM's scheduler does without a model.

    Args:
        folder: for the models' files.
        cases: cache, longest length in tokens, and policy of each.

    Yields:
        Per case, in numbers of requests: ``reported`` by vLLM, the fields of ``Scheduled.run``'s
        result, and ``quiet``, the most that run without a preemption.
    """
    from ...integrations.vllm_plugin.seam.measuring import Scheduled

    layers = caches_of(model().shape)
    for cache, length, policy in cases:
        # Nothing of the model is read but how long a request may be.
        given = MODELS["tiny"].arguments(folder / f"{cache}-{length}", length)
        one_state = policy in RECURRENT
        caches = Scheduled(given | common(cache, length), layers, _CACHE_BYTES, one_state=one_state)
        reported = caches.reported()
        count, prompt = round(_MORE * reported) + 4, length - _TOKENS - 8
        ran = partial(caches.run, count, prompt, _TOKENS)
        first = ran(count)
        quiet = most_without_preemption(partial(_preempted, ran), first.most)
        yield {"reported": reported, **attrs.asdict(first), "quiet": quiet}


def _preempted(ran: Callable[[int], Any], most: int) -> int:
    """Return how often a request is preempted if ``most`` may run at once."""
    return int(ran(most).preempted)


def most_without_preemption(preempted: Callable[[int], int], most: int) -> int:
    """Return the most requests that may run at once so that none is preempted; at least 1.

    A search by halves, which takes it that more requests are never preempted less often.

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


def caches_of(shape: Shape) -> Any:
    """Return a hybrid's caches as vLLM's planning takes them: sizes of its layers of both kinds."""
    from ...integrations.vllm_plugin.seam.measuring import Layers

    states = shape.states
    assert states is not None
    channels = 2 * states.key_heads * states.key_size + states.heads * states.value_size
    return Layers(
        attention=shape.attention,
        recurrent=states.layers,
        kv_heads=shape.kv_heads,
        head_size=shape.head,
        past=(hybrids.TAPS - 1 + _DRAFTS, channels),
        state=(states.heads, states.value_size, states.key_size),
    )


def common(cache: str, length: int) -> dict[str, Any]:
    """Return the arguments of vLLM that engines have with and without a model.

    Args:
        cache: a name of ``CACHES``.
        length: tokens of the longest request.
    """
    speculation = {
        "method": "ngram",
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
        "num_speculative_tokens": _DRAFTS,
    }
    return {
        "enable_prefix_caching": CACHES[cache],
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 1 << 20,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "speculative_config": speculation,
        "seed": 0,
    }


def spec_of(folder: Path, cache: str, length: int, policy: str) -> EngineSpec:
    """Describe an engine of a cache mode and policy whose longest requests have ``length`` tokens.

    The model's configuration is written into ``folder``.
    """
    arguments = {
        **model().arguments(folder / f"{cache}-{length}", length),
        **hybrids.arguments(),
        **common(cache, length),
        "max_num_batched_tokens": 1 << 15,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": _CACHE_BYTES,
    }
    return EngineSpec(
        policy=policy,
        arguments=arguments,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        timeout=300.0,
        label=f"{cache}-{length}-{policy}",
    )


def model() -> Model:
    """Return Qwen3.5-9B with ``_LAYERS`` layers, of both kinds in the same proportion."""
    whole = MODELS["qwen3.5-9b"]
    shape, states = whole.shape, whole.shape.states
    assert states is not None
    fewer = attrs.evolve(states, layers=_LAYERS * states.layers // shape.layers)
    return attrs.evolve(whole, shape=attrs.evolve(shape, layers=_LAYERS, states=fewer))


def work_of(length: int, reported: float) -> Work:
    """Make more requests of about ``length`` tokens than the ``reported`` ones, as ``Work``.

    Their prompts are random, always the same, so that no two begin with the same tokens.
    """
    draw, vocab = random.Random(0), model().shape.vocab
    count, prompt = round(_MORE * reported) + 4, length - _TOKENS - 8
    prompts = [[draw.randrange(2, vocab) for _ in range(prompt)] for _ in range(count)]
    return Work(prompts=prompts, max_tokens=_TOKENS)


def tabulated(rows: list[Mapping[str, Any]]) -> str:
    """Return a Markdown table, a line per length, cache mode and policy, beside stock's numbers.

    "-" stands for numbers that one of the two lacks.
    """
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
    """Return the table and the machine's line, for the documents."""
    return f"{tabulated(found['rows'])}\n\n{machine_line(found['machine'])}."
