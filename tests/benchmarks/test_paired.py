"""Turns are fair, and an interval holds the median as often as it says."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtxn.benchmarks.common.paired_stats import LEVEL, compare, order

VALUES = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_everyone_stands_everywhere(count):
    """In 2 x count rounds each takes each place twice: nobody always goes first."""
    places = Counter(
        (place, who) for turn in range(2 * count) for place, who in enumerate(order(count, turn))
    )
    assert set(places.values()) == {2}
    assert len(places) == count**2


@pytest.mark.parametrize("count", [2, 3])
def test_everyone_follows_everyone(count):
    """Each runs as often as any other after any one, which left the machine warm."""
    pairs = Counter()
    for turn in range(2 * count):
        turned = order(count, turn)
        pairs.update(pairwise(turned))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) == 1


@pytest.mark.parametrize("rounds", range(1, 26))
def test_the_interval_is_the_sign_tests(rounds):
    """Against the definition: as narrow as 95 % allows; below six rounds, the whole range."""
    found = compare([float(n) for n in range(rounds)])
    cut = int(found.low)
    assert found.high == rounds - 1 - cut
    outside = sum(math.comb(rounds, k) for k in range(cut + 1)) / 2**rounds
    assert found.confidence == pytest.approx(max(0.0, 1 - 2 * outside))
    if rounds >= 6:
        further = outside + math.comb(rounds, cut + 1) / 2**rounds
        assert 2 * outside <= 1 - LEVEL < 2 * further
    else:
        assert (cut, found.confidence < LEVEL) == (0, True)


@given(VALUES)
def test_order_and_direction_do_not_matter(values):
    """Shuffled it is the same; of the inverse ratios it is the inverse interval."""
    found = compare(values)
    assert found.low <= found.median <= found.high
    assert compare(values[::-1]) == found
    turned = compare([1 / value for value in values])
    assert turned.low == pytest.approx(1 / found.high)
    assert turned.high == pytest.approx(1 / found.low)


def test_it_tells_098_from_100():
    """Two per cent slower under noise of one per cent: 11 rounds show it, and no more."""
    chooser = random.Random(2)
    slower = compare([0.98 * chooser.uniform(0.99, 1.01) for _ in range(11)])
    same = compare([chooser.uniform(0.99, 1.01) for _ in range(11)])
    assert slower.high < 1
    assert same.low <= 1 <= same.high


@given(VALUES.filter(lambda values: len(values) > 5))
def test_the_interval_is_scipys(values):
    """The interval is scipy's for as many values as one takes."""
    stats = pytest.importorskip("scipy.stats")
    found, wanted = compare(values), stats.quantile_test(values).confidence_interval(LEVEL)
    assert (found.low, found.high) == (wanted.low, wanted.high)
