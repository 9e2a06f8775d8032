"""The program that reads very many rows: it counts, it says what it found, and it finds nothing."""

from __future__ import annotations

import pytest

from kvtxn.testing import audit_fuzz
from kvtxn.testing.audit_fuzz import LONG, LongEngine, Tally, fuzz, main


@pytest.mark.parametrize("seed", range(len(LONG)))
def test_long_contexts_without_a_fault(seed):
    """One engine of each kind; the program itself runs many, for many more steps."""
    tally = fuzz(1, seed=seed, steps=12)
    assert tally.violations == []
    assert tally.rows > 1000
    assert 5 < tally.steps <= 12
    assert tally.seconds > 0
    assert f"{tally.rows} row reads" in str(tally)


def test_a_violation_ends_the_program_with_an_error(monkeypatch, capsys):
    class Faulty(LongEngine):
        """Leaves out the first block of each table."""

        def table(self, group, request):
            return super().table(group, request)[1:]

    monkeypatch.setattr(audit_fuzz, "LongEngine", Faulty)
    monkeypatch.setattr(audit_fuzz.fuzz, "__defaults__", (0, 12))
    assert main(["1000000000"]) == 1
    said = capsys.readouterr().out
    assert "plain, seed 0: unwritten" in said or "plain, seed 0: foreign" in said
    assert str(Tally()).startswith("0 row reads")
