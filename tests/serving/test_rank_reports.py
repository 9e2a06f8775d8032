"""What ranks hear of each other at the end of a step, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.serving.ledger.rank_agreement import RankAgreement, RankReport, Wrong
from kvtxn.integrations.serving.ledger.violation_log import FoundViolations


class Two:
    """Two ranks; what the other one reports is known.

    Args:
        other: its report.
    """

    def __init__(self, other):
        self.other, self.exchanged = other, 0

    def of_all(self, value):
        self.exchanged += 1
        return [value, self.other]

    def highest(self, level, *, stages):
        return max(level, self.other.level)


def heard(own, other):
    ranks = Two(other)
    agreement = RankAgreement(None, ranks, {"contain": 1}, compares=False)
    return agreement.after_step(1, own, "contain"), ranks.exchanged


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong(requests=frozenset({"a"})),
        Wrong(aged=frozenset({"a"})),
        Wrong(lost=True),
        Wrong(blocks=frozenset({3}), changed=frozenset({3})),
    ],
)
def test_all_ranks_contain_what_one_of_them_has_found(wrong):
    """A rank that contained alone would leave the others waiting for it."""
    found = RankReport(wrong=wrong)
    assert heard(found, RankReport()) == heard(RankReport(), found) == (found, 1)


def test_ranks_that_have_found_nothing_exchange_a_number_alone():
    assert heard(RankReport(), RankReport()) == (RankReport(), 0)


class OtherStage(Two):
    """One rank of each of two pipeline stages: reports stay within a stage, levels do not."""

    def of_all(self, value):
        return [value]


@pytest.mark.parametrize(
    ("other", "hears"),
    [
        (RankReport(wrong=Wrong(requests=frozenset({"a"}))), "nothing"),
        (RankReport(failure="no memory"), "failure"),
        (RankReport(violation="foreign"), "violation"),
    ],
)
def test_a_stage_hears_of_another_stages_end_but_not_of_its_wrong_reads(other, hears):
    agreement = RankAgreement(None, OtherStage(other), {"contain": 1}, compares=False, stages=True)
    report = agreement.after_step(1, RankReport(), "contain")
    assert not report.wrong
    assert (report.failure is not None) == (hears == "failure")
    assert (report.violation is not None) == (hears == "violation")


@pytest.mark.parametrize("on_violation", ["log", "contain"])
def test_violations_that_were_not_kept_are_reported_once(on_violation):
    ledger = SimpleNamespace(groups=[], violations=list, findings=SimpleNamespace(lost=3))
    found = FoundViolations(ledger, 0)
    for lost in (on_violation == "contain", False):
        found.take(on_violation)
        assert found.take_report().wrong == Wrong(lost=lost)
