"""Windows over rows and over states that an engine's own kernels advance: all, or nothing.

Every test compares each byte of the caches and of the states with a reference in torch.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupts import interrupted_at
from small_caches import HEAD_SIZE, HEADS, make_layers

from kvtxn import (
    AcceptanceError,
    ConfigError,
    KVTxnError,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
)
from kvtxn.errors import IncompleteWindowError
from kvtxn.layout import RowLayout
from kvtxn.testing import registered
from kvtxn.testing.supplied_states import ToyStates

sys.path.insert(0, str(Path(__file__).parent / "testing"))
from mutants_captured import Capturing

build = partial(RowLayout.build, device=torch.device("cpu"))
COMMITTED, FELL_BACK = WindowState.COMMITTED, WindowState.FELL_BACK
DRAFTS, SAMPLED = (3, 2), (2, 3)
LENGTHS = tuple(drafts + 1 for drafts in DRAFTS)


class Rig:
    """A manager over rows, and windows that hold states beside them.

    Args:
        way: ``"captured"``: rows and states are captured together once they recur; ``"prepared"``:
            rows have prepared launches; ``"executor"``: they have none.
        policy: of the rows.
    """

    def __init__(self, way="prepared", policy="deferred", **settings) -> None:
        self.layers, self.way = make_layers(2), way
        with registered(Capturing) as name:
            backend = "torch" if way == "executor" else name
            config = TxnConfig(policy=policy, backend=backend, max_rows=8, **settings)
            self.manager = TransactionManager(self.layers, config)
        self.slots = torch.full((1, 20), -1, dtype=torch.int64)
        self.states = ToyStates()
        self.windows = self.manager.captured_windows(self.slots, states=self.states)
        self.plan = self.windows.plan(build(DRAFTS, (1, 1)))
        self.sampled = torch.zeros(2, dtype=torch.int32)
        self.value = 10.0

    def begin(self):
        """Begin a step of two requests, and run its forward, as a replayed graph does."""
        self.slots[0, :7] = torch.arange(7)
        window = self.windows.begin(self.plan)
        self.states.begin([5, 2], LENGTHS, replayed=self.way == "captured")
        self.before = [plane.cells.clone() for ref in self.layers for plane in ref.planes]
        self.value += 10
        for row, place in enumerate(self.windows.position[:7].tolist()):
            for ref in self.layers:
                for part, cache in enumerate((ref.key_cache, ref.value_cache)):
                    if place >= 0 and self.windows.deferred:
                        self.windows.rows[ref.name][part][row] = self.value + row
                    else:
                        cache.view(-1, HEADS, HEAD_SIZE)[row] = self.value + row
        return window

    def counts(self, sampled=SAMPLED):
        """Return the tokens sampled for each request, at one address."""
        self.sampled.copy_(torch.tensor(sampled))
        return self.sampled

    def check(self, states, kept, *, settled=True) -> None:
        """Compare states, and the rows that are in the caches; others are as they were."""
        for memory, expected in zip(self.states.memory, states, strict=True):
            assert torch.equal(memory, expected)
        planes = [plane for ref in self.layers for plane in ref.planes]
        for plane, before in zip(planes, self.before, strict=True):
            numbers = plane.cells.view(torch.float32).reshape(-1, HEADS * HEAD_SIZE)
            old = before.view(torch.float32).reshape(-1, HEADS * HEAD_SIZE)
            for row in range(numbers.shape[0]):
                new = row in kept or (settled and row in (0, 4))
                expected = torch.full_like(old[row], self.value + row) if new else old[row]
                assert torch.equal(numbers[row], expected), row

    def count(self, name: str) -> float:
        """Return a counter."""
        return self.manager.snapshot()[f"kvtxn_{name}"]


#: Slots of the accepted drafts.
KEPT = {1, 5, 6}
WAYS = ("captured", "prepared", "executor")
each_way = pytest.mark.parametrize("way", WAYS)
each_policy = pytest.mark.parametrize("policy", ["deferred", "undo"])


@each_policy
@each_way
def test_one_commit_takes_rows_and_states(way, policy):
    """In each of several steps; where they recur, by one launch from the third one on."""
    rig = Rig(way, policy)
    for sampled, kept in (
        (SAMPLED, KEPT),
        ((4, 1), {1, 2, 3}),
        ((1, 1), set()),
        ((9, 0), {1, 2, 3}),
    ):
        window = rig.begin()
        expected = rig.states.expected(sampled)
        assert window.commit_sampled(rig.counts(sampled)) is COMMITTED
        rig.check(expected, kept)
        assert not rig.states.waits
    assert (rig.states.captured, rig.states.replayed) == ((1, 2) if way == "captured" else (0, 0))
    assert rig.count("windows_total_committed") == 4
    waiting = 2 if policy == "deferred" else 0
    assert rig.count("stage_operations_total") == 4 * 7 * (waiting + 3)
    assert rig.count("fallbacks_total") == 0


@each_policy
@each_way
def test_a_state_that_stays_behind_ends_in_failed(way, policy):
    """With an error that says what to do; the next window may begin."""
    rig = Rig(way, policy)
    window = rig.begin()
    rig.states.fails = {"commit": 1, "repeat": 2}
    with pytest.raises(KVTxnError, match=r"did not take in.*no launch.*start the engine again"):
        window.commit_sampled(rig.counts())
    assert window.state is WindowState.FAILED
    assert rig.manager.current is None
    assert rig.count("windows_total_failed") == rig.count("fallbacks_total_states") == 1


def break_rows(rig, window, monkeypatch) -> None:
    """Let the commit of the rows fail."""

    def failing(*_) -> None:
        raise RuntimeError("rows fail")

    if rig.way == "executor":
        monkeypatch.setattr(rig.manager.executor, "commit", failing)
    else:
        window.plan.launches.fails = True


@each_policy
@each_way
def test_on_error_raise_takes_nothing_back_behind_states(way, policy, monkeypatch):
    """The error surfaces once all accepted drafts are in: states cannot be taken back."""
    for states_fail in (False, True):
        rig = Rig(way, policy, on_error="raise")
        window = rig.begin()
        expected = rig.states.expected(SAMPLED)
        if states_fail:
            rig.states.fails = {"commit": 1}
        else:
            break_rows(rig, window, monkeypatch)
        with pytest.raises(RuntimeError, match="no launch" if states_fail else "rows fail") as seen:
            window.commit_sampled(rig.counts())
        assert any(note.startswith("kvtxn: ") for note in seen.value.__notes__)
        assert window.state is FELL_BACK
        rig.check(expected, KEPT)
        monkeypatch.undo()


def recurring(policy, **settings) -> Rig:
    """Return a rig whose rows and states have one launch."""
    rig = Rig("captured", policy, **settings)
    for _ in range(2):
        rig.begin().commit_sampled(rig.counts())
    rig.states.calls.clear()
    return rig


@each_policy
def test_a_launch_of_both_that_fails_wrote_nothing(policy):
    """So each commits by itself, or, under ``on_error="raise"``, neither does."""
    rig = recurring(policy)
    window = rig.begin()
    expected = rig.states.expected(SAMPLED)
    rig.states.fails = {"replay": 0}
    assert window.commit_sampled(rig.counts()) is FELL_BACK
    rig.check(expected, KEPT)
    assert rig.states.calls == ["commit"]
    rig = recurring(policy, on_error="raise")
    window = rig.begin()
    expected = rig.states.expected(None)
    rig.states.fails = {"replay": 0}
    with pytest.raises(RuntimeError, match="no launch"):
        window.commit_sampled(rig.counts())
    assert window.state is WindowState.ABORTED
    rig.check(expected, set())
    assert (rig.states.calls, rig.states.waits) == ([], False)


@each_policy
def test_a_launch_of_both_and_then_the_states_fail(policy):
    """A second fault while the first one is repaired: finished all the same, or FAILED."""
    rig = recurring(policy)
    window = rig.begin()
    expected = rig.states.expected(SAMPLED)
    rig.states.fails = {"replay": 0, "commit": 1}
    assert window.commit_sampled(rig.counts()) is FELL_BACK
    rig.check(expected, KEPT)
    rig = recurring(policy)
    window = rig.begin()
    rig.states.fails = {"replay": 0, "commit": 1, "repeat": 1}
    with pytest.raises(KVTxnError, match="did not take in"):
        window.commit_sampled(rig.counts())
    assert window.state is WindowState.FAILED


@pytest.mark.parametrize("at", ["commit", "replay"])
def test_an_interrupt_promises_nothing(at):
    """No later launch commits the step once more."""
    rig = recurring("deferred")
    if at == "commit":
        rig.sampled = rig.sampled.clone()
    window = rig.begin()
    rig.states.fails, rig.states.error = {at: 1}, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        window.commit_sampled(rig.counts())
    assert window.state is WindowState.FAILED
    assert not rig.states.waits


@pytest.mark.parametrize("falls_back", [False, True])
@each_policy
@each_way
def test_an_interrupt_at_any_call_leaves_no_window_that_took_states_in(way, policy, falls_back):
    """Such a window FAILED, since an abort could not take them back; else the abort leaves them."""
    ends = set()
    for number in range(1, 200):
        rig = Rig(way, policy)
        window = rig.begin()
        before, sampled = rig.states.expected(None), rig.counts()
        if falls_back:
            window.fall_back("attend", RuntimeError("a test"))
        if not interrupted_at(number, partial(window.commit_sampled, sampled)):
            break
        if not window.state.is_final:
            window.abort()
            assert all(map(torch.equal, rig.states.memory, before)), number
        ends.add(window.state)
        assert rig.manager.current is None
    assert WindowState.FAILED in ends
    assert number < 199


@pytest.mark.parametrize("name", ["launches", "capture"])
@each_policy
def test_launches_of_states_that_cannot_be_captured(policy, name, monkeypatch):
    """Both commits still work, one after the other."""

    def failing(*_) -> None:
        raise RuntimeError("not captured")

    monkeypatch.setattr(ToyStates, name, property(failing) if name == "capture" else failing)
    rig = Rig("captured", policy)
    for _ in range(4):
        window = rig.begin()
        expected = rig.states.expected(SAMPLED)
        assert window.commit_sampled(rig.counts()) is COMMITTED
        rig.check(expected, KEPT)
    assert (rig.states.captured, rig.states.calls) == (0, ["commit"] * 4)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_step_that_cannot_be_forgotten_has_ended(end, monkeypatch):
    """Its window is counted, and the next one may begin."""

    def failing() -> None:
        raise RuntimeError("not forgotten")

    rig, told = Rig(), []
    rig.manager.on_commit(told.append)
    window = rig.begin()
    monkeypatch.setattr(rig.states, "abandon", failing)
    with pytest.raises(RuntimeError, match="not forgotten"):
        window.abort() if end == "abort" else window.commit_sampled(rig.counts())
    assert rig.count("windows_total") == rig.count("windows_total_" + window.state.value) == 1
    assert rig.manager.current is None
    assert not window._life.txn.staged


@each_policy
def test_a_window_that_fell_back_takes_states_in(policy):
    """Its rows are written through; the states wait for the commit, or stay as they are."""
    rig = Rig(policy=policy)
    window = rig.begin()
    expected = rig.states.expected(SAMPLED)
    window.fall_back("attend", RuntimeError("a test"))
    assert rig.states.calls == []
    assert window.commit_sampled(rig.counts()) is FELL_BACK
    for memory, state in zip(rig.states.memory, expected, strict=True):
        assert torch.equal(memory, state)
    window = rig.begin()
    expected = rig.states.expected(None)
    window.fall_back("attend", RuntimeError("a test"))
    window.abort()
    for memory, state in zip(rig.states.memory, expected, strict=True):
        assert torch.equal(memory, state)


def test_a_refused_commit_leaves_the_states():
    """Bad counts, a layer that is missing, or a window that is over."""
    rig = Rig()
    window = rig.begin()
    expected = rig.states.expected(SAMPLED)
    for wrong in (torch.tensor([2]), torch.tensor([2.0, 3.0]), [2, 3]):
        with pytest.raises(AcceptanceError):
            window.commit_sampled(wrong)
        with pytest.raises(AcceptanceError):
            window.commit_sampled(rig.counts(), wrong)
    with pytest.raises(AcceptanceError, match="call commit_sampled"):
        window.commit([1, 2])
    window.note_staged(rig.layers[0])
    with pytest.raises(IncompleteWindowError):
        window.commit_sampled(rig.counts())
    assert rig.states.calls == []
    window.note_staged(rig.layers[1])
    assert window.commit_sampled(rig.counts()) is COMMITTED
    rig.check(expected, KEPT)
    with pytest.raises(WindowStateError):
        window.commit_sampled(rig.counts())
    assert rig.states.calls == ["commit"]


@each_way
def test_hooks_are_told_of_both(way):
    """At the end of a commit they hear the layers; an abort took no row in, settled or not."""
    rig, told = Rig(way), []
    rig.manager.on_commit(told.append)
    rig.manager.on_abort(told.append)
    for end in ("commit", "commit", "commit", "abort"):
        window = rig.begin()
        window.abort() if end == "abort" else window.commit_sampled(rig.counts())
    assert [each.states for each in told] == [rig.states.names] * 3 + [()]
    assert [each.kept.nonzero().flatten().tolist() for each in told] == [sorted(KEPT)] * 3 + [[]]
    assert [bool(each.settled.any()) for each in told] == [True] * 3 + [False]


@each_way
def test_hooks_are_told_of_no_state_where_none_waits(way):
    """The rows of the window are committed all the same, also by a repair."""
    rig, told = Rig(way), []
    rig.manager.on_commit(told.append)
    for _ in range(4):
        window = rig.begin()
        expected = rig.states.expected(None)
        rig.states.abandon()
        assert window.commit_sampled(rig.counts()) is COMMITTED
        rig.check(expected, KEPT)
    assert [each.states for each in told] == [()] * 4
    assert rig.states.calls == []


@pytest.mark.parametrize("fails", [{"replay": 0}, {"replay": 0, "commit": 1}])
def test_hooks_are_told_of_states_that_a_repair_committed(fails):
    rig, told = recurring("deferred"), []
    rig.manager.on_commit(told.append)
    window = rig.begin()
    rig.states.fails = dict(fails)
    assert window.commit_sampled(rig.counts()) is FELL_BACK
    assert [each.states for each in told] == [rig.states.names]


@each_policy
@each_way
def test_a_step_without_rows_has_a_window_for_its_states(way, policy):
    """Of more requests than any window has rows for; its commit asks nothing of the executor."""
    rig, told = Rig(way, policy), []
    rig.begin().abort()
    rig.begin().abort()
    marks = rig.windows.marks.shown
    rig.states.begin([1, 3, 6], [1, 4, 2], replayed=True)
    expected = rig.states.expected([1, 2, 2])
    counts = torch.tensor([1, 2, 2], dtype=torch.int32)
    assert rig.windows.begin_states().commit_sampled(counts) is COMMITTED
    rig.check(expected, set())
    assert rig.windows.marks.shown is marks
    hook = rig.manager.on_commit(told.append)
    rig.states.begin([1], [2])
    rig.states.fails = {"commit": 2}
    expected = rig.states.expected([2])
    assert rig.windows.begin_states().commit_sampled(counts[1:2]) is FELL_BACK
    rig.check(expected, set())
    hook.remove()
    assert [(each.states, each.kept.numel()) for each in told] == [(rig.states.names, 0)]
    window = rig.windows.begin_states()
    with pytest.raises(WindowStateError, match="one window at a time"):
        rig.windows.begin_states()
    window.abort()
    assert rig.count("windows_total_committed") == rig.count("windows_total_fell_back") == 1


@each_policy
@each_way
def test_a_window_for_states_that_was_looked_at_ends_as_any(way, policy):
    rig = Rig(way, policy, on_error="raise")
    rig.begin().abort()
    rig.states.begin([1, 3], [1, 4], replayed=True)
    expected = rig.states.expected([1, 2])
    with rig.windows.begin_states() as window:
        assert (window.fallback_reason, window.missing) == (None, ())
        assert window.commit_sampled(torch.tensor([1, 2], dtype=torch.int32)) is COMMITTED
    rig.check(expected, set())
    assert rig.count("fallbacks_total") == 0


def test_states_of_more_requests_than_the_window():
    """Requests with drafts are apart from others in the batch; each takes its own count in."""
    rig = Rig()
    window = rig.begin()
    rig.states.begin([5, 7, 2], [4, 1, 3])
    expected = rig.states.expected([2, 1, 3])
    batch = torch.tensor([2, 1, 3], dtype=torch.int32)
    assert window.commit_sampled(rig.counts(), batch) is COMMITTED
    rig.check(expected, KEPT)


def test_other_windows_of_the_manager_leave_the_states():
    rig = Rig()
    window = rig.begin()
    window.abort()
    rig.states.begin([1], [2])
    before = rig.states.expected(None)
    with rig.manager.window([1], [9, 10], settled=1) as window:
        for ref in rig.layers:
            window.stage(ref, *torch.randn(2, 2, HEADS, HEAD_SIZE))
        window.commit(1)
    assert all(map(torch.equal, rig.states.memory, before))
    assert rig.states.waits


def test_what_is_no_supplier_is_refused():
    rig = Rig()
    with pytest.raises(ConfigError, match="expected a StateSupplier"):
        rig.manager.captured_windows(rig.slots, states=[1])
