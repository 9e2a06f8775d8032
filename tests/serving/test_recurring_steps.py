"""Steps like the one before them, which one launch commits: they open no window by themselves."""

from __future__ import annotations

import logging

import pytest
import torch
from recurring_rig import (  # noqa: F401
    COUNTS,
    DEVICE,
    DRAFTS,
    LENGTHS,
    Recurring,
    after_a_step,
    anywhere,
    static_window,
)

from kvtxn import WindowStateError
from kvtxn.window_transitions import WindowState


@pytest.fixture
def rig(monkeypatch):
    return after_a_step(monkeypatch)


def test_usual_steps_open_no_window(rig):
    """Rows are those of windows, and all are counted as such."""
    for sampled in COUNTS:
        rig.step(sampled)
    assert (rig.opens(), rig.states.replayed, rig.states.calls) == (1, 5, [])
    assert rig.count("windows_total_committed") == 6
    assert rig.count("stage_operations_total") == 6 * 8 * (2 + 2)
    assert rig.steps.window is None
    rig.begins()
    assert rig.steps.waits
    assert rig.steps.window.number == 6
    assert rig.manager.current is rig.steps.window


def test_a_step_that_is_committed_twice_is_committed_once(rig):
    rig.step(COUNTS[1])
    caches = [cache.clone() for cache in rig.caches]
    rig.steps.commit(rig.counts)
    assert all(map(torch.equal, caches, rig.caches))
    assert (rig.states.replayed, rig.states.calls) == (1, [])


def test_undo_saves_rows_when_a_step_begins(monkeypatch):
    """So each of its steps opens a window."""
    rig = Recurring("undo")
    for sampled in COUNTS:
        rig.begins()
        assert rig.steps._window is not None
        rig.forward()
        rig.ends(sampled)
    assert rig.count("windows_total_committed") == len(COUNTS)


def test_a_launch_that_fails_falls_back_as_a_windows_does(rig):
    """The rows are those that were kept; the states are committed by themselves."""
    rig.states.fails = {"replay": 0}
    rig.step(COUNTS[1])
    assert (rig.states.replayed, rig.states.calls) == (0, ["commit"])
    assert rig.count("fallbacks_total_commit") == 1
    assert rig.count("windows_total_fell_back") == 1
    rig.begins()
    assert not rig.steps.waits
    assert rig.count("bypassed_windows_total_resting") == 1


def test_the_error_surfaces_where_that_is_asked_for(monkeypatch):
    """The launch wrote nothing, so no draft and no state is in."""
    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 1)
    rig = Recurring(on_error="raise")
    rig.step(COUNTS[0])
    rig.step(COUNTS[1])
    before = [cache.clone() for cache in rig.caches]
    states = rig.states.expected(None)
    rig.begins()
    made = rig.forward()
    rig.states.calls.clear()
    rig.states.fails = {"replay": 0}
    with pytest.raises(RuntimeError, match="no launch"):
        rig.ends(COUNTS[2])
    assert (rig.states.calls, rig.states.waits, rig.steps.window) == ([], False, None)
    assert all(map(torch.equal, rig.states.memory, states))
    rig.expect(before, made, DRAFTS, LENGTHS, [1, 1])
    assert rig.count("windows_total_aborted") == 1


def test_an_interrupt_leaves_a_failed_window(rig):
    rig.begins()
    rig.forward()
    rig.states.fails, rig.states.error = {"replay": 0}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.ends(COUNTS[2])
    assert rig.count("windows_total_failed") == 1
    assert (rig.states.calls, rig.states.waits) == ([], False)


def test_a_step_that_is_abandoned_writes_nothing(rig):
    """As the next step begins, and as the runner is released."""
    for end in (rig.begins, rig.steps.abandon):
        rig.step(COUNTS[1])
        rig.begins()
        rig.forward()
        before = [cache.clone() for cache in rig.caches]
        own = rig.slots.clone()
        end()
        assert all(map(torch.equal, before, rig.caches))
        assert torch.equal(own, rig.slots)
        rig.steps.abandon()
    assert rig.count("windows_total_committed") == 3
    assert rig.count("windows_total_aborted") == 3


def test_another_batch_has_a_window_of_its_own(rig):
    """And its marks; the steps behind it open one first."""
    rig.step(COUNTS[1])
    before = [cache.clone() for cache in rig.caches]
    rig.begin([2], [3])
    made = rig.forward()
    rig.states.begin([3], [3])
    states = rig.states.expected([2])
    rig.commit([2])
    rig.expect(before, made, [2], [3], [2])
    assert all(map(torch.equal, rig.states.memory, states))
    rig.begin([0], [1])
    rig.states.begin([3], [1])
    states = rig.states.expected([1])
    assert (rig.steps.windows.position == -1).all()
    rig.commit([1])
    assert all(map(torch.equal, rig.states.memory, states))
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert rig.opens() == 3  # and one without rows
    assert rig.count("windows_total_committed") == 7


def test_forwards_outside_of_graphs_open_the_window(rig):
    """They note the layers whose drafts wait; the states are no graph's, either."""
    rig.begins(replays=0)
    rig.forward()
    for ref in rig.steps.layers:
        rig.steps.note_staged(ref)
    assert rig.steps.window.state is WindowState.STAGED
    rig.ends(COUNTS[1])
    assert rig.states.calls == ["commit"]
    rig.step(COUNTS[2], replays=0)
    assert rig.states.calls == ["commit"] * 2
    assert rig.count("windows_total_committed") == 3


def test_hooks_hear_of_each_window(rig):
    heard = []
    hook = rig.manager.on_commit(lambda ended: heard.append(ended.number))
    rig.step(COUNTS[1])
    rig.step(COUNTS[2])
    hook.remove()
    rig.step(COUNTS[3])
    rig.step(COUNTS[4])
    assert heard == [1, 2]
    assert rig.states.replayed == 4
    assert rig.count("windows_total_committed") == 5


def test_the_debug_log_has_each_window(rig, caplog):
    rig.step(COUNTS[1])
    with caplog.at_level(logging.DEBUG, "kvtxn"):
        rig.step(COUNTS[2])
    rig.step(COUNTS[3])
    assert "window.begin" in caplog.text
    assert rig.count("windows_total_committed") == 4


def test_another_window_of_the_manager_is_refused(rig):
    """Once the step's own is open; one that stays open would have the step refused."""
    rig.begins()
    assert rig.steps.window is rig.manager.current
    with pytest.raises(WindowStateError, match="one window at a time"):
        rig.steps.windows.begin(rig.steps.windows.plan(rig.steps.layout((1,), (1,))))
    rig.ends(COUNTS[1])


def test_counters_begin_anew_after_a_warm_up(rig):
    rig.step(COUNTS[1])
    rig.manager.metrics.restart()
    rig.step(COUNTS[2])
    assert rig.count("windows_total_committed") == 1
    assert rig.count("stage_operations_total") == 8 * (2 + 2)


def test_states_take_the_counts_of_the_batch_in_a_step_that_recurs_too(monkeypatch):
    """Counts of the whole batch, where the window's requests are not its first ones."""
    rig = after_a_step(monkeypatch)
    rig.step(COUNTS[1])
    rig.begins()
    states = rig.states.expected([3, 1])
    rig.forward()
    rig.counts.copy_(torch.tensor([2, 4]))
    rig.steps.commit(rig.counts, torch.tensor([3, 1], dtype=torch.int32, device=DEVICE))
    assert all(map(torch.equal, rig.states.memory, states))
    rig.step(COUNTS[2])
