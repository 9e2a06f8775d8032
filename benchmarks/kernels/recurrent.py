"""GPU time of verify steps over recurrent states: stock, ``recurrent="exact"`` and ``"fast"``.

Everything is measured in one run, by graph replays in turn, each with cold states:

- ``stock``: the engine's operator of all layers, which writes a state per row;
- ``stage``, ``read``, ``commit``: what ``exact`` does in its place: keep the rows, verify without
  writing a state, and write one state per request, of all layers each; ``together`` is the commit
  as captured graphs have it, several layers side by side;
- ``fast``: what ``recurrent="fast"`` does in its place: verify and commit by kvtxn's own kernels;
- ``floor``: a plain copy of as many bytes as the states have, one read and one written.

No case is timed before ``exact`` left stock's states, and ``fast`` those of its reference.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from ...cli import natural
from ..common import conformance_gate as kit
from ..common import machine
from ..common.markdown import machine_line, table
from ..common.model_shapes import STATES, StateCase
from ..common.paired_stats import interval, rounded
from .timer import measure_all
from .timer import samples as graph_samples

if TYPE_CHECKING:
    from .state_workload import StateWorkload  # needs Triton, which the command line does not
    from .vllm_state_ops import VllmOps

Step = Callable[[], object]
Samples = Callable[[Mapping[str, Sequence[Step]]], dict[str, list[float]]]

#: Tests of the conformance kit that have to hold before a number may be written.
GATE: Final = ("test_replayed_states", "test_every_accepted_count", "test_masks_with_gaps")

#: Parts of a step with ``exact``: without captured graphs, and with them.
_PARTS: Final = ("stage", "read", "commit")
_CAPTURED: Final = ("stage", "read", "together")
_EVERY: Final = ("stock", *_PARTS, "together")

#: Parts of a step with ``fast``; the norm is part of stock's fused kernel; Mamba-2 has none.
_FAST: Final = ("verify", "norm", "commit")

#: Calls by which the host's time is measured.
_HOST_CALLS: Final = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suite's arguments to its parser."""
    parser.add_argument(
        "--models", nargs="+", choices=STATES, default=["qwen3.5-9b", "nemotron-h-8b"]
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--requests", type=natural, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafts", type=natural, nargs="+", default=[1, 4])
    machine.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every combination, and print a line for each kernel.

    With ``--save`` write the results. Before a result is to be written, a part of the conformance
    kit has to pass.

    Returns:
        The exit code: 1 if a case was left out; 2 without a CUDA device or vLLM.
    """
    if not torch.cuda.is_available():
        print("the benchmark of recurrent states needs a CUDA device")
        return 2
    if find_spec("vllm") is None:
        print("the benchmark of recurrent states needs vLLM's own kernels")
        return 2
    passed = kit.passed("ReplayConformance", GATE) if args.save else ""
    points = itertools.product(args.models, args.dtypes, args.drafts, args.requests)
    cases = (StateCase(model, dtype, requests, drafts) for model, dtype, drafts, requests in points)
    measured = partial(measure, device=torch.device("cuda"))
    return measure_all({"suite": "recurrent", "gate": passed}, cases, measured, lines, args.save)


def measure(
    case: StateCase,
    device: torch.device,
    samples: Samples = graph_samples,
    turns: int | None = None,
) -> dict[str, Any]:
    """Check one case, then time all of its candidates in turn.

    Args:
        case: the model and the step.
        device: where.
        samples: times candidates, in microseconds per step and round.
        turns: steps over distinct states; None makes as many as find their states cold.

    Raises:
        AssertionError: a commit left other bytes than it should have; nothing is timed then.
    """
    from .fast_states import FastMamba2, FastStates
    from .state_workload import StateWorkload
    from .vllm_state_ops import operators

    load = StateWorkload(case, device, turns)
    kernels: dict[str, Any] = {}
    candidates: dict[str, Sequence[Step]] = {"floor": load.copies()}
    fast = {"gated_delta": FastStates, "mamba2": FastMamba2}[case.shape.kind](load)
    fast.check()
    candidates |= fast.steps()
    eager: dict[str, Sequence[Step]] = {"fast": fast.steps()["fast: commit"]}
    for ops in operators(load):
        for part in _EVERY if ops.exact else _EVERY[:1]:
            run_part = getattr(ops, part)
            candidates[f"{ops.name}: {part}"] = [
                lambda run_part=run_part, turn=turn: run_part(turn)  # type: ignore[misc]
                for turn in load.turns
            ]
        kernels[ops.name] = {}
        if not ops.exact:
            continue
        check_exact(load, ops, _PARTS)
        check_exact(load, ops, _CAPTURED)
        eager[ops.name] = [lambda ops=ops: ops.commit(load.turns[0])]  # type: ignore[misc]
        captured = ops.captured()
        if captured is not None:
            eager[f"{ops.name}: captured"] = [captured]
        kernels[ops.name] = {"buffer_bytes": ops.nbytes, "formula_bytes": ops.formula}
    times = samples(candidates)
    host = {name: host_time(steps[0]) for name, steps in eager.items()}
    for name, found in kernels.items():
        if name not in eager:
            found["us"] = {"stock": _median(times[f"{name}: stock"])}
            continue
        found |= of_kernel({part: times[f"{name}: {part}"] for part in _EVERY})
        found["host_us"] = host[name]
        found["captured_host_us"] = host.get(f"{name}: captured")
    return {
        **attrs.asdict(case),
        "layers": case.shape.layers,
        "state_bytes": load.step_bytes,
        "freed_bytes": case.drafts * load.step_bytes,
        "kernels": kernels,
        "floor": _median(times["floor"]),
        "fast": of_fast(times, [*kernels], fast.nbytes, host["fast"]),
    }


def of_fast(
    times: Mapping[str, Sequence[float]], kernels: Sequence[str], nbytes: int, host: float
) -> dict[str, Any]:
    """Put the medians of the fast kernels together, and their shares of stock's and the floor's.

    Beside stock's fused kernel, which applies the gated norm, that norm is counted.

    Args:
        times: microseconds of each round, by the part's name.
        kernels: stock's kernels.
        nbytes: of the buffers.
        host: microseconds of the commit on the host.
    """
    parts = {part: times[f"fast: {part}"] for part in _FAST if f"fast: {part}" in times}
    both, whole = (
        [sum(each) for each in zip(*(parts[name] for name in names), strict=True)]
        for names in (("verify", "commit"), parts)
    )
    return {
        "us": {name: _median(found) for name, found in parts.items()} | {"fast": _median(both)},
        "of_stock": {
            name: _ratios(whole if "fused" in name else both, times[f"{name}: stock"])
            for name in kernels
        },
        "of_floor": _ratios(parts["commit"], times["floor"]),
        "buffer_bytes": nbytes,
        "host_us": host,
    }


def check_exact(load: StateWorkload, ops: VllmOps, parts: Sequence[str]) -> None:
    """Compare the states that ``exact`` leaves in the first and the last layer with stock's.

    ``parts`` name the methods that make up a step with ``exact``. The first turn's states stay as
    ``exact`` left them.

    Raises:
        AssertionError: they differ in a bit, or another block of the turn changed.
    """
    turn = load.turns[0]
    fresh = attrs.evolve(turn, before=torch.ones_like(turn.before))
    blocks = turn.table.long()
    kept = blocks.gather(1, turn.sampled.long()[:, None] - 1)[:, 0]
    ends = load.states[0], load.states[-1]
    before = [states[blocks] for states in ends]
    ops.stock(fresh)
    expected = [states[kept] for states in ends]
    for states, was in zip(ends, before, strict=True):
        states[blocks] = was
    for part in parts:
        getattr(ops, part)(fresh)
    for states, wanted, was in zip(ends, expected, before, strict=True):
        found = states[blocks]
        same = torch.equal(found[:, 0], wanted) and torch.equal(found[:, 1:], was[:, 1:])
        if not same:
            raise AssertionError(f"a commit by {ops.name} differs from stock: {load.case}")


def of_kernel(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Put one kernel's medians together, and the time of all parts as a share of stock's.

    ``added`` is what ``exact`` does beside verifying, with captured graphs.
    """
    exact, captured, added = (
        [sum(parts) for parts in zip(*(times[part] for part in names), strict=True)]
        for names in (_PARTS, _CAPTURED, ("stage", "together"))
    )
    return {
        "us": {part: _median(found) for part, found in times.items()}
        | {"added": _median(added), "exact": _median(captured)},
        "of_stock": _ratios(captured, times["stock"]),
        "of_stock_layer_by_layer": _ratios(exact, times["stock"]),
    }


def host_time(step: Step) -> float:
    """Return the median microseconds that the host needs for a call outside of a graph.

    The device is idle before each call.
    """
    times = []
    for _ in range(_HOST_CALLS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a full queue would make the host wait
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    return _median(times)


def _median(values: Sequence[float]) -> float:
    """Return the median, rounded to two decimals."""
    return round(statistics.median(values), 2)


def _ratios(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the median ratio of pairs with its interval, as ``rounded`` does."""
    return rounded([a / b for a, b in zip(values, others, strict=True)])


def _interval(found: Mapping[str, float]) -> str:
    """Show a ratio and its interval with two decimals."""
    return interval(found, decimals=2)


def lines(row: Mapping[str, Any]) -> list[str]:
    """Return the lines of text of one case, in microseconds.

    Per kernel, of ``fast``, and the floor's.
    """
    where = f"{row['model']} {row['dtype']}, {row['requests']} requests, k = {row['drafts']}"
    found = []
    for name, kernel in row["kernels"].items():
        us = "  ".join(f"{part} {value:.1f}" for part, value in kernel["us"].items())
        of = f"  exact/stock {_interval(kernel['of_stock'])}" if "of_stock" in kernel else ""
        found.append(f"{where}, {name}: {us}{of}")
    if row.get("fast"):
        fast = row["fast"]
        us = "  ".join(f"{part} {value:.1f}" for part, value in fast["us"].items())
        shares = "  ".join(f"of {name} {_interval(of)}" for name, of in fast["of_stock"].items())
        found.append(f"{where}, fast: {us}  {shares}  commit/floor {_interval(fast['of_floor'])}")
    return [*found, f"{where}: floor {row['floor']:.1f}"]


def report(found: Mapping[str, Any]) -> str:
    """Return a result as Markdown tables: kernels and stock in microseconds, memory in MiB."""
    rows, sizes = [], []
    most = max(row["requests"] for row in found["rows"])
    for row in found["rows"]:
        where = [row["model"], row["dtype"], str(row["drafts"]), str(row["requests"])]
        for name, kernel in row["kernels"].items():
            if "of_stock" not in kernel:  # no window verifies by it
                continue
            us = kernel["us"]
            cells = [f"{us[part]:.0f}" for part in _EVERY]
            host = [kernel["host_us"], kernel["captured_host_us"]]
            cells += [_interval(kernel["of_stock"])]
            cells += ["-" if time is None else f"{time:.0f}" for time in host]
            rows.append([", ".join([*where[:2], name]), *where[2:], *cells])
            if row["requests"] == most:
                freed = row["freed_bytes"]
                parts = [kernel["formula_bytes"], kernel["buffer_bytes"], freed]
                shown = [f"{part / 2**20:.1f}" for part in parts]
                share = f"{100 * kernel['formula_bytes'] / freed:.1f} %"
                sizes.append([", ".join([*where[:2], name]), *where[2:], *shown, share])
    header = ["states, kernel", "k", "requests", *_EVERY, "stage + read + together of stock"]
    header += ["host, commit", "host, captured"]
    memory = ["states, kernel", "k", "requests", "MiB by formula", "allocated", "freed", "share"]
    parts = [table(header, rows), "Microseconds, all layers.", table(memory, sizes)]
    parts += fast_table(found["rows"])
    return "\n\n".join([*parts, f"{machine_line(found['machine'])}."])


def sentence(found: Mapping[str, Any]) -> str:
    """Return a sentence on a verify step's share of stock's time, at the most requests and at one.

    It is about Qwen3.5-9B with float32 states, compared with vLLM's fused kernel.
    """
    kernel = "vLLM's, fused"
    rows = [
        row
        for row in found["rows"]
        if (row["model"], row["dtype"]) == ("qwen3.5-9b", "float32") and kernel in row["kernels"]
    ]
    one, most = (by(rows, key=lambda row: row["requests"]) for by in (min, max))
    fast, exact = (
        [each["median"] for each in pair]
        for pair in (
            [row["fast"]["of_stock"][kernel] for row in (most, one)],
            [row["kernels"][kernel]["of_stock"] for row in (most, one)],
        )
    )
    return (
        f"With {most['requests']} requests and {most['drafts']} drafts each, the kernels of a "
        f"verify step of Qwen3.5-9B take {fast[0]:.2f} of stock's time with `fast` and "
        f"{exact[0]:.2f} with `exact`; with one request {fast[1]:.2f} and {exact[1]:.2f}."
    )


def fast_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a list with a table of the fast kernels and stock's; [] if no row has them."""
    lines = []
    for row in rows:
        fast = row.get("fast") or {"of_stock": {}}
        for name, of in fast["of_stock"].items():
            us = [row["kernels"][name]["us"]["stock"]]
            us += [fast["us"].get(part, "-") for part in _FAST]
            where = ", ".join([row["model"], row["dtype"], name]), row["drafts"], row["requests"]
            cells = [
                *map(str, where),
                *(each if each == "-" else f"{each:.0f}" for each in us),
                _interval(of),
            ]
            cells += [_interval(fast["of_floor"]), f"{fast['buffer_bytes'] / 2**20:.1f}"]
            lines.append([*cells, f"{fast['host_us']:.0f}"])
    header = ["states, kernel of stock", "k", "requests", "stock", *_FAST]
    header += ["fast of stock", "commit of a copy", "MiB staged", "host, commit"]
    return [table(header, lines)] if lines else []
