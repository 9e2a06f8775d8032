"""Cells of a ``kvtxn bench vllm`` result: rounds of turns, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from . import paired
from .vllm_child import Measured
from .vllm_engine import Engine, Switched
from .vllm_work import Point, Work

Counters = list[dict[str, float]]

#: What takes turns.
Takes = Engine | Switched


def measure(
    engines: Sequence[Takes],
    point: Point,
    work: Callable[[int], Work],
    rounds: int,
    *,
    clock: bool = False,
) -> dict[str, Any]:
    """One cell: rounds in which every engine runs once, in a fair order.

    A first round warms up and is dropped.

    Args:
        engines: at least one, all ready.
        point: the load, as it goes into the result.
        work: what to do in a round, by its number.
        rounds: how many are measured.
        clock: whether windows are timed on the host in one more round.
    """
    for engine in engines:
        engine.run(work(0))
    before = {engine.spec.label: engine.snapshot() for engine in engines}
    runs: dict[str, list[Measured]] = {engine.spec.label: [] for engine in engines}
    for turn in range(rounds):
        for place in paired.order(len(engines), turn):
            engine = engines[place]
            runs[engine.spec.label].append(engine.run(work(turn + 1)))
    after = {engine.spec.label: engine.snapshot() for engine in engines}
    found = {
        label: {**summary(runs[label]), **progress(before[label], after[label])} for label in runs
    }
    for engine in engines if clock else ():
        if engine.spec.policy != "stock":
            found[engine.spec.label]["host_us"] = engine.clock(work(rounds + 1))
        else:
            engine.run(work(rounds + 1))  # else the others draw ahead of it in the next cell
    if "stock" in runs:
        for label in runs.keys() - {"stock"}:
            found[label]["of_stock"] = against(runs[label], runs["stock"])
    return {**attrs.asdict(point), "engines": found}


def summary(runs: Sequence[Measured]) -> dict[str, Any]:
    """One engine's rounds, and what they come to."""
    speeds = [run.generated / run.seconds for run in runs]
    return {
        "tokens_per_s": {
            "median": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
        },
        "first_token_ms": _latency(run.first_token for run in runs),
        "per_token_ms": _latency(run.per_token for run in runs),
        "rounds": [
            {
                "seconds": run.seconds,
                "generated": run.generated,
                "drafted": run.drafted,
                "accepted": run.accepted,
                "digest": run.digest,
                **{
                    f"{name}_ms": _median(getattr(run, name))
                    for name in ("first_token", "per_token")
                },
            }
            for run in runs
        ],
    }


def _median(seconds: Sequence[float]) -> float | None:
    """In milliseconds; None without any."""
    return 1000 * statistics.median(seconds) if seconds else None


def _latency(rounds: Iterable[Sequence[float]]) -> dict[str, float] | None:
    """Percentiles over the requests of all rounds, in milliseconds; None without any."""
    values = [1000 * value for values in rounds for value in values]
    if not values:
        return None
    return {f"p{share}": paired.percentile(values, share / 100) for share in (50, 95)}


def progress(before: Counters, after: Counters) -> dict[str, Any]:
    """What the plug-in counted in between, per rank, and the share of steps that had a window."""
    if not after:
        return {"counters": [], "coverage": None}
    ranks = [
        {
            name: value - old.get(name, 0)
            for name, value in new.items()
            if name.endswith("_total") or "_total_" in name
        }
        for old, new in zip(before, after, strict=True)
    ]
    windows = ranks[0]["kvtxn_windows_total"]
    steps = windows + ranks[0]["kvtxn_bypassed_windows_total"]
    return {"counters": ranks, "coverage": windows / steps if steps else None}


def against(mine: Sequence[Measured], stock: Sequence[Measured]) -> dict[str, Any]:
    """Round by round beside stock: ratios, and whether the same came out."""
    pairs = list(zip(mine, stock, strict=True))
    speeds = [(a.generated / a.seconds) / (b.generated / b.seconds) for a, b in pairs]
    counts = [((a.drafted, a.accepted), (b.drafted, b.accepted)) for a, b in pairs]
    found: dict[str, Any] = {
        "tokens_per_s": attrs.asdict(paired.compare(speeds)),
        "same_accepted": all(a == b for a, b in counts),
        "same_tokens": all(a.digest == b.digest for a, b in pairs),
    }
    for name in ("first_token", "per_token"):
        values = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
        if all(a and b for a, b in values):
            ratios = [statistics.median(a) / statistics.median(b) for a, b in values]
            found[f"{name}_ms"] = attrs.asdict(paired.compare(ratios))
    return found


def by_policy(cell: Mapping[str, Any]) -> list[str]:
    """The engines of a cell that are not stock."""
    return [label for label in cell["engines"] if label != "stock"]
