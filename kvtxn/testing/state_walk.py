"""Every (state, event) pair of the table, driven through a real window.

A window is brought into each state, and for each event the call is made that causes it. An event
that the table allows must lead to the state in the table; any other must raise
``WindowStateError`` and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from .. import recovery
from ..errors import WindowStateError
from ..window import Window
from ..window_transitions import TRANSITIONS, Event, WindowState
from .batches import Batch
from .faults import OPERATIONS, Faults, InjectedFault
from .kit import TRANSACTIONAL, Kit, KitBase
from .rig import SIMPLE, Rig

_PAIRS: Final = [(state, event) for state in WindowState for event in Event]

#: A failed executor cannot fail again, because no call reaches it any more.
_IMPOSSIBLE: Final = {(WindowState.DIRECT, Event.FALL_BACK)}


class Walk:
    """A window on its way through the state table.

    Args:
        rig: its manager, with an executor that fails on command.
        faults: arms the failures.
        patch: breaks the library's own repairs, the only way to end in FAILED.
    """

    def __init__(self, rig: Rig, faults: Faults, patch: pytest.MonkeyPatch) -> None:
        self.rig, self.faults, self._patch = rig, faults, patch
        self.batch: Batch = rig.batch()
        self.window: Window = rig.open(self.batch)

    def stage(self, count: int) -> None:
        """Stage the next ``count`` layers; if none is missing, the first one again."""
        names = [ref.name for ref in self.rig.refs]
        for _ in range(count):
            missing = self.window.missing
            index = names.index(missing[0]) if missing else 0
            self.rig.stage(self.window, self.batch, [index])

    def break_repairs(self) -> None:
        """Make every repair of the library raise InjectedFault, until the monkeypatch is undone."""

        def broken(*_: object) -> None:
            """Raise InjectedFault."""
            raise InjectedFault("the repair failed as well")

        for name in ("write_layers", "put_back", "write_through", "finish_commit"):
            self._patch.setattr(recovery, name, broken)

    def go_to(self, state: WindowState, ready: bool) -> None:
        """Bring a window that was just begun into a state; a commit accepts one draft per request.

        Args:
            state: the state.
            ready: in OPEN and DIRECT, all layers but the last are staged, or else only the first.
                Before other states all are.
        """
        last = len(self.rig.refs)
        if state is WindowState.DIRECT:
            self.faults.arm("stage")
            self.stage(last - 1 if ready else 1)
        elif state is WindowState.OPEN:
            self.stage(last - 1 if ready else 1)
        elif state is WindowState.FAILED:
            self.stage(last)
            self.faults.error = KeyboardInterrupt
            self.faults.arm("commit", "middle")
            with pytest.raises(KeyboardInterrupt):
                self.window.commit(1)
            self.faults.error = InjectedFault
        elif state is WindowState.FELL_BACK:
            self.stage(last)
            self.faults.arm("commit")
            self.window.commit(1)
        else:
            self.stage(last)
            if state is WindowState.COMMITTED:
                self.window.commit(1)
            elif state is WindowState.ABORTED:
                self.window.abort()
        assert self.window.state is state

    def cause(self, event: Event) -> None:
        """Make the call that causes an event in a window that allows it.

        A commit accepts one each.
        """
        calls: dict[Event, Callable[[], None]] = {
            Event.STAGE: lambda: self.stage(1),
            Event.STAGE_LAST: lambda: self.stage(1),
            Event.COMMIT: lambda: self.window.commit(1),
            Event.ABORT: self.window.abort,
            Event.FALL_BACK: self._fall_back,
            Event.FAIL: self._fail,
        }
        calls[event]()

    def _fall_back(self) -> None:
        """Make the executor fail at its next call, which stages a layer or attends."""
        for operation in OPERATIONS:
            self.faults.arm(operation)
        if self.window.state is WindowState.OPEN:
            self.stage(1)
        else:
            self.rig.attend(self.window, self.batch)

    def _fail(self) -> None:
        """Make the executor fail, and the repair after it; the error is expected.

        In a final state make a call that such a window refuses.
        """
        if self.window.state.is_final:
            self._fall_back()
            return
        self.break_repairs()
        self.faults.arm("stage")
        self.faults.arm("commit")
        last = self.stage if self.window.missing else self.window.commit
        with pytest.raises(InjectedFault):
            last(1)


class StateTable(KitBase):
    """A window behaves as the state table says."""

    @pytest.mark.parametrize(
        ("state", "event"), _PAIRS, ids=[f"{state.name}-{event.name}" for state, event in _PAIRS]
    )
    def test_the_table(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch, state: WindowState, event: Event
    ) -> None:
        """Allowed events lead to the table's state; all others are refused and change nothing.

        A window that fell back does not call its executor again.
        """
        policies = [policy for policy in TRANSACTIONAL if policy in kit.capabilities.policies]
        if not policies:
            pytest.skip(f"{kit.name} only writes through: nothing of it can be taken back")
        for policy in policies:
            with monkeypatch.context() as patch:
                _try(kit, policy, patch, state, event)


def _try(
    kit: Kit, policy: str, patch: pytest.MonkeyPatch, state: WindowState, event: Event
) -> None:
    """Drive one window into ``state``, cause ``event`` there, and assert what the table says."""
    rig, faults = kit.faulty_rig(policy, SIMPLE, on_error="fallback")
    walk = Walk(rig, faults, patch)
    complete = state is WindowState.DIRECT and event in (Event.COMMIT, Event.ABORT)
    walk.go_to(state, ready=event is Event.STAGE_LAST or complete)
    if complete:
        walk.stage(1)
    before, rows = rig.truth_now(), rig.rows()
    if (state, event) in _IMPOSSIBLE:
        fired = list(faults.fired)
        walk.cause(event)
        assert walk.window.state is state
        assert faults.fired == fired, "a window that fell back asked its executor again"
    elif (state, event) in TRANSITIONS:
        walk.cause(event)
        assert walk.window.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(WindowStateError):
            walk.cause(event)
        assert walk.window.state is state
        assert not before.differences(), "a refused event changed a cache"
        assert rig.rows() == rows, "a refused event was counted"
    assert (rig.manager.current is None) == walk.window.state.is_final
