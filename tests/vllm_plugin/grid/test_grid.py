"""Real vLLM: with kvtxn every token and every count is stock's, and no rejected row is left.

The oracle (``cache_oracle``) reads the caches around every verify step; it does
not know kvtxn, and in the stock engine it finds what it looks for.
"""

from __future__ import annotations

import pytest
from engine_jobs import COMPARED, FAULTS, JOBS, POLICIES, covered

CELLS = [
    pytest.param(job, policy, scenario, id=f"{job}-{policy}-{scenario}")
    for job in COMPARED
    for policy, scenario in covered(job)
]


@pytest.mark.parametrize(("job", "policy", "scenario"), CELLS)
def test_equals_stock(reports, job, policy, scenario):
    """Tokens, acceptance and preemptions are stock's; rejected rows are never left behind."""
    report = reports(job)
    stock, ours = report["stock"][scenario], report[policy][scenario]
    assert ours["tokens"] == stock["tokens"]
    assert ours["stats"] == stock["stats"]
    assert ours["stats"]["accepted"] > 0
    rejected = ours["stats"]["drafted"] - ours["stats"]["accepted"]
    assert rejected > 0
    for counts, seen in zip(ours["kvtxn"], ours["oracle"], strict=True):
        assert counts["kvtxn_fallbacks_total"] == 0
        assert counts["kvtxn_rows_rejected_total"] >= 0.9 * rejected
        assert counts["kvtxn_windows_total_committed"] == seen["windows"]
        assert counts["kvtxn_rows_committed_total"] == seen["kept"]
        assert counts["kvtxn_rows_rejected_total"] == seen["rejected"]
        assert seen["rejected_written"] == 0
        assert seen["strays"] == 0
        assert seen["lost"] == 0
        if policy == "deferred":
            assert seen["early"] == 0


@pytest.mark.parametrize("job", COMPARED)
def test_the_oracle_sees_rejected_rows_in_stock(reports, job):
    """The oracle can fail: in stock it finds every rejected row in the cache."""
    for result in reports(job)["stock"].values():
        if "oracle" in result:
            for seen in result["oracle"]:
                assert seen["rejected_written"] == seen["rejected"] > 0
                assert seen["strays"] > 0


@pytest.mark.parametrize("job", JOBS)
def test_active_in_every_worker_and_idle_before_the_first_step(reports, job):
    """Every worker logs that kvtxn is active; warm-up, profiling and compilation open no window."""
    report = reports(job)
    workers = JOBS[job].get("options", {}).get("tensor_parallel_size", 1)
    assert report["stock"]["idle"] == [{"kvtxn_active": 0.0}] * workers
    for policy in dict(covered(job)):
        assert len(report[policy]["idle"]) == workers
        for counts in report[policy]["idle"]:
            assert counts["kvtxn_active"] == 1
            assert counts["kvtxn_windows_total"] == 0
            assert counts["kvtxn_bypassed_windows_total"] == 0
        assert f"event='kvtxn.active' rank={workers - 1} policy='{policy}'" in report.log(policy)


@pytest.mark.parametrize("job", COMPARED)
def test_what_is_not_covered_has_a_reason(reports, job):
    """The plug-in refuses, with a reason, every policy that a job does not list."""
    listed = {*JOBS[job]["engines"], *JOBS[job].get("left_out", ())}
    for policy in POLICIES:
        outcome, reason = reports(job)["stock"]["decisions"][policy]
        assert outcome == (policy if policy in listed else "off")
        assert reason


@pytest.mark.parametrize("job", ["gemma3n"])
def test_a_refused_policy_leaves_stock(reports, job):
    """Asked for by name and not possible: said in one sentence, and the engine is stock's."""
    report = reports(job)
    stock, refused = report["stock"]["one"], report["refused"]["one"]
    assert report["refused"]["idle"] == [{"kvtxn_active": 0.0}]
    assert (refused["tokens"], refused["stats"]) == (stock["tokens"], stock["stats"])
    said = "policy 'deferred' cannot work here: some layers read rows of other layers"
    assert said in report.log("refused")


@pytest.mark.parametrize("job", ["requests"])
@pytest.mark.parametrize("policy", POLICIES)
def test_logprobs_are_stocks(reports, job, policy):
    """Logprobs are stock's to the bit, since the attention is vLLM's own."""
    stock, ours = (
        [pair for request in report["logprobs"]["logprobs"] for step in request for pair in step]
        for report in (reports(job)["stock"], reports(job)[policy])
    )
    assert stock
    assert ours == stock


@pytest.mark.parametrize("job", ["deepseek", "amx_mla"])
def test_latent_attention_of_either_kind_of_cpu(reports, job):
    """The engine has the attention that its job is for, whichever CPU this is."""
    for engine in ("stock", *POLICIES):
        assert reports(job)[engine]["attention"] == JOBS[job]["attention"]


@pytest.mark.parametrize("job", ["gemma4"])
def test_groups_can_have_blocks_of_different_sizes(reports, job):
    """One engine, two groups, and a block of one is no block of the other."""
    assert len(set(reports(job)["stock"]["block_sizes"])) == 2


@pytest.mark.parametrize("job", ["llama", "qwen3", "gemma3", "mistral", "amx_mla"])
def test_scenarios_are_what_they_say(reports, job):
    """Preemption, prompt chunks beside drafts, prefix hits and same-step hits do happen."""
    stock = reports(job)["stock"]
    assert stock["preempted"]["stats"]["preemptions"] > 0
    assert stock["chunked"]["oracle"][0]["mixed"] > 0
    if job != "amx_mla":  # see there
        assert stock["prefix"]["cached"] > 0
    assert stock["same_step"]["hits"] > 0
    assert stock["sampled"]["tokens"] != stock["one"]["tokens"]


@pytest.mark.parametrize("job", ["faults"])
@pytest.mark.parametrize(
    ("policy", "fault", "reason"),
    [
        (policy, fault, reason)
        for policy, found in FAULTS.items()
        for fault, reason in found.items()
    ],
)
def test_a_fault_changes_no_token(reports, job, policy, fault, reason):
    """After any failure inside kvtxn the output is stock's, and the fallback is counted."""
    report = reports(job)
    stock, ours = report["stock"]["eight"], report[policy][f"eight@{fault}"]
    assert ours["tokens"] == stock["tokens"]
    assert ours["stats"] == stock["stats"]
    counts = ours["kvtxn"][0]
    assert counts[f"kvtxn_fallbacks_total_{reason}"] > 0
    assert counts["kvtxn_windows_total_committed"] > 0
    assert counts["kvtxn_windows_total_failed"] == 0
    staged = counts["kvtxn_rows_committed_total"] + counts["kvtxn_rows_rejected_total"]
    assert counts["kvtxn_rows_staged_total"] == staged
    if fault in ("commit", "half"):  # finished by the reference: nothing is left behind
        assert ours["oracle"][0]["rejected_written"] == 0
        assert ours["oracle"][0]["strays"] == 0


@pytest.mark.parametrize("job", ["faults"])
def test_on_error_raise_surfaces_it(reports, job):
    """The engine stops with the error itself."""
    assert "InjectedFault" in reports(job)["raise"]["eight@stage"]["error"]
