"""Kernels beside kernels: SGLang's replay ring for gated delta nets, and kvtxn's own.

python tests/gpu/sglang_rings.py OUT [--seconds 75]

A step of each is what its engine launches between the convolution and the gated norm, of all
layers, and at the commit; the convolution and its rollback are in neither:

- SGLang: ``gdn_replayssm_spec_decode(launch_mode="verify", null_block_id=-1)`` per layer, then
  ``commit_gdn_replayssm_spec`` and ``commit_gdn_replayssm_circular``, once for all layers, with
  ring rows of bfloat16 and their low parts (gdn_backend.py:1488, spec_utils.py:1113 of 0.5.23).
- kvtxn: ``launch_verify`` per layer and ``launch_advance`` once for all layers.

Same inputs, same accepted counts. Two sets of requests in turns (verify A, verify B, commit A,
commit B), so between two uses of a state lie all states of the other set: L2 is cold. OUT gets
``rings.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import sglang_ring_steps as ring_steps
import torch
from sglang_machine import where
from sglang_ring_steps import HV, LAYERS, REQUESTS, SETS, H, Inputs, K, Steps, V

LENGTHS: Final = (16, 32)
DRAFTS: Final = (4, 7)
ROUNDS: Final = 31
#: Steps that are held against the recurrence.
CHECKED: Final = 6
PARTS: Final = ("verify", "commit")


# -- timing -------------------------------------------------------------------------------


class Graph:
    """Calls in one CUDA graph, after some of them have compiled their kernels."""

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls[: 2 * SETS]:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.graph.replay()
        torch.cuda.synchronize()

    def microseconds(self) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        return 1000 * start.elapsed_time(stop)


def compared(calls: Mapping[str, Sequence[Callable[[], None]]], per: int) -> dict[str, Any]:
    """Time the calls of both by turns, in microseconds per step."""
    graphs = {name: Graph(each) for name, each in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for number in range(ROUNDS):
        for name in names if number % 2 == 0 else names[::-1]:
            times[name].append(graphs[name].microseconds() / per)
    found = {name: spread(values) for name, values in times.items()}
    pairs = zip(*(times.get(name, ()) for name in ("kvtxn", "sglang")), strict=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    return found | ({"ratio": spread(ratios)} if ratios else {})


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile."""
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    found = {"median": statistics.median(values), "p20": fifths[0], "p80": fifths[-1]}
    found |= {"min": min(values), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()} | {"rounds": len(values)}


# -- what each must move ------------------------------------------------------------------


def history(given: Inputs, length: int, replays: int) -> dict[str, float]:
    """Follow the ring's cursors on the host: rows of history per verify, and folds per step."""
    seen = folds = lines = total = 0
    at = torch.zeros(SETS, given.requests, dtype=torch.int64)
    for number in range(replays * given.steps):
        seen += int(at.sum())
        at = at + given.lots[number % given.steps]
        full = at + 2 * given.width > length
        lines += int(at[full].sum())
        folds += int(full.sum())
        at = torch.where(full, torch.zeros_like(at), at)
        total += at.numel()
    return {
        "rows_in_ring_at_verify": round(seen / total, 3),
        "folds_per_request_and_step": round(folds / total, 3),
        "rows_per_fold": round(lines / max(1, folds), 3),
        "mean_count": round(given.lots.double().mean().item(), 3),
    }


def traffic(given: Inputs, length: int, past: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Count the bytes that each must move per step, of all layers; each tensor's bytes once."""
    state, width = 4 * HV * V * K, given.width
    rows = width * (2 * (2 * H * K + HV * V + 2 * HV) + 2 * HV * V)  # q, k, v, a, b and outputs
    line = 2 * (HV * V + H * K)  # a line of d and k of one part
    written, read = 2 * line + 4 * HV, line + 4 * HV
    kept = 4 * (H * K + HV * V + HV)
    found = {
        "sglang": {
            "verify": state + rows + past["rows_in_ring_at_verify"] * read + width * written,
            "commit": past["folds_per_request_and_step"] * (2 * state + length * written),
        },
        "kvtxn": {
            "verify": state + rows + width * kept,
            "commit": 2 * state + past["mean_count"] * kept,
        },
    }
    scale = LAYERS * given.requests
    return {
        name: {part: round(scale * count) for part, count in parts.items()}
        | {"step": round(scale * sum(parts.values()))}
        for name, parts in found.items()
    }


# -- cells --------------------------------------------------------------------------------


def calls(way: Steps, steps: int, *parts: str) -> list[Callable[[], None]]:
    """List the calls of steps, each part for all sets before the next one."""
    return [
        partial(getattr(way, part), turn, step)
        for step in range(steps)
        for part in parts
        for turn in range(SETS)
    ]


def cell(ring: Any, fast: Any, drafts: int, requests: int, parts: bool) -> dict[str, Any]:
    """Check and time both with so many drafts and requests; *parts* alone, too."""
    steps = 4 if requests > 64 else 8
    given = Inputs(requests, drafts, steps)
    ways: dict[str, Steps] = {"kvtxn": fast, "sglang": ring}
    for way in ways.values():
        way.use(given)
        generator = torch.Generator(device="cuda").manual_seed(3)
        for layer in (0, LAYERS - 1):  # so that both begin alike where they are compared
            way.states[layer].normal_(std=0.3, generator=generator)
    ring.reset()
    row: dict[str, Any] = {"drafts": drafts, "requests": requests, "ring_length": ring.length}
    row |= {"layers": LAYERS, "steps_per_replay": steps, "sets": SETS}
    row["check"] = {n: ring_steps.check(way, given, CHECKED) for n, way in ways.items()}
    ring.reset()
    whole = {name: calls(way, steps, *PARTS) for name, way in ways.items()}
    row["us_per_step"] = compared(whole, steps * SETS)
    row["ring"] = history(given, ring.length, 32)
    row["bytes_per_step"] = traffic(given, ring.length, row["ring"])
    row["GB_per_s"] = {
        name: round(row["bytes_per_step"][name]["step"] / row["us_per_step"][name]["median"] / 1000)
        for name in ways
    }
    slots = given.slots[0].long()
    row["finite_afterwards"] = {
        name: bool(torch.isfinite(way.states[-1][slots]).all()) for name, way in ways.items()
    }
    if parts:
        some = min(steps, 4)
        row["parts"] = {
            part: compared({n: calls(way, some, part) for n, way in ways.items()}, SETS * some)
            for part in PARTS
        }
    return row


def states() -> torch.Tensor:
    """Draw the states of one side."""
    shape = (LAYERS, ring_steps.SLOTS, HV, V, K)
    made = torch.empty(shape, dtype=torch.float32, device="cuda")
    for layer in made:
        layer.normal_(std=0.3)
    return made


def measure(whole: bool, seconds: float, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure cell by cell; a cell that fails leaves its traceback, and the next one begins.

    Args:
        whole: import SGLang's package, not the file of the ring alone.
        seconds: cells of the longer ring that would begin near this end are left out.
        keep: is given the results after each cell.
    """
    begun = time.perf_counter()
    found: dict[str, Any] = {"errors": [], "cells": [], "left_out": [], "shape": ring_steps.SHAPE}
    module = ring_steps.ring_functions(whole)
    theirs, fast = states(), ring_steps.Fast(states())
    for length in LENGTHS:
        ring = None  # frees the shorter one's tensors
        gc.collect()
        ring = ring_steps.Ring(module, theirs, length)
        first = length == LENGTHS[0]
        for drafts in DRAFTS if first else DRAFTS[::-1]:
            for requests in REQUESTS:
                left = seconds - (time.perf_counter() - begun)
                if left < 15 and not first:
                    found["left_out"].append([length, drafts, requests])
                    continue
                try:
                    parts = first and left > 20
                    found["cells"].append(cell(ring, fast, drafts, requests, parts))
                except Exception:
                    torch.cuda.empty_cache()
                    traceback.print_exc()
                    name = f"{length} {drafts} {requests}"
                    found["errors"].append({"where": name, "traceback": traceback.format_exc()})
                keep(found)
    return found


def main() -> None:
    """Measure, and print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=lambda path: Path(path).resolve(), help="folder")
    parser.add_argument("--seconds", type=float, default=75, help="begin no cell near this end")
    parser.add_argument("--whole", action="store_true", help="import SGLang's package")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    facts = where(given.out)

    def keep(found: dict[str, Any]) -> None:
        (given.out / "rings.json").write_text(json.dumps({**facts, **found}, indent=1) + "\n")

    found = measure(given.whole, given.seconds, keep)
    keep(found)
    for row in found["cells"]:
        name = "k={drafts} requests={requests} ring={ring_length}".format_map(row)
        near = all(each["ok"] for each in row["check"].values())
        times = {key: each["median"] for key, each in row["us_per_step"].items()}
        print(name, times, "" if near else "NOT NEAR")


if __name__ == "__main__":
    main()
