"""Hooks: callbacks for the end of a window, such as an offload or transfer connector's.

No row may leave a cache before it is committed. A connector that copies rows only in an
``on_commit`` hook never copies a rejected one. The hook is called when the commit's work is
enqueued, so work that it enqueues on the same stream runs after the commit. It is given the slots
of the accepted rows as tensors on the device, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import Tensor

from .errors import ConfigError, SlotMappingError
from .executor import Txn
from .layout import RowLayout
from .row_io import last_writers
from .state_slots import Crossings
from .window_transitions import WindowState

Moment = Literal["on_commit", "on_abort"]


@attrs.frozen(eq=False, kw_only=True)
class EndedWindow:
    """The argument of a hook: a window that ended. Its tensors are on the caches' device.

    The tensors are valid in stream order, until the next window begins; clone them to use them
    later, or on another stream.

    Attributes:
        number: the window's number; counts the manager's windows from 0.
        state: COMMITTED, ABORTED or FELL_BACK.
        layout: the request of each row; rows lie request by request.
        slots: int64 ``[num_rows]`` by group, -1 is padding; only groups that had slots.
        kept: bool ``[num_rows]``, True if the slot holds an accepted draft row; in a tree, a row
            that commit moved there.
        settled: bool ``[num_rows]``, True if the slot holds a settled row, in every layer; after an
            abort of a window with recurrent states all False, since no state took one in.
        overwriting: groups of rings and states, where a later row may have taken the slot.
        crossings: by group, the boundaries of the requests' states, if it has ``StateSlots``.
        states: names of the layers of a ``StateSupplier`` whose states this commit advanced; empty
            after an abort.
    """

    number: int
    state: WindowState
    layout: RowLayout
    slots: Mapping[str, Tensor]
    kept: Tensor
    settled: Tensor
    overwriting: frozenset[str] = frozenset()
    crossings: Mapping[str, Crossings] = attrs.field(factory=dict)
    states: tuple[str, ...] = ()

    def stored(self, group: str = "default") -> Tensor:
        """Return the slots of a group's durable rows, settled and accepted alike.

        Returns:
            int64 ``[num_rows]`` in the order of the rows; -1 for rejected rows, for padding
            and, in rings and states, for rows whose slot a later row has taken.

        Raises:
            SlotMappingError: the window had no slots in that group.
        """
        if group not in self.slots:
            raise SlotMappingError(
                "stored",
                f"the window had no slots in group {group!r}",
                expected=f"one of {', '.join(map(repr, self.slots))}",
                got=repr(group),
                hint="name a group that is in EndedWindow.slots",
            )
        slots, stored = self.slots[group], self.kept | self.settled
        if group in self.overwriting:
            stored = last_writers(slots, stored)
        return torch.where(stored, slots, -1)


Callback = Callable[[EndedWindow], object]


@attrs.frozen(eq=False)
class Hook:
    """A registered callback, returned by ``Hooks.add``."""

    _callbacks: list[Callback]
    _callback: Callback

    def remove(self) -> None:
        """Stop calling the callback. A second call does nothing."""
        if self._callback in self._callbacks:
            self._callbacks.remove(self._callback)


class Hooks:
    """The callbacks of one manager, by the moment at which they are called."""

    def __init__(self) -> None:
        self._callbacks: dict[Moment, list[Callback]] = {"on_commit": [], "on_abort": []}

    def add(self, moment: Moment, callback: Callback) -> Hook:
        """Register a callback, and return the handle that removes it.

        Raises:
            ConfigError: ``callback`` cannot be called, or is registered for this moment already.
        """
        callbacks = self._callbacks[moment]
        if not callable(callback) or callback in callbacks:
            raise ConfigError(
                moment,
                "the callback is registered already"
                if callback in callbacks
                else "the callback cannot be called",
                expected="a function of one EndedWindow that is not registered yet",
                got=repr(callback),
                hint="keep the handle of the first registration, and call its remove()"
                if callback in callbacks
                else "pass a function",
            )
        callbacks.append(callback)
        return Hook(callbacks, callback)

    def live(self, moment: Moment) -> Sequence[Callback]:
        """Return a moment's own list of callbacks, which changes as callbacks come and go."""
        return self._callbacks[moment]

    def __getitem__(self, moment: Moment) -> tuple[Callback, ...]:
        """Return the callbacks of a moment, in the order of their registration."""
        return tuple(self._callbacks[moment])


def ended(
    number: int,
    state: WindowState,
    txn: Txn,
    accepted: Tensor | None,
    *,
    complete: bool,
    supplied: tuple[str, ...] = (),
) -> EndedWindow:
    """Describe a window that ended; a few small operations, none of which waits for the device.

    Args:
        number: the window's number.
        state: the window's final state.
        txn: the window.
        accepted: the counts, mask or path of the commit; None after an abort.
        complete: True if every layer is staged; if False, ``EndedWindow.settled`` is all False.
        supplied: the layers whose states a ``StateSupplier`` commits with the window.
    """
    txn.check_range()
    draft = txn.layout.is_draft
    has_states = bool(supplied) or any(ref.states for ref in txn.layers)
    everywhere = complete and (accepted is not None or not has_states)
    return EndedWindow(
        number=number,
        state=state,
        layout=txn.layout,
        slots=dict(txn.slots),
        kept=torch.zeros_like(draft) if accepted is None else txn.kept(accepted),
        settled=txn.permit(~draft) if everywhere else torch.zeros_like(draft),
        overwriting=frozenset(ref.group for ref in txn.layers if ref.kind.overwrites),
        crossings=dict(txn.crossings),
        states=supplied if txn.states_in else (),
    )
