"""GPU time of a verify pass by vLLM's blocks and by blocks of one row, for attention backends.

By blocks of one row drafts can wait in spare slots (``deferred``). Two things decide whether kvtxn
takes a backend in: its sums stay stock's to the bit, and its time stays within 1.01. No case is
timed before its outputs were compared, with the drafts' own slots overwritten.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from ...cli import natural
from ..common import machine
from ..common.markdown import machine_line, table
from ..common.paired_stats import interval, rounded
from .timer import measure_all, samples

if TYPE_CHECKING:
    from .attention_backends import BackendCase, BackendLoad

#: vLLM's names of backends, and whether the cache may have 8-bit rows.
BACKENDS: Final[Mapping[str, bool]] = {
    "TRITON_ATTN": True,
    "TRITON_MLA": True,
    "FLASH_ATTN_MLA": False,
}

#: Layers of the model whose time is reported; work done once per step is spread over them.
LAYERS: Final = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the suite's arguments."""
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--requests", type=natural, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=natural, nargs="+", default=[1024, 8192])
    parser.add_argument("--blocks", type=natural, nargs="+", default=[16], help="rows per block")
    parser.add_argument("--rounds", type=natural, default=25)
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination, and print a line for each; with ``--save`` write the results.

    Returns:
        The exit code: 1 if a case was left out; 2 without a CUDA device.
    """
    if not torch.cuda.is_available():
        print("the benchmark of attention backends needs a CUDA device")
        return 2
    from .attention_backends import BackendCase

    points = itertools.product(args.backends, (False, True), args.blocks, args.context)
    cases = (
        BackendCase(backend, requests, context, fp8, block)
        for (backend, fp8, block, context), requests in itertools.product(points, args.requests)
        if BACKENDS[backend] or not fp8
    )
    here, found = torch.device("cuda"), {"suite": "backends"}
    return measure_all(
        found,
        cases,
        lambda case: measure(case, here, args.rounds),
        lambda row: [line(row)],
        args.save,
    )


def measure(case: BackendCase, device: torch.device, rounds: int) -> dict[str, Any]:
    """Compare the outputs of one case, then time both ways in turn.

    Returns:
        The case's row of the result file: layers that differ, median microseconds per layer, and
        ratios of blocks of one row to vLLM's, alone and with a step's table and commit.
    """
    from .attention_backends import LOADS

    load = LOADS[case.backend](case, device)
    different = differences(load)
    times = samples(
        {"blocks": [load.blocks] * 2, "rows": [load.by_row] * 2, "around": [load.around] * 2},
        rounds,
    )
    layers = len(load.caches)
    per = {name: [value / layers for value in times[name]] for name in ("blocks", "rows")}
    alone = [a / b for a, b in zip(per["rows"], per["blocks"], strict=True)]
    steps = [
        (a + around / LAYERS) / b
        for a, around, b in zip(per["rows"], times["around"], per["blocks"], strict=True)
    ]
    us = {name: statistics.median(found) for name, found in per.items()}
    return {
        **attrs.asdict(case),
        "different": different,
        "layers": layers,
        "us": {
            name: round(value, 2)
            for name, value in {**us, "around": statistics.median(times["around"])}.items()
        },
        "of_blocks": rounded(alone),
        "of_stock": rounded(steps),
    }


def differences(load: BackendLoad) -> int:
    """Count the layers whose output differs in a bit where drafts wait in spare slots.

    The drafts' own slots are overwritten in between, and stay so.
    """
    wanted = [out.clone() for out in load.blocks()]
    load.forget_drafts()
    found = [out.clone() for out in load.by_row()]
    return sum(
        not a.view(torch.uint8).equal(b.view(torch.uint8))
        for a, b in zip(wanted, found, strict=True)
    )


def line(row: Mapping[str, Any]) -> str:
    """Return a case as a line of text: microseconds per layer, ratios and bits."""
    us = "  ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    bits = f"{row['different']} of {row['layers']} layers differ"
    return (
        f"{row['backend']} {'fp8' if row['fp8'] else 'bf16'}, blocks of {row['block_size']}, "
        f"{row['requests']} x {row['context']}: {bits}; us per layer: {us}; "
        f"rows/blocks {interval(row['of_blocks'])}, a step's {interval(row['of_stock'])}"
    )


def bits(found: Mapping[str, Any]) -> str:
    """Return a sentence: of which backends how many layers have other bits than stock's."""
    rows = found["rows"]
    backends = ", ".join(dict.fromkeys(row["backend"] for row in rows))
    sizes = ", ".join(map(str, sorted({row["block_size"] for row in rows})))
    layers = sum(row["layers"] for row in rows)
    return (
        f"{backends}, blocks of {sizes} rows: {sum(row['different'] for row in rows)} of {layers} "
        f"layers differ in {len(rows)} cases. {machine_line(found['machine'])}."
    )


def report(found: Mapping[str, Any]) -> str:
    """Return a result as a Markdown table: layers that differ, microseconds per layer, ratios."""
    header = ["backend", "rows", "block size", "requests", "context", "layers that differ"]
    header += [
        "by blocks",
        "by row",
        "table and commit",
        "by row of by blocks",
        "a step of stock's",
    ]
    rows = [
        [
            *(row["backend"], "fp8" if row["fp8"] else "bf16", str(row["block_size"])),
            *(str(row["requests"]), str(row["context"])),
            f"{row['different']} of {row['layers']}",
            *(f"{row['us'][name]:.1f}" for name in ("blocks", "rows", "around")),
            *(interval(row["of_blocks"]), interval(row["of_stock"])),
        ]
        for row in found["rows"]
    ]
    says = f"Microseconds; a step has {LAYERS} layers, one table and one commit."
    return "\n\n".join([table(header, rows), says, f"{machine_line(found['machine'])}."])
