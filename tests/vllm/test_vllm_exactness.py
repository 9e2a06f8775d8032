"""What ``kvtxn bench exactness`` looks with: it sees what is wrong, and only that."""

from __future__ import annotations

import pytest
import torch
from kvtxn.benchmarks.exactness_watch import STAGES, CacheWatch, InjectedFault, fault
from kvtxn.benchmarks.vllm_exactness import compare
from vllm_step_rig import Rig, anywhere  # noqa: F401  # a fixture


def seen_after(rig, spoil) -> dict[str, int]:
    """What the watch counts over a step that ``spoil`` interferes with, before its commit."""
    watch = CacheWatch(rig.steps, rig.slots[0])
    with watch.watching():
        rig.begin([3, 3], [4, 4])
        rig.forward()
        spoil(rig)
        rig.commit([2, 4])
    seen = watch.seen
    assert (seen.steps, seen.windows, seen.drafts, seen.rejected) == (1, 1, 6, 2)
    return {"leaks": seen.leaks, "early": seen.early, "lost": seen.lost, "strays": seen.strays}


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_clean_step(policy):
    """Nothing is counted."""
    rig = Rig(policy)
    assert not any(seen_after(rig, lambda rig: None).values())


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_commit_that_does_nothing(policy):
    """Deferred loses accepted rows, undo leaves rejected ones."""
    rig = Rig(policy)

    def spoil(rig):
        rig.steps.window.commit = lambda layout, sampled: None

    seen = seen_after(rig, spoil)
    wrong = "lost" if policy == "deferred" else "leaks"
    assert seen.pop(wrong) > 0
    assert not any(seen.values())


def test_a_draft_row_that_is_written_early():
    """Even if it is written again by the commit."""

    def spoil(rig):
        rig.caches[0][0, 0, 1] += 1  # block 0, head 0, the row after the settled one

    assert seen_after(Rig("deferred"), spoil)["early"] == 2  # its keys and its values


def test_a_row_of_nobody():
    """Block 7 belongs to no request."""

    def spoil(rig):
        rig.caches[1][7, 0, 0, 0] += 1

    assert seen_after(Rig("undo"), spoil)["strays"] == 1


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_each_fault_happens_once(policy):
    """It is counted, and the calls after it go well; the attention's is in ``test_vllm_flash``."""
    for stage, policies in STAGES.items():
        if policy not in policies or stage == "attend":
            continue
        rig = Rig(policy)
        with fault(rig.steps, stage, 0):
            rig.begin([3], [4])
            rig.commit([2])
        assert rig.count("fallbacks_total") == 1, stage
        while rig.begin([2], [3]) is None and rig.steps.step is None:
            rig.commit([1])
        rig.commit([1])
        assert rig.count("windows_total_committed") == 1
    rig = Rig(policy, on_error="raise")
    rig.begin([3], [4])
    with fault(rig.steps, "commit", 0), pytest.raises(InjectedFault):
        rig.commit([2])


def test_comparing_tokens():
    """The gap is the base's, where the tokens part; noise stops there."""
    base = [[[1, -0.5, -0.75], [2, -0.25, -2.0]], [[3, -1.0, -1.5]]]
    other = [[[1, -0.25, -0.75], [9, -0.25, -0.5]], [[3, -1.0, -1.5]]]
    found = compare(base, other)
    assert (found["prompts"], found["same"], found["gaps"]) == (2, 1, [1.75])
    assert found["noise"] == [0.0, 0.0, 0.25]
    assert compare(base, base)["gaps"] == []
    assert torch.tensor(compare(base, base)["noise"]).max() == 0
