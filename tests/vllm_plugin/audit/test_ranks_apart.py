"""What one of two ranks meets ends the audit or the engine on both; no process stays behind."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

#: Seconds that an engine has to stop, on a busy machine; a rank that waits takes minutes.
SOON = 45


def check_end(report):
    """The engine has stopped at once, with both of its processes."""
    assert report["error"] == "EngineDeadError"
    assert report["seconds"] < SOON
    assert report["left"] == []


@pytest.mark.engines("audit-ranks-raise")
def test_a_violation_of_the_second_rank_stops_the_engine(reports):
    """vLLM awaits the first rank's answer alone; both of them raise."""
    jobs = reports("audit-ranks-raise")
    check_end(jobs["alone"])
    assert jobs.log("alone").count("AuditError: audit: changed") >= 2


@pytest.mark.engines("audit-ranks-fail")
def test_an_audit_that_fails_on_the_second_rank_ends_on_both_and_the_engine_runs_on(reports):
    """Neither rank waits for the other one; then a window of the second rank stops the engine."""
    jobs = reports("audit-ranks-fail")
    report = jobs["alone"]
    assert report["before"] == [1, 1]
    assert report["after"] == [0, 0]
    check_end(report)
    assert jobs.log("alone").count("kvtxn.audit_inactive") == 2
    assert jobs.log("alone").count("kvtxn.rank_ends") == 1
