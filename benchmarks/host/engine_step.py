"""Host time that windows add to an engine's step: planning before the forward, and the commit.

The forward itself is a captured graph and costs the host nothing more. ``steady`` steps look
like the one before; ``changing`` ones have another number of requests each time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy
import torch

from ... import LayerRef, TransactionManager, TxnConfig
from ..common import machine
from ..common.markdown import machine_line, table
from ..common.model_shapes import BLOCK_SIZE, MODELS

if TYPE_CHECKING:
    from ...integrations.serving.graph_steps import GraphSteps


#: The model, the drafts per request, the numbers of requests, and the steps of a measurement.
_MODEL: Final = MODELS["llama3-8b"]
_DRAFTS: Final = 4
_REQUESTS: Final = (1, 8, 32, 64)
_STEPS: Final = 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination, and print a line for each; with ``--save`` write the result.

    Returns:
        The exit code: 2 without a CUDA device.
    """
    if not torch.cuda.is_available():
        print("the benchmark of steps needs a CUDA device")
        return 2
    rows = []
    for policy in ("deferred", "undo"):
        steps, opened = make_steps(policy)
        for requests, changing in product(_REQUESTS, (False, True)):
            times = measure(steps, requests, changing=changing)
            rows.append({"policy": policy, "requests": requests, "changing": changing, **times})
            print(rows[-1], flush=True)
        print(f"{policy}: warm-up took {opened:.1f} s")
    if args.save:
        shown = {"suite": "steps", "model": "llama3-8b", "drafts": _DRAFTS, "rows": rows}
        print(f"written to {machine.write(args.save, shown)}")
    return 0


def make_steps(policy: Any) -> tuple[GraphSteps, float]:
    """Make steps over caches of the model's shape on the GPU; warm them up.

    Returns:
        The steps, each request in a block of its own; and how many
        seconds the warm-up took, the device's work included.
    """
    from ...integrations.serving.graph_steps import (
        GraphSteps,  # needs Triton, which not every machine has
    )

    shape, most, length = _MODEL, max(_REQUESTS) + 1, _DRAFTS + 1
    blocks = most * (1 + _DRAFTS // BLOCK_SIZE)
    refs = []
    for number in range(shape.layers):
        size = (blocks, shape.kv_heads, BLOCK_SIZE, 2 * shape.head_size)
        cache = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        key, value = cache.transpose(1, 2).split(shape.head_size, -1)
        refs.append(LayerRef(f"layer.{number}", key, value))
    rows = most * length
    manager = TransactionManager(refs, TxnConfig(policy=policy, max_rows=rows, on_error="raise"))
    slots = torch.full((1, rows), -1, dtype=torch.int64, device="cuda")
    steps = GraphSteps(manager, slots, length)
    begin = time.perf_counter()
    steps.warm_up()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    row = torch.arange(rows, device="cuda")
    slots[0] = row // length * BLOCK_SIZE + row % length
    return steps, seconds


def measure(steps: GraphSteps, requests: int, *, changing: bool) -> dict[str, float]:
    """Measure the median host microseconds of ``begin``, of ``commit``, and of both.

    Args:
        steps: warm.
        requests: of each batch, all with drafts, of which none is accepted.
        changing: each batch has another number of requests than the one before, one more or less.

    Returns:
        Microseconds by "begin", "commit" and "all".
    """
    batches = []
    for count in (requests, requests + 1) if changing else (requests,):
        drafts = numpy.full(count, _DRAFTS, dtype=numpy.int32)
        sampled = torch.ones(count, dtype=torch.int32, device="cuda")
        batches.append((drafts, drafts + 1, numpy.zeros(count, dtype=bool), sampled))
    samples = []
    with torch.inference_mode():
        for number in range(_STEPS):
            drafts, lengths, late, sampled = batches[number % len(batches)]
            if number % 16 == 0:
                torch.cuda.synchronize()  # a full queue would make the host wait
            start = time.perf_counter()
            steps.begin(drafts, lengths, late)
            middle = time.perf_counter()
            steps.commit(sampled)
            end = time.perf_counter()
            samples.append((middle - start, end - middle, end - start))
    each = [statistics.median(column) for column in zip(*samples[20:], strict=True)]
    names = ("begin", "commit", "all")
    return {name: round(1e6 * value, 2) for name, value in zip(names, each, strict=True)}


def report(found: Mapping[str, Any]) -> str:
    """Return a Markdown table of the host time of a step's two halves, in microseconds."""
    rows = []
    for row in found["rows"]:
        what = f"{row['policy']}, {'changing' if row['changing'] else 'steady'}"
        times = [f"{row[part]:.1f}" for part in ("begin", "commit", "all")]
        rows.append([what, str(row["requests"]), *times])
    header = ["policy, batch", "requests", "before the forward", "commit", "both"]
    return f"{table(header, rows)}\n\nMicroseconds, medians. {machine_line(found['machine'])}."
