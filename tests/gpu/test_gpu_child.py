"""The process of a grid's engine, over kvtxn's own steps; no GPU needed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import gpu_child
import gpu_table
import pytest
from engine_jobs import missing
from step_rig import anywhere  # noqa: F401

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from failing_stage import STAGES
from gpu_judge import miscounted, unrecovered
from kvtxn.backends.triton_executor import TritonExecutor
from step_engine import BATCHES, StepEngine, Worker, rows_as_on_a_gpu, steps

POLICIES = ["undo", "deferred"]


@pytest.fixture(scope="module")
def reports():
    """The reports of an engine's process, by policy; stages fail at their third call."""
    found, early = {}, {stage: 2 for stages in STAGES.values() for stage in stages}
    with (
        pytest.MonkeyPatch.context() as patch,
        rows_as_on_a_gpu(),
    ):
        patch.setattr(TritonExecutor, "unavailable", classmethod(lambda cls, device: None))
        patch.setitem(gpu_child.SCENARIOS, "novels", steps)
        patch.setattr(gpu_child, "BEFORE_FAULT", early)
        patch.setattr("kvtxn.integrations.vllm_plugin.snapshots", StepEngine.snapshots)
        for policy in ("stock", *POLICIES):
            job = {"policy": policy, "scenarios": ["novels"], "inside": True}
            found[policy] = gpu_child.run(StepEngine(policy), job)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report(reports, policy):
    """The rules for reports of real engines hold: clean caches, the same bits, and recovery."""
    stock, ours = reports["stock"], reports[policy]
    tokens = stock["novels"]["tokens"]
    assert tokens == ours["unwatched"]["tokens"] == ours["unwatched"]["off"]["tokens"]
    assert ours["novels"]["tokens"] == tokens
    [counts], [seen] = ours["novels"]["kvtxn"], ours["novels"]["oracle"]
    assert miscounted(counts, seen, policy) == {}
    assert seen["windows"] == counts["kvtxn_windows_total_committed"] == len(BATCHES)
    assert not any(ours["novels"]["off"]["kvtxn"][0].values())
    assert stock["novels"]["oracle"][0]["rejected_written"] == seen["rejected"] > 0
    assert stock["faults"] == {}
    assert ours["memory"]["row_bytes"] * ours["memory"]["max_rows"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_stages_that_fail(reports, policy):
    """The rule for a failed stage holds, and fails on a lost row and on a fallback too many."""
    tokens = reports["stock"]["novels"]["tokens"]
    assert list(reports[policy]["faults"]) == list(STAGES[policy])
    for found in reports[policy]["faults"].values():
        assert unrecovered(found, tokens, policy) == {}
        for run, part, name in (
            ("during", "oracle", "lost"),
            ("during", "kvtxn", "kvtxn_fallbacks_total"),
            ("afterwards", "kvtxn", "kvtxn_fallbacks_total"),
            ("afterwards", "oracle", "rejected_written"),
        ):
            wrong = copy.deepcopy(found)
            wrong[run][part][0][name] += 1
            assert unrecovered(wrong, tokens, policy)
        assert unrecovered(found, [*tokens, []], policy)
        assert unrecovered(found | {"calls": 0}, tokens, policy)


def test_the_page_says_what_is_inside(reports):
    """Memory, late compilations and failed stages are drawn where a record has them."""
    changed = {f"trained.{policy}": copy.deepcopy(reports[policy]) for policy in reports}
    undo = changed["trained.undo"]
    undo["compiled"] = ["kvtxn.x", "vllm.y"]
    undo["memory"]["allocated"] += 2**20
    undo["faults"]["save"]["during"]["oracle"][0]["lost"] = 3
    page = gpu_table.draw(gpu_table.record(changed) | {"commits": ["0"]})
    share = 2**20 / (16 * undo["memory"]["row_bytes"])
    assert f"- trained, `undo`: 1.00 MiB more than stock, {share:.2f} of the largest" in page
    assert "rows; 1 kernels compiled after the start." in page
    steps = len(BATCHES)
    same = f"{steps} of {steps} requests have stock's tokens"
    assert f"save fails once: 1 fallbacks, 8 steps at rest, {same}, 3 rows lost; then" in page
    assert page.count(" fails once: ") == 7


@rows_as_on_a_gpu()
def seen_after(policy, spoil):
    """The oracle's counts of a step that ``spoil`` interferes with, before its commit."""
    worker = Worker(policy)
    worker.oracle_install()
    runner = worker.model_runner
    forward = runner.forward

    def spoilt():
        forward()
        spoil(runner.rig)

    runner.forward = spoilt
    worker.step([3, 3], [2, 4])
    seen = worker.oracle_take()
    assert (seen["steps"], seen["windows"], seen["kept"], seen["rejected"]) == (1, 1, 4, 2)
    return {key: seen[key] for key in ("rejected_written", "early", "lost", "strays")}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_commit_that_does_nothing(policy):
    """Deferred loses accepted rows, undo leaves rejected ones."""

    def spoil(rig):
        rig.steps.window.commit_sampled = lambda *_: rig.steps.window.state

    seen = seen_after(policy, spoil)
    wrong = "lost" if policy == "deferred" else "rejected_written"
    assert seen[wrong] > 0


def test_a_draft_row_that_is_written_early():
    """A row that reaches its slot before the commit is seen, though the commit writes it again."""

    def spoil(rig):
        rig.caches[0][0, :, 1] += 1  # block 0, the row after the settled one

    assert seen_after("deferred", spoil) == {
        **{"rejected_written": 0, "early": 1},
        **{"lost": 0, "strays": 0},
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_of_nobody(policy):
    """Block 7 belongs to no request."""

    def spoil(rig):
        rig.caches[1][7, 0, 0, 0] += 1

    assert seen_after(policy, spoil)["strays"] == 1


def test_late_compilations_are_noted():
    """The names come from Triton's own hook, which others may use, too."""
    from triton import knobs

    before, others = knobs.runtime.jit_post_compile_hook, []
    try:
        knobs.runtime.jit_post_compile_hook = lambda **facts: others.append(facts)
        worker = Worker("undo")
        worker.compilations_install()
        knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(module="kvtxn.x", name="copy"))
        assert worker.compilations_take() == ["kvtxn.x.copy"]
        assert len(others) == 1
    finally:
        knobs.runtime.jit_post_compile_hook = before
