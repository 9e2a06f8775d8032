"""Comparing runs that take turns: a fair order of turns, and a median with an interval.

A ratio is taken within a round, where both ran seconds apart on the same work, and the ratios
of all rounds give a median and an interval for it. The interval is the sign test's, turned
round: between two of the sorted ratios, whatever their distribution (Conover, Practical
Nonparametric Statistics, 3rd ed., section 3.2). With fewer than six rounds no such interval
reaches 95 %; it is then the whole range, and says what it does reach.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import attrs

#: How sure an interval is meant to be.
LEVEL: Final = 0.95


@attrs.frozen(kw_only=True)
class Compared:
    """A median and where it lies.

    Attributes:
        median: median of the values.
        low: lower end of the interval.
        high: upper end of the interval.
        confidence: chance that such an interval holds the true median.
        rounds: number of values.
    """

    median: float
    low: float
    high: float
    confidence: float
    rounds: int


def order(count: int, turn: int) -> list[int]:
    """Return the order of a round's runs; fair over ``2 * count`` rounds.

    Each of ``count`` stands in each place twice, and comes right after each other one equally
    often up to one: the cyclic shifts of an order and of its reverse, in turns.

    Args:
        count: number of runs that take turns.
        turn: number of the round, from 0.
    """
    shift, backwards = divmod(turn, 2)
    turned = [(place + shift) % count for place in range(count)]
    return turned[::-1] if backwards else turned


def compare(values: Sequence[float]) -> Compared:
    """Find the median of at least one value, and an interval for it.

    ``scipy.stats.quantile_test(values).confidence_interval()`` is the same interval, where there is
    one; this one also says how sure it is, and needs no scipy where GPUs are measured.
    """
    ordered, count = sorted(values), len(values)
    # How likely at most 0, 1, ... of the values lie below the median.
    tails = list(accumulate(math.comb(count, k) / 2**count for k in range((count + 1) // 2)))
    cut = max(0, bisect_right(tails, (1 - LEVEL) / 2) - 1)
    return Compared(
        median=statistics.median(ordered),
        low=ordered[cut],
        high=ordered[count - 1 - cut],
        confidence=max(0.0, 1 - 2 * tails[cut]),
        rounds=count,
    )


def rounded(values: Sequence[float]) -> dict[str, float]:
    """Compare values as ``compare`` does, for a result file: its fields with four decimals."""
    return {name: round(value, 4) for name, value in attrs.asdict(compare(values)).items()}


def interval(found: Mapping[str, float], decimals: int = 3) -> str:
    """Show the fields of a ``Compared``: the median, and the interval in brackets."""
    median, low, high = (f"{found[name]:.{decimals}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"
