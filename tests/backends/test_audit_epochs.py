"""Weights that change: Triton's and numba's passes count and find what the torch passes do."""

from __future__ import annotations

import pytest
import torch
from kernels_here import ON_GPU
from ledger_kit.engine import SmallEngine
from ledger_kit.life import ages_of, live, new_engine, new_model, said
from ledger_pairs import DEVICE, assert_equal_books, pair, step_of

__all__ = ["pair"]

PROMPT = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("stale", ["count", "alarm"])
@pytest.mark.parametrize("name", ["sliding", "states"])
def test_a_life_with_updates(pair, name, stale):
    ledgers, model = pair(name, stale=stale), new_model(name, stale)
    engine = new_engine(SmallEngine, name, [*ledgers, model], seed=4, device=DEVICE)
    live(engine, 60 if ON_GPU else 14, updates=0.3)
    ages = [ages_of(ledger) for ledger in ledgers]
    assert ages[0] == ages[1] == dict(model.ages) != {}
    if not ON_GPU or stale == "count":
        assert_equal_books(*ledgers)
        assert said(ledgers[0]) == said(ledgers[1]) == model.findings
    assert torch.equal(ledgers[0].books.ages, ledgers[1].books.ages)


def test_rows_of_several_ages_in_one_step(pair):
    """Each is counted under its age, and one that is foreign beside them is found."""
    ledgers = pair("states")
    for ledger in ledgers:
        ledger.admit("a", PROMPT)
        ledger.write_and_check(
            step_of(ledger, "a", 0, PROMPT[:3], range(4, 7), [1, 2], [-1, -1, 20], -1)
        )
        ledger.new_epoch()
        ledger.write_and_check(
            step_of(ledger, "a", 3, PROMPT[3:], range(7, 10), [1, 2], [-1, -1, 20], 20)
        )
        ledger.new_epoch("drafter")
        ledger.new_epoch()
        ledger.admit("b", [*PROMPT[:5], 99, 17])
        ledger.write_and_check(step_of(ledger, "b", 6, [17], [10], [1, 2], [21], 20))
        assert [v.kind for v in ledger.violations()] == ["state", "foreign"]
    ages = [ages_of(ledger) for ledger in ledgers]
    assert ages[0] == ages[1] == {
        ("a", "rows", 1): 3, ("a", "states", 1): 1,
        ("b", "rows", 1): 2, ("b", "rows", 2): 3, ("b", "draft_rows", 1): 5,
    }  # fmt: skip
    assert_equal_books(*ledgers)


def test_a_stale_row_that_is_an_open_draft_must_not_leave(pair):
    ledgers = pair("states", stale="alarm")
    for ledger in ledgers:
        ledger.admit("a", PROMPT)
        fill = (0, PROMPT, range(4, 10), [1, 2], [-1] * 4 + [20, 21], -1)
        ledger.write_and_check(step_of(ledger, "a", *fill, drafts=1))
        ledger.new_epoch()
        ledger.export("a", "full", [1, 2], 0, 6)
        assert [(v.kind, v.found, v.position) for v in ledger.violations()] == [
            ("exported", "draft", 5)
        ]
    assert_equal_books(*ledgers)
