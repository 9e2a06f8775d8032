"""Every kind of engine that starts on a CPU is watched, and nothing is found in it."""

from __future__ import annotations

import planted_bytes
import pytest
import watched_engines
from engine_jobs import WATCHED, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ENGINES = watched_engines.ENGINES


@pytest.mark.parametrize(
    "engine",
    [pytest.param(n, marks=pytest.mark.engines(f"audit-{n}")) for n in watched_engines.HEALTHY],
)
def test_nothing_is_found_in_it(reports, engine):
    """Shared prefixes, chunked prompts, preemption, drafts; on every rank."""
    jobs, kind = reports(f"audit-{engine}"), ENGINES[engine]
    report = jobs["alone"]
    ranks = 2 if "environment" in kind else 1
    assert len(report["counts"]) == ranks
    for counts in report["counts"]:
        assert counts["kvtxn_audit_active"] == 1
        assert counts["kvtxn_audit_rows_checked_total"] >= kind.get("rows", 5_000)
        assert bool(counts["kvtxn_audit_states_checked_total"]) == bool(kind.get("states"))
        assert counts["kvtxn_audit_violations_total"] == 0
        assert counts["kvtxn_audit_unjudged_total"] == 0
        assert counts["kvtxn_active"] == ("policy" in kind.get("kvtxn", {}))
        # Each request that was put back has come to its end.
        assert counts["kvtxn_audit_requests_restarted_total"] == report["preempted"]
    assert report["report"] == [[]] * ranks
    assert report["external"] > 0 if "connector" in kind else report["external"] == 0
    assert report["preempted"] > 0 or "num_gpu_blocks_override" in kind.get("options", {})
    assert "kvtxn.audit_active" in jobs.log("alone")


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        pytest.param(engine, fault.__name__, marks=pytest.mark.engines(f"audit-{engine}"))
        for engine, faults in planted_bytes.AFTERWARDS.items()
        for fault in faults
    ],
)
def test_changed_bytes_are_found_in_it(reports, engine, fault):
    """A state, or a row of a drafter's own layers; every slot was compared at every read before."""
    report = reports(f"audit-{engine}")["alone"]
    assert report["compared"] > 500
    struck, violations = report["found"][fault]["struck"], report["found"][fault]["violations"]
    assert struck is not None, "the fault has not struck"
    assert violations, "nothing was found"
    assert {(v["kind"], v["found"]) for v in violations} == {("changed", "bytes")}
    first = violations[0]
    assert first["request"] == struck["request"]
    assert first["step"] <= struck["step"] + 1
    assert (first["position"], first["slot"]) == (struck["position"], struck["slot"])
    assert first["layer"]


@pytest.mark.engines("audit-tensor-parallel")
def test_a_rank_that_computes_other_rows_is_found(reports):
    """Both ranks say so, with the same step; the rows themselves are right by each rank's tokens.

    On the rank that took a token for another, a later request may find its rows wrong as well.
    """
    first, second = reports("audit-tensor-parallel")["alone"]["differ"]
    assert [violation["kind"] for violation in first] == ["ranks"]
    steps = [violation["step"] for violation in second if violation["kind"] == "ranks"]
    assert steps == [first[0]["step"]]


@pytest.mark.engines("audit-mamba-with-drafts")
def test_a_model_without_attention_is_told_no_accepted_drafts(reports):
    """The runner records accepted counts for hybrids alone; here steps are told that none was."""
    report = reports("audit-mamba-with-drafts")["alone"]
    (violations,) = report["report"]
    assert report["accepted"] > 0
    assert {violation["kind"] for violation in violations} == {"state"}
    assert {violation["found"] for violation in violations} >= {"count"}
    counted = [violation for violation in violations if violation["found"] == "count"]
    assert len({violation["request"] for violation in counted}) > 1


def test_every_engine_is_in_the_table():
    assert ENGINES.keys() == set(WATCHED)
