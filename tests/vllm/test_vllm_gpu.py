"""Steps on a GPU, without vLLM: planned, committed, abandoned, and repaired when a launch fails.

The kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from kvtxn.integrations import vllm_gpu
from vllm_step_rig import ON_GPU, Calls, Rig, anywhere, triton_kernels  # noqa: F401


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_steps_of_changing_shape(policy):
    """Full and partial acceptance, uneven drafts, requests that come and go."""
    rig = Rig(policy)
    for drafts, lengths, sampled in (
        ([3, 3], [4, 4], [1, 4]),
        ([3, 1, 2], [4, 2, 3], [2, 2, 1]),
        ([2], [4], [3]),
        ([3, 3], [4, 4], [3, 2]),
    ):
        before = [cache.clone() for cache in rig.caches]
        rig.begin(drafts, lengths)
        made = rig.forward()
        rig.commit(sampled)
        rig.expect(before, made, drafts, lengths, sampled)
    assert rig.count("windows_total_committed") == 4
    assert rig.count("rows_staged_total") == 20
    assert rig.count("rows_committed_total") == 3 + 2 + 2 + 3


@pytest.mark.parametrize(
    ("drafts", "lengths", "prefilling", "reason"),
    [
        ([0, 2], [1, 3], None, "order"),
        ([5], [6], None, "long_query"),
        ([3] * 5, [4] * 5, None, "max_rows"),
        ([2], [3], [True], "prompt_with_drafts"),
    ],
)
def test_a_step_that_cannot_have_a_window_says_why(drafts, lengths, prefilling, reason):
    """No row is marked as a draft, so all are written as stock writes them."""
    rig = Rig("deferred")
    rig.begin([3], [4])
    rig.commit([1])
    rig.begin(drafts, lengths, prefilling)
    assert rig.steps.step is None
    assert bool((rig.steps.window.position == -1).all())
    assert rig.count(f"bypassed_windows_total_{reason}") == 1
    rig.commit([1] * len(drafts))
    assert rig.count("windows_total") == 1


@pytest.mark.parametrize(("policy", "asked"), [("deferred", ["copy_.default"]), ("undo", [])])
def test_a_batch_that_comes_again_takes_next_to_nothing(policy, asked, monkeypatch):
    """Batches seen before are neither judged nor marked anew, in whatever order they come."""
    rig = Rig(policy)
    batches = [([3, 3], [4, 4]), ([2], [3]), ([0, 0], [1, 1]), ([1, 2], [4, 3]), ([1], [4])]
    for _ in range(2):
        for drafts, lengths in batches:
            rig.begin(drafts, lengths)
            marked = int((rig.steps.window.position >= 0).sum())
            assert marked == (sum(drafts) if rig.steps.deferred else 0)
            assert (rig.steps.step is None) == (sum(drafts) == 0)
            rig.commit([1] * len(drafts))
        monkeypatch.setattr(rig.steps, "_judge", None)
    monkeypatch.setattr(rig.steps.window, "save", lambda layout: None)  # one launch, prepared
    drafts, lengths = numpy.array(batches[0])
    with Calls() as calls:
        rig.steps.begin(drafts, lengths, drafts < 0)
    assert calls.names == asked
    assert rig.count("fallbacks_total") == 0


def test_marks_that_fail_late_are_taken_back():
    """Drafts that stayed marked in a step without a window would be in no cache."""
    rig = Rig("deferred")
    position, calls = rig.steps.window.position, []

    def copy(marks):
        position.copy_(marks)
        calls.append(marks)
        if len(calls) == 1:
            raise RuntimeError("a test made this fail")

    rig.steps.window.position = SimpleNamespace(copy_=copy)
    rig.begin([3], [4])
    assert rig.steps.step is None
    assert rig.count("fallbacks_total_begin") == 1
    assert bool((position == -1).all())


def test_what_is_kept_of_batches_is_bounded(monkeypatch):
    """And a batch that is judged once more has the window that it had."""
    monkeypatch.setattr(vllm_gpu, "_MOST_BATCHES", 2)
    rig = Rig("deferred")
    for drafts, lengths in ([([3], [4]), ([2], [3]), ([1], [2])] * 2)[:5]:
        rig.begin(drafts, lengths)
        assert rig.steps.step.layout.draft_len == tuple(drafts)
        rig.commit([1])
        assert len(rig.steps._judged) <= 2


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_warming_up_leaves_no_trace(policy):
    """Every launch is made once; no byte of a cache and no counter changes, and steps work."""
    rig = Rig(policy)
    before = [cache.clone() for cache in rig.caches]
    rig.slots.copy_(torch.arange(32))  # what is left there from an earlier engine
    counts = rig.manager.snapshot()
    rig.steps.warm_up()
    assert all(torch.equal(*pair) for pair in zip(before, rig.caches, strict=True))
    assert rig.manager.snapshot() == counts
    assert bool((rig.steps.window.position == -1).all())
    rig.begin([3, 3], [4, 4])
    made = rig.forward()
    rig.commit([1, 4])
    rig.expect(before, made, [3, 3], [4, 4], [1, 4])


@pytest.mark.skipif(not ON_GPU, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_nothing_compiles_after_warming_up(policy):
    """Whatever the lengths."""
    rig = Rig(policy)
    rig.steps.warm_up()
    known = compiled_kernels()
    assert known
    for drafts in ([3], [3, 3], [3, 1], [2, 3, 1], [1, 1, 1, 1], [3, 3, 3, 3], [2, 2, 2, 3]):
        rig.begin(drafts, [count + 1 for count in drafts])
        rig.commit([2] * len(drafts))
    assert rig.count("windows_total_committed") == 7
    assert compiled_kernels() == known


def compiled_kernels() -> int:
    """Variants that were compiled of the kernels that a step launches."""
    return sum(len(each[0]) for each in triton_kernels.move_rows.device_caches.values())


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_commit_that_fails_loses_nothing_and_rests(policy, monkeypatch):
    """The reference finishes it; the next steps go straight through, then windows come back."""
    rig = Rig(policy)
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3, 3], [4, 4])
    made = rig.forward()

    def broken(*args):
        raise RuntimeError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(rig.steps.window, "commit", broken)
        rig.commit([2, 4])
    rig.expect(before, made, [3, 3], [4, 4], [2, 4])
    assert rig.count("fallbacks_total_commit") == 1
    assert rig.count("windows_total_fell_back") == 1
    assert (rig.count("rows_staged_total"), rig.count("rows_committed_total")) == (6, 4)
    rests = 0
    while rig.begin([3, 3], [4, 4]) is None and rig.steps.step is None:
        rests += 1
        assert rests < 100
    assert rests == rig.count("bypassed_windows_total_resting") == 8


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_an_abandoned_step_leaves_no_draft_row(policy):
    """Its settled rows stay."""
    rig = Rig(policy)
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3, 3], [4, 4])
    made = rig.forward()
    rig.steps.abandon()
    rig.expect(before, made, [3, 3], [4, 4], [1, 1])
    assert rig.count("windows_total_aborted") == 1


@pytest.mark.parametrize("noticed", [True, False])
def test_the_drafts_of_one_layer_alone_wait(noticed):
    """They are written; the other layer's are stock's to write, or something else wrote them.

    Whether the attention noticed or not: what waits nowhere is not committed.
    """
    rig = Rig("deferred")
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3], [4])
    made = rig.forward()
    first, second = rig.steps.layers
    rig.steps.waits(first)
    if noticed:
        untouched = rig.caches[1].clone()
        rig.steps.fell_back(RuntimeError("no attention"))
        assert rig.steps.step.direct
        assert rig.caches[1].equal(untouched)
    for cache, rows in zip((second.key_cache, second.value_cache), made[1], strict=True):
        cache[0, :4] = rows
    rig.commit([2])
    rig.expect(before, made, [3], [4], [4])
    assert rig.count("fallbacks_total_attend") == 1
    assert rig.count("windows_total_fell_back") == 1
    assert rig.count("rows_committed_total") == 1


def test_rows_wait_behind_the_runners_own_blocks():
    """Nothing else is taken for them."""
    rig = Rig("deferred")
    rig.begin([3, 3], [4, 4])
    made = rig.forward()
    drafts = [1, 2, 3, 5, 6, 7]
    for ref, rows in zip(rig.steps.layers, made, strict=True):
        own = ref.key_cache.untyped_storage().data_ptr()
        for plane in (0, 1):
            waiting = rig.steps.window.rows_of(ref, plane)
            assert waiting.shape == (16, *ref.planes[plane].row_shape)
            assert waiting.untyped_storage().data_ptr() == own
            assert waiting[drafts].equal(rows[plane][drafts])
    marks = 2 * rig.steps.window.position.nbytes
    assert rig.steps.window.nbytes == marks + 2 * 2 * 16 * 2 * 8 * 4


def test_errors_can_be_asked_for(monkeypatch):
    """``on_error="raise"`` lets them out."""
    rig = Rig("deferred", on_error="raise")
    rig.begin([3], [4])
    monkeypatch.setattr(rig.steps.window, "commit", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.commit([1])
