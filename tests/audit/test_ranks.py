"""Ranks of one engine: who wrote something else is found, with the first step and group."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_kit.engine import SmallEngine
from ledger_kit.life import GROUPS as ENGINES
from ledger_kit.life import live, new_engine, new_ledger

from kvtxn.audit import Key, Ledger, RowGroup, StateGroup, Step, compare_ranks
from kvtxn.audit.books import FINGERPRINTS

GROUPS = (RowGroup("full", 4, 10), RowGroup("other", 4, 10), StateGroup("mamba", 6))
KEY = Key.derived("the ranks' secret")


def rank(steps, **named):
    """A rank's ledger after some steps: each (token, slot, slot of the other group, state)."""
    ledger = Ledger(GROUPS, max_requests=2, max_length=2000, key=KEY, **named)
    ledger.admit("a", [7])
    for position, (token, slot, other, state) in enumerate(steps):
        step = Step(
            lines=torch.tensor([ledger.line("a")]),
            starts=torch.tensor([0, 1]),
            first=torch.tensor([position]),
            tokens=torch.tensor([token]),
            slots={
                "full": torch.tensor([slot]),
                "other": torch.tensor([other]),
                "mamba": torch.tensor([state]),
            },
        )
        ledger.write(step)
    return ledger


STEPS = [(7, 4, 4, 1), (8, 5, 5, 2), (9, 6, 6, 1), (10, 7, 7, 2)]


def changed(step, field, value):
    """The same steps, with one number of one step changed."""
    steps = [list(each) for each in STEPS]
    steps[step][field] = value
    return steps


def said(found):
    return [[(v.kind, v.step, v.group, v.request) for v in rank] for rank in found]


def test_ranks_that_wrote_the_same():
    prints = [rank(STEPS).fingerprints() for _ in range(3)]
    assert prints[0] == prints[1] == prints[2]
    assert compare_ranks(prints) == [[], [], []]
    assert [*prints[0]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value", "group"),
    [(0, 99, "full"), (1, 8, "full"), (2, -1, "other"), (3, 5, "mamba")],
)
def test_the_first_step_and_group_that_differ(field, value, group):
    """Once, however many steps follow; the majority is right."""
    step = 2
    wrong = rank(changed(step, field, value)).fingerprints()
    right = rank(STEPS).fingerprints()
    assert said(compare_ranks([right, wrong, right])) == [
        [], [("ranks", step + 1, group, None)], []
    ]  # fmt: skip
    assert said(compare_ranks([wrong, right, right]))[0] == [("ranks", step + 1, group, None)]
    assert said(compare_ranks([right, wrong])) == [[], [("ranks", step + 1, group, None)]]


def test_ranks_may_be_apart_in_time_and_some_may_have_none():
    """They are read when they are asked for; nothing has to be at one step."""
    ahead = rank([*STEPS, (11, 8, 8, 1)]).fingerprints()
    assert compare_ranks([rank(STEPS).fingerprints(), ahead, {}]) == [[], [], []]
    assert compare_ranks([]) == []


def test_a_difference_that_left_the_ring_is_still_found():
    """A fingerprint is over everything before it, so the oldest step that is left differs."""
    long = [(position % 50, 4, 4, 1) for position in range(FINGERPRINTS + 20)]
    other = [(1, 5, 4, 1), *long[1:]]
    prints = [rank(steps).fingerprints() for steps in (long, other)]
    assert len(prints[0]) == FINGERPRINTS - 1
    assert said(compare_ranks(prints)) == [[], [("ranks", 22, "full", None)]]


def test_a_ledger_counts_its_own_difference_once():
    one, other = rank(STEPS), rank(changed(2, 0, 99))
    for _ in range(2):
        other.compare_ranks(rank(STEPS).fingerprints())
        other.compare_ranks(one.fingerprints())
        one.compare_ranks(rank(STEPS).fingerprints())
    (violation,) = other.violations()
    assert (violation.kind, violation.step, violation.group) == ("ranks", 3, "full")
    assert other.counters()["kvtxn_audit_violations_total_ranks"] == 1
    assert one.violations() == []


def test_a_copy_from_before_a_restart_says_nothing():
    """What it counted was forgotten; the steps that follow have its numbers again."""
    ledger = rank(changed(1, 0, 99))
    ledger.publish("a", "full", [2], 0, 4)
    stale = ledger.copy_counters()
    assert ledger.findings.has_more(stale)
    ledger.restart()
    assert ledger.fingerprints(stale) == {}
    assert not ledger.findings.has_more(stale)
    ledger.compare_ranks(rank(STEPS).fingerprints(), stale)
    assert ledger.violations() == []
    ledger.admit("a", [7])
    ledger.publish("a", "full", [2], 0, 1)
    now = ledger.copy_counters()
    assert not ledger.findings.has_more(stale)
    assert ledger.findings.has_more(now)
    assert [violation.kind for violation in ledger.violations()] == ["published"]
    assert not ledger.findings.has_more(now)
    ledger.reset()  # forgets rows and requests, and no counts
    assert ledger.findings.has_more(ledger.copy_counters()) is False


class Rank(Ledger):
    """A rank whose tensors are its own, and one of whose steps may be tampered with."""

    tamper = None

    def write(self, step):
        if self.tamper is not None:
            step = self.tamper(step)
        super().write(step)


@given(st.integers(0, 2**20), st.sampled_from(sorted(ENGINES)), st.integers(2, 4))
@settings(max_examples=15)
def test_no_healthy_ranks_are_accused_and_a_tampered_one_is(seed, name, number):
    """One rank gets one other slot, in one step of a random life."""
    first = new_ledger(name)
    key = first.books.key
    ranks = [first, *(Rank(ENGINES[name], max_requests=16, max_length=68, key=key)
                      for _ in range(number - 1))]  # fmt: skip
    engine = new_engine(SmallEngine, name, ranks, seed=seed)
    live(engine, 15)
    assert compare_ranks([r.fingerprints() for r in ranks]) == [[] for _ in ranks]
    chance, at = random.Random(seed), []

    def tamper(step):
        group, slots = chance.choice([*step.slots.items()])
        if at or not (slots >= 0).any():
            return step
        at.append((int(ranks[-1].books.counters[0]) + 1, group))
        row = int((slots >= 0).nonzero()[-1])  # of rows that share a slot of a ring, the last
        slots = slots.clone()
        slots[row] = -1
        return attrs.evolve(step, slots={**step.slots, group: slots})

    ranks[-1].tamper = tamper
    live(engine, 10)
    found = compare_ranks([r.fingerprints() for r in ranks])
    assert said(found)[:-1] == [[] for _ in ranks[1:]]
    assert [(v.step, v.group) for v in found[-1]] == at
