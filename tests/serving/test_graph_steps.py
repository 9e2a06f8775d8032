"""Steps on a GPU, without vLLM: planned, committed, warmed up, and told to hooks and logs.

The kernels run on the GPU where there is one, else through Triton's interpreter.
"""

from __future__ import annotations

import logging

import attrs
import numpy
import pytest
import torch
from kvtxn.integrations.serving import graph_steps
from step_rig import (
    ON_GPU,
    Calls,
    Rig,
    anywhere,  # noqa: F401
    triton_kernels,
)

from kvtxn import (
    ConfigError,
    LayerError,
    WindowState,
    WindowStateError,
)


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
    assert rig.steps.window is None
    assert bool((rig.steps.windows.position == -1).all())
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
            marked = int((rig.steps.windows.position >= 0).sum())
            assert marked == (sum(drafts) if rig.steps.deferred else 0)
            assert (rig.steps.window is None) == (sum(drafts) == 0)
            rig.commit([1] * len(drafts))
        monkeypatch.setattr(rig.steps, "_classify", None)
    drafts, lengths = numpy.array(batches[0])
    for plan in rig.steps._plans.values():
        if plan is not None:
            plan.launches.save = lambda: None  # one launch, prepared
    with Calls() as calls:
        rig.steps.begin(drafts, lengths, drafts < 0)
    assert calls.names == asked
    assert rig.count("fallbacks_total") == 0


def test_what_is_kept_of_batches_is_bounded(monkeypatch):
    """And a batch that is judged once more has the window that it had."""
    monkeypatch.setattr(graph_steps, "_MOST_BATCHES", 2)
    rig = Rig("deferred")
    for drafts, lengths in ([([3], [4]), ([2], [3]), ([1], [2])] * 2)[:5]:
        rig.begin(drafts, lengths)
        assert rig.steps.window.layout.draft_len == tuple(drafts)
        rig.commit([1])
        assert len(rig.steps._plans) <= 2


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
    assert bool((rig.steps.windows.position == -1).all())
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


def test_rows_wait_behind_the_runners_own_blocks():
    """Nothing else is taken for them."""
    rig = Rig("deferred")
    rig.begin([3, 3], [4, 4])
    made = rig.forward()
    drafts = [1, 2, 3, 5, 6, 7]
    for ref, rows in zip(rig.steps.layers, made, strict=True):
        own = ref.key_cache.untyped_storage().data_ptr()
        for plane in (0, 1):
            waiting = rig.steps.windows.stored(16)[ref.name].rows[plane]
            assert waiting.shape == (16, *ref.planes[plane].row_shape)
            assert waiting.untyped_storage().data_ptr() == own
            assert waiting[drafts].equal(rows[plane][drafts])
    marks = 2 * rig.steps.windows.position.nbytes
    assert rig.steps.windows.nbytes == marks + 2 * 2 * 16 * 2 * 8 * 4


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_bytes_that_reach_memory(policy):
    """A draft that waits in a spare slot was written there; an accepted one once more."""
    rig = Rig(policy)
    rig.begin([3, 3], [4, 4])
    rig.forward()
    rig.commit([2, 4])
    row = sum(ref.row_bytes for ref in rig.steps.layers)
    extra = 4 if policy == "deferred" else 2  # accepted rows are copied, rejected ones restored
    assert rig.count("bytes_written_total") == (6 + extra) * row
    assert rig.count("bytes_avoided_total") == 0


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_hooks_and_events_of_a_step(policy, monkeypatch):
    """A connector is told of the accepted slots by group; the log shows each window's life."""
    rig, told, said = Rig(policy), [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("kvtxn")
    monkeypatch.setattr(logger, "handlers", [handler])
    rig.manager.on_commit(lambda window: told.append((window.state, window.stored().tolist())))
    rig.manager.on_abort(lambda window: told.append((window.state, window.kept.tolist())))
    rig.begin([3, 1], [4, 2])
    rig.forward()
    rig.commit([3, 2])
    assert told.pop() == (WindowState.COMMITTED, [0, 1, 2, -1, 4, 5])
    assert said == []
    logger.setLevel(logging.DEBUG)
    try:
        rig.begin([3, 1], [4, 2])
        rig.forward()
        rig.steps.abandon()
    finally:
        logger.setLevel(logging.NOTSET)
    assert told.pop() == (WindowState.ABORTED, [False] * 6)
    begin, end = said
    assert "window.begin" in begin
    assert "window=1 rows=6" in begin
    assert "window.end" in end
    assert "state='aborted'" in end


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("acceptance", value) for value in ("loop", "vectorized")),
        *(("staging", value) for value in ("copy", "reference")),
    ],
)
def test_settings_that_steps_could_not_follow(setting, value):
    """Refused at the start, with the reason and the next step."""
    with pytest.raises(ConfigError, match=f"{setting}='{value}' has no effect on a GPU") as caught:
        Rig("deferred", **{setting: value})
    assert f"leave {setting} out" in str(caught.value)


def test_any_backend_has_steps():
    """Without prepared launches a commit takes longer, and leaves the same bytes."""
    for policy in ("deferred", "undo"):
        rig = Rig(policy, backend="torch")
        for drafts, lengths, sampled in (([3, 3], [4, 4], [1, 4]), ([2], [4], [3])):
            before = [cache.clone() for cache in rig.caches]
            rig.begin(drafts, lengths)
            made = rig.forward()
            rig.commit(sampled)
            rig.expect(before, made, drafts, lengths, sampled)
        assert rig.count("windows_total_committed") == 2


def test_a_layer_counts_once_and_while_its_window_is_open():
    """Notes of foreign layers and after the end are refused; a second note counts nothing."""
    rig = Rig("deferred")
    rig.begin([3], [4])
    window, refs = rig.steps.window, rig.steps.layers
    with pytest.raises(LayerError, match="not a layer of this manager"):
        window.note_staged(attrs.evolve(refs[0]))
    window.note_staged(refs[0])
    window.note_staged(refs[0])
    assert window.missing == tuple(ref.name for ref in refs[1:])
    window.abort()
    with pytest.raises(WindowStateError, match="note_staged"):
        window.note_staged(refs[1])


def test_batches_that_are_alike_are_known_by_their_number():
    """The plan is the one that their arrays lead to; a batch of another number has its own."""
    rig, plans = Rig("deferred"), []
    for drafts, alike in (([3, 3], 0), ([3, 3], 2), ([3, 3], 2), ([3], 1), ([3, 3], 2)):
        count = numpy.array(drafts, dtype=numpy.int32)
        rig.steps.begin(count, count + 1, count < 0, False, alike)
        plans.append(rig.steps.window.plan)
        rig.steps.abandon()
    assert plans[0] is plans[1] is plans[2] is plans[4] is not plans[3]
    assert {2, 1} < set(rig.steps._plans)
