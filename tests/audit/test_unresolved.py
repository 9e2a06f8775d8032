"""Steps in the wrong order: drafts that nobody resolves, counts out of range, early checks."""

from __future__ import annotations

import pytest
import torch

from kvtxn import AcceptanceError, ConfigError, WindowStateError
from kvtxn.audit import Ledger, RowGroup, Step

GROUPS = (RowGroup("a", 4, 8),)


@pytest.fixture
def ledger():
    made = Ledger(GROUPS, max_requests=4, max_length=30)
    for name in "rs":
        made.admit(name, [5, 6, 7])
    return made


def step_of(ledger, first, tokens, drafts, names="r"):
    """A step in which each request has these tokens, in blocks of its own."""
    count = len(tokens)
    positions = range(first, first + count)
    return Step(
        lines=torch.tensor([ledger.line(name) for name in names]),
        starts=torch.arange(len(names) + 1) * count,
        first=torch.tensor([first] * len(names)),
        tokens=torch.tensor([*tokens] * len(names)),
        slots={"a": torch.tensor([16 * n + p for n in range(len(names)) for p in positions])},
        tables={"a": torch.tensor([[4 * n + i for i in range(4)] for n in range(len(names))])},
        drafts=torch.tensor([drafts] * len(names)),
    )


def run(ledger, *step, **named):
    made = step_of(ledger, *step, **named)
    ledger.write(made)
    ledger.check(made)


def unjudged(ledger):
    counts = ledger.counters()
    name = "kvtxn_audit_unjudged_total"
    reasons = [counts[f"{name}_{reason}"] for reason in ("malformed", "unresolved")]
    assert counts[name] == sum(reasons)
    assert (ledger.refused, ledger.unresolved) == tuple(reasons)
    return ledger.unresolved


def test_a_step_whose_drafts_nobody_resolved_is_counted(ledger):
    """Once another step follows; each of its requests once."""
    run(ledger, 0, [5, 6, 7], 0, names="rs")
    run(ledger, 3, [8, 9], 1, names="rs")
    assert unjudged(ledger) == 0  # it can be resolved still
    run(ledger, 5, [1], 0)
    assert unjudged(ledger) == 2
    run(ledger, 6, [1], 0)
    assert unjudged(ledger) == 2


def test_a_request_that_was_released_counts_too(ledger):
    run(ledger, 0, [5, 6, 7], 0)
    run(ledger, 3, [8, 9], 1)
    ledger.release("r")
    ledger.admit("t", [5])
    run(ledger, 0, [5], 0, names="t")
    assert unjudged(ledger) == 1


@pytest.mark.parametrize("steps", [1, 5])
def test_steps_that_are_resolved_or_have_no_drafts_do_not_count(ledger, steps):
    run(ledger, 0, [5, 6, 7], 0)
    for position in range(3, 3 + steps):
        run(ledger, position, [8, 9], 1)
        ledger.resolve([0])
        run(ledger, position, [8], 0)
    ledger.reset()
    assert unjudged(ledger) == 0


def test_a_reset_forgets_the_step(ledger):
    run(ledger, 0, [5, 6, 7], 1)
    ledger.reset()
    ledger.admit("r", [5])
    run(ledger, 0, [5], 0)
    assert unjudged(ledger) == 0


@pytest.mark.parametrize("count", [-2, 2, 5, 10**6])
def test_counts_out_of_range_are_refused_and_the_step_can_be_resolved(ledger, count):
    run(ledger, 0, [5, 6, 7], 0)
    run(ledger, 3, [8, 9], 1)
    before = ledger.books.words.clone()
    for given in ([count], torch.tensor([count])):
        with pytest.raises(AcceptanceError, match="out of range for request 0; expected 0 to 1"):
            ledger.resolve(given)
    assert torch.equal(before, ledger.books.words)
    ledger.resolve([1])
    assert unjudged(ledger) == 0


@pytest.mark.parametrize("drafts", [-1, 4, 99])
def test_drafts_have_to_be_rows_of_their_request(ledger, drafts):
    with pytest.raises(ConfigError, match=r"drafts of request 0 .* expected 0 to 3"):
        ledger.write(step_of(ledger, 0, [5, 6, 7], drafts))
    run(ledger, 0, [5, 6, 7], 3)


def test_a_step_is_checked_once_after_its_write(ledger):
    early = step_of(ledger, 0, [5, 6, 7], 0)
    with pytest.raises(WindowStateError, match=r"check: no step waits .* call write"):
        ledger.check(early)
    ledger.write(early)
    ledger.check(early)
    late = step_of(ledger, 3, [8, 9], 1)
    for step in (late, early):  # an engine may have one Step for all its steps
        with pytest.raises(WindowStateError, match="one that was checked"):
            ledger.check(step)
    ledger.write(late)
    ledger.resolve([0])
    with pytest.raises(WindowStateError, match="before its resolve"):
        ledger.check(late)
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] == 3


def facts(ledger, name):
    line = ledger.line(name)
    return ledger.books.facts[:, line].tolist(), ledger.books.own[line].tolist()


@pytest.mark.parametrize("when", ["before its check", "before its resolve"])
def test_a_line_that_another_request_gets_while_the_step_is_open(when):
    """The step ends for the request that ran; the one that came later is not touched."""
    ledger = Ledger(GROUPS, max_requests=1, max_length=30)
    ledger.admit("r", [5, 6, 7])
    run(ledger, 0, [5, 6, 7], 0)
    step = step_of(ledger, 3, [8, 9], 1)
    ledger.write(step)
    if when == "before its resolve":
        ledger.check(step)
    ledger.release("r")
    ledger.admit("s", [5, 6, 7, 8, 9, 10])  # the only line
    before = facts(ledger, "s")
    if when == "before its check":
        ledger.check(step)  # whoever reads is gone
    ledger.resolve([0], [[11, -1]])
    assert facts(ledger, "s") == before
    assert ledger.violations() == []
    run(ledger, 5, [10], 0, names=["s"])  # it goes on from the rejected draft
    assert [(v.kind, v.request, v.position) for v in ledger.violations()] == [("rejected", "s", 4)]
