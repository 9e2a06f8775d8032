"""Calls of a ledger in an order that is not theirs, and numbers at the edges; every backend."""

from __future__ import annotations

import attrs
import pytest
import torch
from ledger_pairs import DEVICE, ON_GPU, PASSES

from kvtxn.audit import Ledger, RowGroup, Step
from kvtxn.errors import ConfigError, WindowStateError

GROUP = RowGroup("g", 4, 16)


@pytest.fixture(params=["torch", *PASSES], ids=lambda each: getattr(each, "name", each))
def ledger(request):
    return Ledger(
        [GROUP], max_requests=4, max_length=40, device=DEVICE, journal=64, backend=request.param
    )


def numbers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def step_of(line, first, tokens, *, drafts=0, block=1, **named):
    """A step of one request whose blocks follow each other from one block on."""
    slots = range(4 * block + first, 4 * block + first + len(tokens))
    given = {
        "lines": numbers(line),
        "starts": numbers(0, len(tokens)),
        "first": numbers(first),
        "tokens": numbers(*tokens),
        "slots": {"g": numbers(*slots)},
        "tables": {"g": numbers(*range(block, block + 4))[None]},
        "drafts": numbers(drafts),
    }
    return Step(**given | named)


def books(ledger):
    own = ledger.books
    return [part.clone() for part in (own.words, own.own, own.facts, own.counters)]


@pytest.mark.skipif(ON_GPU, reason="comparing steps would wait for the GPU")
def test_a_step_that_was_not_written_is_not_checked(ledger):
    """The written one can be checked afterwards."""
    ledger.hand_out("g", [*range(1, 9)])
    one = step_of(ledger.admit("one", [1, 2]), 0, [1, 2])
    other = step_of(ledger.admit("other", [1, 2]), 0, [1, 2], block=5)
    ledger.write(one)
    before = books(ledger)
    with pytest.raises(WindowStateError, match=r"^check: .* got another one than was written"):
        ledger.check(other)
    assert all(map(torch.equal, before, books(ledger)))
    ledger.check(attrs.evolve(one))
    assert ledger.violations() == []
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] == 2


def test_a_step_is_not_checked_after_it_was_resolved(ledger):
    step = step_of(ledger.admit("one", [1, 2]), 0, [1, 2])
    ledger.write(step)
    ledger.resolve(numbers(0))
    with pytest.raises(WindowStateError, match=r"^check: no step waits to be checked"):
        ledger.check(step)


@pytest.mark.parametrize("way", ["admit", "release, admit"])
def test_an_outcome_is_not_that_of_tokens_that_were_given_later(ledger, way):
    """A session's next turn begins before the last step of its turn is resolved."""
    ledger.hand_out("g", [*range(1, 5)])
    step = step_of(ledger.admit("session", [7, 8]), 0, [7, 8, 1, 2], drafts=2)
    ledger.write(step)
    ledger.check(step)
    if way != "admit":
        ledger.release("session")
    line = ledger.admit("session", [7, 8, 1])
    ledger.resolve(numbers(1), numbers(1, 50, -1)[None])
    step = step_of(line, 2, [1, 60])
    ledger.write(step)
    ledger.check(step)
    assert ledger.violations() == []


@pytest.mark.parametrize(
    "named",
    [
        {"first": numbers((1 << 63) - 5)},
        {"first": numbers((1 << 63) - 1)},
        {"starts": numbers((1 << 63) - 1, 1)},
        {"starts": numbers(1, -(1 << 63))},
    ],
    ids=["position", "last position", "begin", "end"],
)
def test_sums_that_64_bits_do_not_hold_are_refused(ledger, named, monkeypatch):
    """By the call on a CPU, and by the passes themselves."""
    ledger.hand_out("g", [*range(1, 5)])
    right = step_of(ledger.admit("one", [1, 2, 3, 4]), 0, [1, 2, 3, 4])
    step = attrs.evolve(right, **named)
    before = books(ledger)
    if not ON_GPU:
        with pytest.raises(ConfigError, match=r"^write: "):
            ledger.write(step)
        assert all(map(torch.equal, before, books(ledger)))
    monkeypatch.setattr(ledger, "require", lambda *given, **named: None)
    ledger.write(step)
    ledger.check(step)
    assert ledger.refused == 1
    assert torch.equal(before[0], ledger.books.words)
    assert ledger.violations() == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("besides", [0, 1])
def test_counts_of_any_dtype(ledger, dtype, besides):
    ledger.hand_out("g", [*range(1, 5)])
    step = step_of(ledger.admit("one", [7, 8]), 0, [7, 8, 1, 2], drafts=2)
    ledger.write(step)
    ledger.check(step)
    ledger.resolve(
        numbers(1 + besides, dtype=dtype),
        numbers(1, 50, -1, dtype=dtype)[None],
        besides=besides,
    )
    assert ledger.kept(step).tolist() == [1]
    step = step_of(0, 3, [50])
    ledger.write(step)
    ledger.check(step)
    assert ledger.violations() == []


@pytest.mark.parametrize("block", [1 << 32, (1 << 32) + 1, -(1 << 32), 1 << 62])
def test_a_block_beyond_32_bits_is_no_other_block(ledger, block):
    ledger.hand_out("g", [*range(4)])
    line = ledger.admit("one", [*range(1, 6)])
    first = step_of(line, 0, [1, 2, 3, 4], block=0)
    ledger.write(first)
    ledger.check(first)
    table = numbers(block, 1, 2, 3)[None]
    step = step_of(line, 4, [5], block=0, tables={"g": table})
    ledger.write(step)
    ledger.check(step)
    assert [each.kind for each in ledger.violations()] == ["unwritten"]
