"""GPU time of commits against stock writes, a plain copy, and undo.

Every figure is the median over graph replays with cold L2, candidates in turn. The gates come
first: a named part of the conformance kit, without which no result is written, and each
workload's commit, which is compared with the reference, byte for byte.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch

from ...cli import natural
from ...integrations.vllm_plugin.seam import measuring
from ...row_io import write_layers
from ..common import conformance_gate as kit
from ..common import machine
from ..common.model_shapes import MODELS, Case
from .timer import COLD_BYTES, measure_all, medians, plain_copy

if TYPE_CHECKING:
    from .workload import Workload  # needs Triton, which the command line does not


Step = Callable[[], None]

#: Elements of a latent and of its rotary part, as vLLM's own write takes them.
_LATENT: Final = (512, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama3-8b"])
    parser.add_argument("--requests", type=natural, nargs="+", default=[1, 8, 16, 64, 128])
    parser.add_argument("--drafts", type=natural, nargs="+", default=[4])
    parser.add_argument("--accepted", type=float, nargs="+", default=[0.0, 0.1, 0.3, 0.7, 1.0])
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination, and print a line for each; with ``--save`` write the results.

    Before a result is to be written, a part of the conformance kit has to pass.

    Returns:
        The exit code: 1 if a case was left out; 2 without a CUDA device.
    """
    if not torch.cuda.is_available():
        print("the kernel benchmark needs a CUDA device")
        return 2
    passed = kit.passed() if args.save else ""
    points = itertools.product(args.models, args.requests, args.drafts, args.accepted)
    cases = itertools.starmap(Case, points)
    return measure_all({"suite": "kernels", "gate": passed}, cases, measure, lines, args.save)


def lines(row: Mapping[str, Any]) -> list[str]:
    """Show one case as a line of text."""
    shown = "  ".join(f"{name} {value:.2f}" for name, value in row["us"].items())
    shown += "" if "stock" in row["us"] else "  (no stock: vLLM's own operators are not here)"
    return [f"{row['model']}, {row['rows']} rows, {row['accepted']:.0%} accepted; us: {shown}"]


def measure(case: Case) -> dict[str, Any]:
    """Check one case's commit against the reference, then time every candidate.

    Returns:
        The case's row of the result file; ``us`` has the medians in microseconds, by candidate.

    Raises:
        AssertionError: the commit left other bytes than the reference.
    """
    from .workload import Workload

    load = Workload(case)
    gate(load)
    candidates = {"commit": commits(load), "undo": undos(load), "floor": copies(load.kept_bytes)}
    stock = stock_writes(load)
    if stock:
        candidates["stock"] = stock
        candidates["floor-all"] = copies(load.all_bytes)
    times = medians({name: steps for name, steps in candidates.items() if steps})
    return {
        "model": case.model,
        "requests": case.requests,
        "drafts": case.drafts,
        "layers": case.shape.layers,
        "rows": case.rows,
        "accepted": case.accepted,
        "kept_bytes": load.kept_bytes,
        "us": {name: round(value, 3) for name, value in times.items()},
    }


def gate(load: Workload) -> None:
    """Check that one commit leaves the reference's bytes in the whole of every cache.

    It is the first window's; the caches hold the reference's bytes afterwards.

    Raises:
        AssertionError: the bytes differ; nothing is timed then.
    """
    window = load.windows[0]
    planes = [plane for ref in load.refs for plane in ref.planes]
    load.executor.commit(load.txn(window), window.accepted)
    found = [plane.cells.clone() for plane in planes]
    for plane in planes:
        plane.cells.zero_()
    rows = {name: layer.rows for name, layer in window.staged.items()}
    kept = load.layout.kept(window.accepted)
    write_layers(load.refs, rows, {"default": window.slots}, kept)
    for plane, cells in zip(planes, found, strict=True):
        if not torch.equal(plane.cells, cells):
            raise AssertionError(f"commit differs from the reference at {load.case}")


def commits(load: Workload) -> list[Step]:
    """Return one commit per window, each one launch with its addresses on the device already."""
    return [partial(load.commit, window, load.plan(window)) for window in load.windows]


def undos(load: Workload) -> list[Step]:
    """Return a step per window that saves rows and puts rejected ones back, as undo adds to stock.

    The first step is run once, so that it uploads its addresses.
    """
    executor = load.executor
    steps: list[Step] = []
    for window in load.windows:

        def step(window: Any = window) -> None:
            """Save the drafts' rows, and put rejected ones back."""
            txn = load.txn(window, "undo")
            executor.use_slots(window.slots)
            txn.saved.update(executor.save(txn, "default"))
            executor.commit(txn, window.accepted)

        steps.append(step)
    steps[0]()  # uploads the addresses of the fixed buffers, once
    return steps


def copies(size: int) -> list[Step]:
    """Return steps that copy ``size`` contiguous bytes each, in buffers of their own; none for 0.

    There are so many that a copy finds nothing in the GPU's cache.
    """
    if size == 0:
        return []
    count = max(2, min(64, -(-COLD_BYTES // size)))
    pairs = [
        tuple(torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        for _ in range(count)
    ]
    return [partial(plain_copy, *pair) for pair in pairs]


def stock_writes(load: Workload) -> list[Step]:
    """Return a step per window that writes all rows as vLLM does; empty without vLLM."""
    if find_spec("vllm") is None:
        return []
    one = torch.ones(1, device="cuda")

    def step(window: Any) -> None:
        """Write all rows of one window as vLLM does, layer by layer."""
        for ref in load.refs:
            if ref.is_latent:
                latent, rotary = window.staged[ref.name].rows[0].split(_LATENT, dim=1)
                measuring.write_latents((latent, rotary), ref.key_cache, window.slots, one)
                continue
            key, value = window.staged[ref.name].rows
            caches = ref.key_cache, ref.value_cache
            measuring.write_rows((key, value), caches, window.slots, one)  # type: ignore[arg-type]

    return [lambda window=window: step(window) for window in load.windows]  # type: ignore[misc]
