"""A KV connector that takes every row, in a real vLLM: what it can take, and when."""

from __future__ import annotations

import pytest
from engine_jobs import POLICIES


def taken(report, engine):
    """Rows that the connector that takes every row got, by moment, rejected and accepted."""
    (seen,) = report[engine]["reused"]["oracle"]
    return {name: count for name, count in seen.items() if ": " in name}, seen


@pytest.mark.parametrize("job", ["every_row"])
def test_stock_hands_rejected_rows_to_whoever_takes_all(reports, job):
    """Within the forward and when the step is over: nearly every one of them."""
    counts, seen = taken(reports(job), "stock")
    assert counts["order: forward, step"] == seen["windows"] > 0
    for moment in ("forward", "step"):
        assert counts[f"{moment}: rejected"] > 0.5 * seen["rejected"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("job", ["every_row"])
def test_no_rejected_row_is_left_once_hooks_are_told(reports, job, policy):
    """``on_commit`` comes after the forward and before the connector's turn; then none is there.

    Within the forward nobody knows yet: under undo drafts are in the cache, deferred they are not.
    """
    counts, seen = taken(reports(job), policy)
    assert counts["order: forward, commit, step"] == seen["windows"] > 0
    for moment in ("commit", "step"):
        assert counts.get(f"{moment}: rejected", 0) == 0
        assert counts[f"{moment}: accepted"] >= 0.9 * seen["kept"] > 0
    in_forward = counts.get("forward: rejected", 0) + counts.get("forward: accepted", 0)
    assert in_forward == 0 if policy == "deferred" else in_forward > 0


@pytest.mark.parametrize("job", ["every_row"])
def test_a_connector_that_nobody_checked_keeps_kvtxn_out(reports, job):
    """An unknown connector keeps kvtxn out with a reason in one sentence; tokens are stock's."""
    report = reports(job)
    stock, unknown = report["stock"]["reused"], report["unknown"]["reused"]
    assert report["unknown"]["idle"] == [{"kvtxn_active": 0.0}]
    assert (unknown["tokens"], unknown["stats"]) == (stock["tokens"], stock["stats"])
    said = "kvtxn was not checked with connector EveryRowConnector"
    assert said in report.log("unknown")
