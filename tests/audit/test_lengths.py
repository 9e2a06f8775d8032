"""``report_lengths``: attention that reads more or fewer rows than its requests have."""

from __future__ import annotations

import pytest
import torch

from kvtxn.audit import Ledger, RowGroup, Step
from kvtxn.audit.lengths import report_lengths


@pytest.fixture
def step():
    """Two requests of six rows each, written and checked; and the ledger."""
    ledger = Ledger((RowGroup("full", 4, 10),), max_requests=4, max_length=32)
    lines = [ledger.admit(name, [1, 2, 3, 4, 5, 6]) for name in ("a", "b")]
    step = Step(
        lines=torch.tensor(lines),
        starts=torch.tensor([0, 6, 12]),
        first=torch.tensor([0, 0]),
        tokens=torch.tensor([1, 2, 3, 4, 5, 6] * 2),
        slots={"full": torch.tensor([*range(4, 10), *range(12, 18)])},
        tables={"full": torch.tensor([[1, 2], [3, 4]])},
    )
    ledger.write(step)
    ledger.check(step)
    return ledger, step


@pytest.mark.parametrize(
    ("length", "position", "slot"), [(8, 6, 18), (5, 5, 17), (0, 0, 12), (99, 6, 18), (-3, 0, 12)]
)
def test_the_first_wrong_position_is_named(step, length, position, slot):
    ledger, step = step
    report_lengths(ledger.books, step, {"full": torch.tensor([6, length], dtype=torch.int32)})
    (violation,) = ledger.violations()
    assert (violation.kind, violation.found) == ("foreign", "length")
    assert (violation.request, violation.position, violation.slot) == ("b", position, slot)
    assert violation.step == 1
    assert "more or fewer rows" in str(violation)
    assert ledger.counters()["kvtxn_audit_violations_total_foreign"] == 1


def test_right_lengths_are_not_reported(step):
    ledger, step = step
    report_lengths(ledger.books, step, {"full": torch.tensor([6, 6])})
    assert ledger.violations() == []
