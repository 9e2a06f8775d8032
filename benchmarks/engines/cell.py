"""Cells of a ``kvtxn bench vllm`` result: rounds in which engines take turns, summed up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy

from ..common import paired_stats as paired
from . import audits
from .child import Measured
from .load import SCENARIOS, Point, Work
from .process import Engine

Counters = list[dict[str, float]]

#: In a result the times to first token of an engine's rounds with new prompts, in milliseconds.
NEW_PROMPTS: Final = "new_prompts_ms"


def measure(
    engines: Sequence[Engine],
    point: Point,
    work: Callable[..., Work],
    rounds: int,
    *,
    first_token_rounds: int = 0,
    clock: bool = False,
) -> dict[str, Any]:
    """Measure one cell: rounds in which every engine runs once, in a fair order.

    A first round warms up and is dropped. Returns the load's fields and, under ``engines`` by
    label, ``summary``, ``progress``, and with them ``host_us``, ``audit`` and ``of_stock`` where
    there are such.

    Args:
        engines: at least one, all ready.
        point: the load, as it goes into the result.
        work: makes the work of a round from its number; with ``new=True`` its prompts are new.
        rounds: how many are measured.
        first_token_rounds: how many more have new prompts, which are in no prefix cache, and
            generate only two tokens per request: the times to first token are then those of these
            rounds alone. None where requests arrive over time, since less would run at once.
        clock: time windows and audits on the host in one more round.
    """
    began = {engine.spec.label: engine.audited() for engine in engines}
    for engine in engines:
        engine.run(work(0))
    before = {engine.spec.label: engine.snapshot() for engine in engines}
    runs = _turns(engines, lambda turn: work(turn + 1), rounds)
    after = {engine.spec.label: engine.snapshot() for engine in engines}
    if SCENARIOS[point.scenario].mixed:
        first_token_rounds = 0
    short = _turns(
        engines, lambda turn: attrs.evolve(work(turn, new=True), max_tokens=2), first_token_rounds
    )
    found = {
        label: {**summary(runs[label], short[label]), **progress(before[label], after[label])}
        for label in runs
    }
    for engine in engines if clock else ():
        if engine.spec.policy != "stock":
            found[engine.spec.label]["host_us"] = engine.clock(work(rounds + 1))
        else:
            engine.run(work(rounds + 1))  # else the others draw ahead of it in the next cell
    for engine in engines:
        if engine.spec.audited:
            label = engine.spec.label
            found[label]["audit"] = audits.between(began[label], engine.audited())
    if "stock" in runs:
        for label in runs.keys() - {"stock"}:
            found[label]["of_stock"] = against(runs[label], runs["stock"])
            if ratios := first_tokens(found[label], found["stock"]):
                found[label]["of_stock"]["first_token_ms"] = attrs.asdict(paired.compare(ratios))
    return {**attrs.asdict(point), "engines": found}


def _turns(
    engines: Sequence[Engine], work: Callable[[int], Work], rounds: int
) -> dict[str, list[Measured]]:
    """Run every engine once per round, in a fair order; return its runs by label."""
    runs: dict[str, list[Measured]] = {engine.spec.label: [] for engine in engines}
    for turn in range(rounds):
        for place in paired.order(len(engines), turn):
            engine = engines[place]
            runs[engine.spec.label].append(engine.run(work(turn)))
    return runs


def summary(runs: Sequence[Measured], short: Sequence[Measured] = ()) -> dict[str, Any]:
    """Sum up one engine's rounds, for the result file.

    Args:
        runs: the measured rounds.
        short: extra rounds with new prompts; if there are any, the time to first token is theirs.

    Returns:
        Tokens per second, and milliseconds to the first token and per token, over all rounds; then
        each round's own numbers.
    """
    speeds = [run.generated / run.seconds for run in runs]
    return {
        "tokens_per_s": {
            "median": statistics.median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
        },
        "first_token_ms": _latency(run.first_token for run in short or runs),
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
        NEW_PROMPTS: [_median(run.first_token) for run in short],
    }


def _median(seconds: Sequence[float]) -> float | None:
    """Return the median of times in milliseconds; None without any time."""
    return 1000 * statistics.median(seconds) if seconds else None


def _latency(rounds: Iterable[Sequence[float]]) -> dict[str, float] | None:
    """Return the 50th and 95th percentile over the requests of all rounds, in ms.

    None without any.
    """
    values = [1000 * value for values in rounds for value in values]
    if not values:
        return None
    return {f"p{share}": float(numpy.percentile(values, share)) for share in (50, 95)}


def progress(before: Counters, after: Counters) -> dict[str, Any]:
    """Return by how much counters rose, by rank, and the share of steps with a window.

    Args:
        before: all counters of each rank.
        after: the same, later; empty for an engine that has none.

    Returns:
        ``counters``: counters by name, gauges left out; ``coverage``: a share of rank 0, None if it
        made no step.
    """
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
    windows = ranks[0].get("kvtxn_windows_total", 0)  # an engine may have an audit and no windows
    steps = windows + ranks[0].get("kvtxn_bypassed_windows_total", 0)
    return {"counters": ranks, "coverage": windows / steps if steps else None}


def against(mine: Sequence[Measured], stock: Sequence[Measured]) -> dict[str, Any]:
    """Compare an engine with stock round by round: ratios, and equality of the tokens.

    Ratios are the engine's by stock's, as ``paired_stats.Compared``. There are none per token if a
    round lacks such times. ``same_accepted`` and ``same_tokens`` are True if all rounds agree.
    """
    pairs = list(zip(mine, stock, strict=True))
    speeds = [(a.generated / a.seconds) / (b.generated / b.seconds) for a, b in pairs]
    counts = [((a.drafted, a.accepted), (b.drafted, b.accepted)) for a, b in pairs]
    found: dict[str, Any] = {
        "tokens_per_s": attrs.asdict(paired.compare(speeds)),
        "same_accepted": all(a == b for a, b in counts),
        "same_tokens": all(a.digest == b.digest for a, b in pairs),
    }
    values = [(a.per_token, b.per_token) for a, b in pairs]
    if all(a and b for a, b in values):
        ratios = [statistics.median(a) / statistics.median(b) for a, b in values]
        found["per_token_ms"] = attrs.asdict(paired.compare(ratios))
    return found


def first_tokens(mine: Mapping[str, Any], stock: Mapping[str, Any]) -> list[float]:
    """Return the time to first token divided by stock's, for each round that has both.

    An engine of an older result may lack times.
    """
    both = zip(_first_token_rounds(mine), _first_token_rounds(stock), strict=True)
    return [own / base for own, base in both if own and base]


def _first_token_rounds(engine: Mapping[str, Any]) -> list[float | None]:
    """List an engine's median time to first token in each round, in milliseconds.

    Of the rounds with new prompts, if there are any. Older results have rounds of two tokens with
    cached prompts, which count beside the others.
    """
    long = [each.get("first_token_ms") for each in engine["rounds"]]
    return engine.get(NEW_PROMPTS) or [*long, *engine.get("first_token_rounds_ms", ())]


def by_policy(cell: Mapping[str, Any]) -> list[str]:
    """List the engines of a cell that are not stock."""
    return [label for label in cell["engines"] if label != "stock"]
