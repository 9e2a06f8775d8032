"""Steps on a GPU of which a part fails or is refused: caches, counts, and the steps after them.

The kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from failing_stage import STAGES, InjectedFault, failing_stage
from step_rig import (
    BrokenLaunches,
    Rig,
    anywhere,  # noqa: F401
)

from kvtxn import (
    SlotMappingError,
    WindowState,
)


@pytest.mark.parametrize(("drafts", "lengths"), [([3], [2]), ([2, 3], [3, 2]), ([2, -1], [3, 1])])
@pytest.mark.parametrize("on_error", ["fallback", "raise"])
def test_more_drafts_than_rows(on_error, drafts, lengths):
    """No window: under fallback stock writes every row, and the failure is counted."""
    rig = Rig("deferred", on_error=on_error)
    if on_error == "raise":
        with pytest.raises(SlotMappingError, match="do not go together"):
            rig.begin(drafts, lengths)
    else:
        rig.begin(drafts, lengths)
        assert rig.count("fallbacks_total_begin") == 1
    assert rig.steps.window is None
    assert bool((rig.steps.windows.position == -1).all())


def test_marks_that_fail_late_are_taken_back():
    """Drafts that stayed marked in a step without a window would be in no cache."""
    rig = Rig("deferred")
    position, calls = rig.steps.windows.position, []

    def copy(marks):
        position.copy_(marks)
        calls.append(marks)
        if len(calls) == 1:
            raise RuntimeError("a test made this fail")

    rig.steps.windows.position = SimpleNamespace(copy_=copy)
    rig.begin([3], [4])
    assert rig.steps.window.state is WindowState.DIRECT
    assert not rig.steps.waits
    assert rig.count("fallbacks_total_begin") == 1
    assert bool((position == -1).all())
    rig.commit([2])
    assert rig.count("windows_total_fell_back") == 1
    assert (rig.count("rows_staged_total"), rig.count("rows_committed_total")) == (3, 1)


def test_marks_that_cannot_be_taken_back_come_out():
    """Drafts that stay marked would be lost, so this is no fallback; one failure alone is."""
    rig = Rig("deferred")
    rig.begin([3], [4])
    rig.commit([1])
    copies = []

    def copy(marks):
        copies.append(marks)
        if len(copies) == 1:
            raise RuntimeError("a test made this fail")

    rig.steps.windows.position = SimpleNamespace(copy_=copy)
    rig.begin([0], [1])
    assert (len(copies), rig.count("fallbacks_total_begin")) == (2, 1)
    rig.steps.windows.marks.shown = None
    rig.steps.windows.position = SimpleNamespace(copy_=lambda marks: 1 / 0)
    rig.steps._rest = 0
    with pytest.raises(ZeroDivisionError):
        rig.begin([3], [4])
    assert rig.count("windows_total_failed") == 1


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_commit_that_fails_loses_nothing_and_rests(policy):
    """The reference finishes it; the next steps go straight through, then windows come back."""
    rig = Rig(policy)
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3, 3], [4, 4])
    made = rig.forward()
    rig.break_launches()
    rig.commit([2, 4])
    rig.expect(before, made, [3, 3], [4, 4], [2, 4])
    assert rig.count("fallbacks_total_commit") == 1
    assert rig.count("windows_total_fell_back") == 1
    assert (rig.count("rows_staged_total"), rig.count("rows_committed_total")) == (6, 4)
    rests = 0
    while rig.begin([3, 3], [4, 4]) is None and rig.steps.window is None:
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


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_an_interrupted_abort_is_made_again_by_the_next_step(policy, monkeypatch):
    rig = Rig(policy)
    rig.begin([3], [4])

    def interrupted(window, **given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.steps.window), "abort", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.steps.abandon()
    rig.begin([3], [4])
    rig.commit([2])
    assert rig.count("windows_total_aborted") == rig.count("windows_total_committed") == 1


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("saves", [True, False], ids=["forward saves", "begin saves"])
def test_an_abandoned_step_is_taken_back_in_its_own_slots(backend, saves):
    """The next step's are in place when it is aborted."""
    rig = Rig("undo", backend=backend)
    save = rig.steps.save_in_forward(8) if saves else None
    assert (save is not None) == (saves and backend == "triton")
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3, 1], [4, 2], None, saves)
    if save is not None:
        save()
    rig.steps.before_replay(saves=save is not None)
    made = rig.forward()
    shown = []
    rig.manager.on_abort(lambda window: shown.append(window.slots["default"].tolist()))
    rig.slots.fill_(-1)
    rig.slots[0, :3] = torch.tensor([20, 21, 22], device=rig.slots.device)
    rig.plan(numpy.array([2]), numpy.array([3]), numpy.array([False]))
    rig.expect(before, made, [3, 1], [4, 2], [1, 1])
    assert rig.steps.window.layout.draft_len == (2,)
    assert shown == [[0, 1, 2, 3, 4, 5]]


def test_hooks_are_told_of_no_row_whose_slot_is_not_known():
    """Of drafts that waited nothing is taken back, so nobody has kept their slots."""
    rig, shown = Rig("deferred"), []
    rig.manager.on_abort(lambda window: shown.append(window.stored().tolist()))
    rig.begin([3], [4])
    rig.forward()
    rig.begin([1, 1], [2, 2])
    assert shown == [[-1] * 4]


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
    rig.steps.note_staged(first)
    if noticed:
        untouched = rig.caches[1].clone()
        rig.steps.fall_back(RuntimeError("no attention"))
        assert rig.steps.window.state is WindowState.DIRECT
        assert rig.caches[1].equal(untouched)
    for cache, rows in zip((second.key_cache, second.value_cache), made[1], strict=True):
        cache[0, :4] = rows
    rig.commit([2])
    rig.expect(before, made, [3], [4], [4])
    assert rig.count("fallbacks_total_attend") == 1
    assert rig.count("windows_total_fell_back") == 1
    assert rig.count("rows_committed_total") == 1


@pytest.mark.parametrize("stage", ["begin", "attend", "commit"])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_errors_can_be_asked_for(policy, stage):
    """``on_error="raise"`` restores the caches, counts the window, and lets the error out."""
    if (policy, stage) == ("undo", "attend"):
        pytest.skip("under undo the attention is the engine's own")
    rig = Rig(policy, on_error="raise")
    rig.begin([3], [4])
    rig.commit([4])
    before = [cache.clone() for cache in rig.caches]
    if stage == "begin":
        position, plan = rig.steps.windows.position, next(iter(rig.steps._plans.values()))
        own, plan.launches = plan.launches, BrokenLaunches(ZeroDivisionError)
        rig.steps.windows.mark(None)
        failing = SimpleNamespace(copy_=lambda marks: len(marks) - 1 / int(marks[1] < 0))
        rig.steps.windows.position = failing
        with pytest.raises(ZeroDivisionError):
            rig.begin([3], [4])
        rig.steps.windows.position, plan.launches = position, own
        assert all(map(torch.equal, rig.caches, before))
    else:
        rig.begin([3], [4])
        made = rig.forward()
        rig.break_launches()
        failing = partial(rig.commit, [3])
        if stage == "attend":
            rig.steps.note_staged(rig.steps.layers[0])
            failing = partial(rig.steps.fall_back, RuntimeError("a test made this fail"))
        with pytest.raises(RuntimeError, match="a test made"):
            failing()
        rig.expect(before, made, [3], [4], [1])
    assert rig.count("windows_total_aborted") == 1
    assert (rig.count("rows_staged_total"), rig.count("rows_rejected_total")) == (6, 3)
    assert rig.manager.current is None
    rig.begin([2], [3])
    rig.commit([2])
    assert rig.count("windows_total_committed") == 2


def test_a_commit_can_be_checked():
    """``debug`` finds a commit that left wrong bytes; the reference mends them."""
    rig = Rig("deferred", debug=True)
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3], [4])
    made = rig.forward()
    executor = rig.manager.executor
    commit = executor.commit

    def half(txn, accepted):
        commit(txn, torch.zeros_like(accepted))

    executor.commit = half
    rig.commit([3])
    rig.expect(before, made, [3], [4], [3])
    assert rig.count("fallbacks_total_commit") == 1
    assert (rig.count("rows_staged_total"), rig.count("rows_committed_total")) == (3, 2)


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_refused_count_does_not_block_later_steps(policy):
    """Counts that do not fit are an error; the next step aborts the window and has its own."""
    rig = Rig(policy)
    before = [cache.clone() for cache in rig.caches]
    rig.begin([3], [4])
    rig.forward()
    with pytest.raises(Exception, match=r"."):
        rig.steps.commit("two")
    rig.begin([2], [3])
    made = rig.forward()
    rig.commit([3])
    rig.expect(before, made, [2], [3], [3])


# -- each stage, beneath the steps' own code --------------------------------------------------

FAILING = [(policy, stage) for policy in STAGES for stage in STAGES[policy] if stage != "attend"]


@pytest.mark.parametrize(("policy", "stage"), FAILING)
def test_each_stage_fails_once(policy, stage):
    """A failure is counted, later steps go well (``test_flash_backend`` has the attention's)."""
    rig = Rig(policy)
    with failing_stage(rig.steps, stage, 0):
        rig.begin([3], [4])
        rig.commit([2])
    assert rig.count("fallbacks_total") == 1
    while rig.begin([2], [3]) is None and rig.steps.window is None:
        rig.commit([1])
    rig.commit([1])
    assert rig.count("windows_total_committed") == 1


@pytest.mark.parametrize("policy", STAGES)
def test_a_batch_that_comes_again_can_fail_at_its_plan(policy):
    """Plans are remembered, and a test of the plan's failure would find no plan to fail."""
    rig = Rig(policy)
    for _ in range(2):
        rig.begin([3], [4])
        rig.commit([2])
    with failing_stage(rig.steps, "plan", 0) as calls:
        rig.begin([3], [4])
        rig.commit([2])
    assert calls == [1]
    assert rig.count("fallbacks_total") == 1


@pytest.mark.parametrize("policy", STAGES)
def test_the_fault_is_raised_where_errors_are_asked_for(policy):
    """``on_error="raise"`` hands the test's own exception out."""
    rig = Rig(policy, on_error="raise")
    with failing_stage(rig.steps, "commit", 0):
        rig.begin([3], [4])
        with pytest.raises(InjectedFault):
            rig.commit([2])
