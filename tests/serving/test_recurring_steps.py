"""Steps like the one before them, which one launch commits: they open no window by themselves."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy
import pytest
import torch
from kvtxn.integrations.serving.beside import RowsAlone
from step_rig import DEVICE, Rig, anywhere  # noqa: F401

from kvtxn import WindowStateError
from kvtxn.states import WindowState

DRAFTS, LENGTHS = [3, 3], [4, 4]
COUNTS = ([2, 4], [1, 3], [4, 2], [1, 1], [4, 4])


class States:
    """Stands for recurrent states, whose one launch commits the rows of a window as well.

    Attributes:
        noted: the step.
        launched: launches of both.
        calls: what was asked for by itself.
        error: what the next launch raises, having written nothing.
        rows_alone: launches commit rows, and no states.
    """

    def __init__(self) -> None:
        self.noted = SimpleNamespace(metadata=None, batch=None, replays=0)
        self.launched, self.calls, self.error = 0, [], None
        self.rows_alone = False

    def begin(self, replays: int) -> None:
        self.noted.metadata = self.noted.batch = "a step's"
        self.noted.replays = replays

    def commit(self, window, sampled):
        if window is None or self.noted.replays != window.plan.num_requests:
            self.calls.append("commit" if self.noted.metadata else "nothing")
            self.noted.metadata = None
            return None
        launches = window.plan.launches

        def launch():
            error, self.error = self.error, None
            if error is not None:
                raise error
            launches.commit(sampled)
            self.launched += 1
            if self.rows_alone:
                raise RowsAlone

        return window.plan.together.setdefault(sampled.data_ptr(), launch)

    def repeat(self, sampled):
        assert self.noted.metadata
        self.calls.append("repeat")
        self.noted.metadata = None


class Recurring(Rig):
    """A runner whose counts lie at one address."""

    def __init__(self, policy="deferred", **settings) -> None:
        super().__init__(policy, **settings)
        self.steps.beside = self.states = States()
        self.counts = torch.ones(2, dtype=torch.int32, device=DEVICE)

    def opens(self) -> int:
        """Count the windows that were opened."""
        return len(self.opened)

    def begins(self, replays: int = 2) -> None:
        """Begin a step of the usual batch, whose forward is a replayed graph."""
        drafts = numpy.array(DRAFTS, dtype=numpy.int32)
        self.begin(DRAFTS, LENGTHS, None, False, len(drafts))
        self.states.begin(replays)

    def step(self, sampled, replays: int = 2) -> None:
        """Take a step; every byte is looked at."""
        before = [cache.clone() for cache in self.caches]
        self.begins(replays)
        made = self.forward()
        self.ends(sampled)
        self.expect(before, made, DRAFTS, LENGTHS, sampled)

    def ends(self, sampled) -> None:
        self.counts.copy_(torch.tensor(sampled))
        self.steps.commit(self.counts)
        assert self.states.noted.metadata is None
        assert self.states.calls or self.states.noted.batch is None


@pytest.fixture
def rig(monkeypatch):
    """After a first step, which opens a window."""
    made = Recurring()
    made.opened, own = [], made.steps.windows.begin

    def begin(*args):
        made.opened.append(args)
        return own(*args)

    monkeypatch.setattr(made.steps.windows, "begin", begin)
    made.step(COUNTS[0])
    assert (made.opens(), made.states.launched) == (1, 1)
    return made


def test_usual_steps_open_no_window(rig):
    """Rows are those of windows, and all are counted as such."""
    for sampled in COUNTS:
        rig.step(sampled)
    assert (rig.opens(), rig.states.launched, rig.states.calls) == (1, 6, [])
    assert rig.count("windows_total_committed") == 6
    assert rig.count("stage_operations_total") == 6 * 8 * 2
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
    assert (rig.states.launched, rig.states.calls) == (2, ["nothing"])


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
    rig.states.error = RuntimeError("no launch")
    rig.step(COUNTS[1])
    assert (rig.states.launched, rig.states.calls) == (1, ["repeat"])
    assert rig.count("fallbacks_total_commit") == 1
    assert rig.count("windows_total_fell_back") == 1
    rig.begins()
    assert not rig.steps.waits
    assert rig.count("bypassed_windows_total_resting") == 1


def test_the_error_surfaces_where_that_is_asked_for():
    rig = Recurring(on_error="raise")
    rig.step(COUNTS[0])
    rig.step(COUNTS[1])
    before = [cache.clone() for cache in rig.caches]
    rig.begins()
    rig.forward()
    rig.states.error = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch"):
        rig.ends(COUNTS[2])
    assert rig.states.calls == ["repeat"]
    assert rig.steps.window is None
    assert sum(not torch.equal(*pair) for pair in zip(before, rig.caches, strict=True)) > 0


def test_an_interrupt_leaves_a_failed_window(rig):
    rig.begins()
    rig.forward()
    rig.states.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.ends(COUNTS[2])
    assert rig.count("windows_total_failed") == 1
    assert rig.states.calls == ["repeat"]


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
    rig.commit([2])
    rig.expect(before, made, [2], [3], [2])
    rig.begin([0], [1])
    assert (rig.steps.windows.position == -1).all()
    rig.commit([1])
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert rig.opens() == 3
    assert rig.count("windows_total_committed") == 6


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
    assert rig.states.launched == 5
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
    assert rig.count("stage_operations_total") == 8 * 2


def test_marks_that_somebody_cleared_are_made_again(rig):
    """As when windows were switched off for some steps: drafts do not wait by themselves then."""
    rig.step(COUNTS[1])
    rig.steps.windows.mark(None)
    assert (rig.steps.windows.position == -1).all()
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert rig.opens() == 2
    assert rig.count("windows_total_committed") == 5


def test_a_window_that_was_opened_and_dropped_is_aborted(rig):
    """A forward outside of graphs that failed: the next step begins as if it had not been."""
    rig.step(COUNTS[1])
    rig.begins(replays=0)
    rig.steps.note_staged(rig.steps.layers[0])
    dropped = rig.steps.window
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert dropped.state is WindowState.ABORTED
    assert rig.manager.current is None
    assert rig.count("windows_total_aborted") == 1
    assert rig.count("windows_total_committed") == 5


@pytest.mark.parametrize("opens", [False, True])
def test_rows_that_were_committed_alone_are_counted_once(rig, opens):
    """What is beside them is committed by itself; the step is a committed window."""
    staged = rig.count("rows_staged_total")
    rig.states.rows_alone = True
    rig.begins()
    before = [cache.clone() for cache in rig.caches]
    made = rig.forward()
    assert not opens or rig.steps.window is not None
    rig.ends(COUNTS[1])
    rig.expect(before, made, DRAFTS, LENGTHS, COUNTS[1])
    assert (rig.states.launched, rig.states.calls) == (2, ["repeat"])
    assert rig.count("rows_staged_total") == staged + 6
    assert rig.count("windows_total_committed") == 2
    assert rig.count("fallbacks_total") == 0


def test_a_step_whose_states_were_not_noted_commits_none(rig):
    """The launch would commit those of the step before once more."""
    rig.step(COUNTS[1])
    drafts = numpy.array(DRAFTS, dtype=numpy.int32)
    rig.begin(DRAFTS, LENGTHS, None, False, len(drafts))
    rig.forward()
    rig.ends(COUNTS[2])
    assert (rig.states.launched, rig.states.calls) == (2, ["nothing"])


def test_states_that_others_took_the_place_of_are_not_committed(rig):
    """Between steps, and in the middle of one."""
    first = rig.states
    rig.step(COUNTS[1])
    rig.begins()
    rig.forward()
    rig.steps.beside = None
    rig.counts.copy_(torch.tensor(COUNTS[2]))
    rig.steps.commit(rig.counts)
    assert (first.launched, rig.count("windows_total_committed")) == (2, 3)
    rig.steps.beside = rig.states = States()
    rig.steps._window = None
    for plan in rig.steps._plans.values():
        plan.together.clear()
    for sampled in COUNTS[3:]:
        rig.step(sampled)
    assert (first.launched, rig.states.launched) == (2, 2)


def test_counts_of_another_form_at_the_known_address(rig):
    """The launch would read their halves; they are committed as ``commit_sampled`` takes them."""
    counts = torch.empty(4, dtype=torch.int32, device=DEVICE)
    rig.counts = counts[:2]
    rig.step(COUNTS[1])
    rig.step(COUNTS[2])
    assert rig.states.launched == 3
    rig.counts = counts.view(torch.int64)
    rig.begins()
    before = [cache.clone() for cache in rig.caches]
    made = rig.forward()
    rig.steps.beside.commit = lambda window, _: rig.states.calls.append("commit")
    rig.counts.copy_(torch.tensor(COUNTS[3]))
    rig.steps.commit(rig.counts)
    rig.expect(before, made, DRAFTS, LENGTHS, COUNTS[3])
    assert (rig.states.launched, rig.states.calls) == (3, ["commit"])


def test_other_requests_of_the_same_number_have_their_own_slots(rig):
    """The slots are read where the runner put them for this step."""
    rig.step(COUNTS[1])
    rig.begins()
    rig.slots[0, :8] = torch.tensor([20, 21, 22, 23, 12, 13, 14, 15])
    before = [cache.clone() for cache in rig.caches]
    rig.forward()
    rig.ends([3, 1])
    for cache, old in zip(rig.caches, before, strict=True):
        changed = (cache != old).any(-1).any(1).nonzero().tolist()
        assert changed == [[3, 0], [5, 0], [5, 1], [5, 2]]
    assert rig.opens() == 1


def test_hooks_and_the_log_that_come_in_the_middle_of_a_step(rig, caplog):
    heard = []
    rig.begins()
    rig.forward()
    hook = rig.manager.on_commit(lambda ended: heard.append(ended.number))
    rig.ends(COUNTS[1])
    hook.remove()
    rig.step(COUNTS[2])
    rig.begins()
    rig.forward()
    with caplog.at_level(logging.DEBUG, "kvtxn"):
        rig.ends(COUNTS[3])
    assert heard == [1]
    assert "window.committed" in caplog.text or "window.begin" in caplog.text
    assert rig.count("windows_total_committed") == 4


def test_counters_are_right_in_the_middle_of_a_step(rig):
    for number, sampled in enumerate(COUNTS):
        rig.begins()
        assert rig.count("windows_total_committed") == number + 1
        rig.forward()
        rig.ends(sampled)
    rig.begins()
    rig.manager.metrics.restart()
    rig.forward()
    rig.ends(COUNTS[0])
    assert rig.count("windows_total_committed") == 1
    assert rig.count("stage_operations_total") == 8 * 2
