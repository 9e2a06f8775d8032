"""vLLM's sleep mode under the audit: a worker answers as before, and forgets the rows it loses."""

from __future__ import annotations

import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.engines("audit-sleeps")
def test_an_engine_that_sleeps_finds_nothing_afterwards(reports):
    """Its scheduler has emptied the prefix cache, and computes again the requests that it kept."""
    report = reports("audit-sleeps")["alone"]
    assert report["before"] == []
    for way, found in report["ways"].items():
        assert found["violations"] == [], way
        assert found["same"], way
    assert report["ways"]["keep"]["running"] == 4
    assert report["ages"] == []
    assert report["steps"] > 100


@pytest.mark.engines("audit-sleeps")
def test_a_worker_that_sleeps_answers_as_before(reports):
    """Its counters may lie in memory that is away."""
    report = reports("audit-sleeps")["alone"]
    for way, found in report["ways"].items():
        assert (found["answers"], found["awake"]) == (True, True), way
    assert report["undone"]


@pytest.mark.engines("audit-sleeps")
def test_rows_that_were_lost_are_not_read_again(reports):
    """Somebody lets the workers sleep, and the scheduler is not told."""
    first = reports("audit-sleeps")["alone"]["forgotten"][0]
    assert (first["kind"], first["position"]) == ("unwritten", 0)
