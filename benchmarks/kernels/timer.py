"""GPU time of short launches: graph replay, cold L2, medians, candidates in turn."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ... import cuda_graphs
from ..common import machine

#: Bytes that a graph must touch before it returns to the same memory: several times any L2.
COLD_BYTES: Final = 256 * 2**20

#: Bytes that a plain copy moves at once: torch gives larger ones to a slower copy engine.
_PIECE: Final = 128 * 2**20

#: Most launches in one graph.
_MAX_STEPS: Final = 256


def sets_needed(bytes_per_step: int) -> int:
    """Return how many sets of buffers steps must cycle through to find their data in DRAM.

    From 2 to 256, by the bytes of a step.
    """
    return max(2, min(_MAX_STEPS, -(-COLD_BYTES // max(1, bytes_per_step))))


def plain_copy(source: Tensor, target: Tensor) -> None:
    """Copy bytes, uint8 ``[n]``, in contiguous pieces of at most 128 MiB."""
    for given, made in zip(source.split(_PIECE), target.split(_PIECE), strict=True):
        made.copy_(given)


def capture(steps: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Run the first two steps, then capture all in one graph; replay it once, and return it."""
    for step in steps[:2]:
        step()
    torch.cuda.synchronize()

    def run() -> None:
        for step in steps:
            step()

    graph = cuda_graphs.capture(run)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def medians(
    candidates: Mapping[str, Sequence[Callable[[], object]]], rounds: int = 15
) -> dict[str, float]:
    """Return microseconds of the GPU per step of each candidate: the median of ``samples``."""
    return {name: statistics.median(times) for name, times in samples(candidates, rounds).items()}


def samples(
    candidates: Mapping[str, Sequence[Callable[[], object]]], rounds: int = 15
) -> dict[str, list[float]]:
    """Return microseconds of the GPU per step of each candidate in each round.

    Each candidate's steps are one CUDA graph. Replays alternate, so clocks are equal.

    Args:
        candidates: for each name, steps over different buffers; data that is cold for one step must
            not be warm for the next.
        rounds: replays of each.
    """
    graphs = {name: capture(steps) for name, steps in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(1000 * start.elapsed_time(stop) / len(candidates[name]))
    return times


def measure_all(
    found: dict[str, Any],
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    lines: Callable[[dict[str, Any]], list[str]],
    save: str | None,
) -> int:
    """Measure every case, print its lines, and write the result after each.

    A case whose measurement raises is left out, with the error in ``left_out``.

    Args:
        found: the result; its ``rows`` and ``left_out`` are filled here.
        cases: attrs objects.
        measure: returns the row of a case.
        lines: shows a row.
        save: name of the result's file; None writes none.

    Returns:
        The exit code: 1 if a case was left out.
    """
    found |= {"rows": [], "left_out": []}
    written = None
    for case in cases:
        try:
            row = measure(case)
        except Exception as error:  # earlier measurements are kept
            found["left_out"].append({**attrs.asdict(case), "why": repr(error)[:500]})
            print(f"{case} is left out: {error!r}"[:600], flush=True)
        else:
            found["rows"].append(row)
            print(*lines(row), sep="\n", flush=True)
        gc.collect()  # the next case needs the memory of this one
        torch.cuda.empty_cache()
        if save:
            written = machine.write(save, found)
    if written:
        print(written)
    return 1 if found["left_out"] else 0
