"""Comparing what took turns: in which order, and whether a difference is one.

A ratio is taken within a round, where both ran seconds apart on the same work, and the ratios
of all rounds give a median and an interval for it. The interval is the sign test's, turned
round: between two of the sorted ratios, whatever their distribution (Conover, Practical
Nonparametric Statistics, 3rd ed., section 3.2). With fewer than six rounds no such interval
reaches 95 %; it is then the whole range, and says what it does reach.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import attrs

#: How sure an interval is meant to be.
LEVEL: Final = 0.95


@attrs.frozen(kw_only=True)
class Compared:
    """A median and where it lies.

    Attributes:
        median: of the values.
        low: lower end of the interval.
        high: upper end.
        confidence: chance that such an interval holds the true median.
        rounds: number of values.
    """

    median: float
    low: float
    high: float
    confidence: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def order(count: int, turn: int) -> list[int]:
    """Who runs in which place in a round; a fair schedule over ``2 * count`` rounds.

    Each of ``count`` stands in each place twice, and comes right after each other one equally
    often up to one: the cyclic shifts of an order and of its reverse, in turns.

    Args:
        count: how many take turns.
        turn: number of the round, from 0.
    """
    shift, backwards = divmod(turn, 2)
    turned = [(place + shift) % count for place in range(count)]
    return turned[::-1] if backwards else turned


def compare(values: Sequence[float]) -> Compared:
    """The median of some values, at least one, and an interval for it."""
    ordered = sorted(values)
    count = len(ordered)
    cut, missed = 0, 2 * 0.5**count  # the chance that all lie on one side of the median
    while True:
        more = missed + 2 * math.comb(count, cut + 1) * 0.5**count
        if more > 1 - LEVEL or 2 * (cut + 1) >= count - 1:
            break
        cut, missed = cut + 1, more
    return Compared(
        median=statistics.median(ordered),
        low=ordered[cut],
        high=ordered[count - 1 - cut],
        confidence=max(0.0, 1 - missed),
        rounds=count,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, between neighbours in proportion.

    Args:
        values: at least one.
        share: 0 to 1.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
