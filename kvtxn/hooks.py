"""Hooks: code that is told when a window ends, such as an offload or transfer connector.

Nothing may leave a cache before it is committed. A connector that copies rows from
``on_commit`` alone cannot see a rejected one: the hook runs when the commit's work is
enqueued, so that whatever it enqueues on the same stream comes after it, and it is told
which slots hold accepted rows, on the device, without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import attrs
import torch
from torch import Tensor

from . import recovery
from .errors import ConfigError, SlotMappingError
from .layout import RowLayout
from .rows import latest
from .states import WindowState

if TYPE_CHECKING:
    from .executor import Txn

Moment = Literal["on_commit", "on_abort"]


@attrs.frozen(eq=False, kw_only=True)
class EndedWindow:
    """What a hook is told of a window. Its tensors are on the caches' device.

    They hold what they say in stream order, until the next window begins; whoever needs them
    longer, or on another stream, clones them first.

    Attributes:
        number: the window's number; counts the manager's windows from 0.
        state: COMMITTED, ABORTED or FELL_BACK.
        layout: which row is whose; rows lie request by request.
        slots: int64 ``[num_rows]`` by group, -1 is padding; groups that were mapped.
        kept: bool ``[num_rows]``, True where the slot holds an accepted draft row; in a tree, one
            that commit moved there.
        settled: bool ``[num_rows]``, True where it holds a settled row, in every layer.
        overwriting: groups of rings and states, where a later row may have taken the slot.
    """

    number: int
    state: WindowState
    layout: RowLayout
    slots: Mapping[str, Tensor]
    kept: Tensor
    settled: Tensor
    overwriting: frozenset[str] = frozenset()

    def stored(self, group: str = "default") -> Tensor:
        """The slots of a group that are durable, settled and accepted rows alike.

        Returns:
            int64 ``[num_rows]`` in the order of the rows; -1 for rejected rows, for padding
            and, in rings and states, for rows whose slot a later one has taken.

        Raises:
            SlotMappingError: the window had no slots in that group.
        """
        if group not in self.slots:
            raise SlotMappingError(
                "stored",
                f"the window had no slots in group {group!r}",
                expected=f"one of {', '.join(map(repr, self.slots))}",
                got=repr(group),
                hint="name a group of the window's own, as in EndedWindow.slots",
            )
        slots, stored = self.slots[group], self.kept | self.settled
        if group in self.overwriting:
            stored = latest(slots, stored)
        return torch.where(stored, slots, -1)


Callback = Callable[[EndedWindow], object]


@attrs.frozen(eq=False)
class Hook:
    """A registered callback; ``remove`` takes it out again."""

    _callbacks: list[Callback]
    _callback: Callback

    def remove(self) -> None:
        """Do not call it any more. A second time does nothing."""
        if self._callback in self._callbacks:
            self._callbacks.remove(self._callback)


class Hooks:
    """The callbacks of one manager, by the moment at which they are called."""

    def __init__(self) -> None:
        self._callbacks: dict[Moment, list[Callback]] = {"on_commit": [], "on_abort": []}

    def add(self, moment: Moment, callback: Callback) -> Hook:
        """Register a callback.

        Raises:
            ConfigError: it cannot be called, or is registered for this moment already.
        """
        callbacks = self._callbacks[moment]
        if not callable(callback) or callback in callbacks:
            raise ConfigError(
                moment,
                "the callback is registered already"
                if callback in callbacks
                else "the callback cannot be called",
                expected="a new function of one EndedWindow",
                got=repr(callback),
                hint="keep the handle of the first registration, and remove() that"
                if callback in callbacks
                else "pass a function",
            )
        callbacks.append(callback)
        return Hook(callbacks, callback)

    def __getitem__(self, moment: Moment) -> tuple[Callback, ...]:
        """The callbacks of a moment, in the order of their registration."""
        return tuple(self._callbacks[moment])


def ended(
    number: int, state: WindowState, txn: Txn, accepted: Tensor | None, complete: bool
) -> EndedWindow:
    """What hooks are told; a few small operations, none of which waits for the device.

    Args:
        number: of the window.
        state: its final state.
        txn: the window.
        accepted: what was committed, None after an abort.
        complete: whether every layer is staged; else no settled row is in all of them.
    """
    recovery.check_range(txn)
    draft = txn.layout.is_draft
    return EndedWindow(
        number=number,
        state=state,
        layout=txn.layout,
        slots=dict(txn.slots),
        kept=torch.zeros_like(draft) if accepted is None else txn.kept(accepted),
        settled=txn.permit(~draft) if complete else torch.zeros_like(draft),
        overwriting=frozenset(ref.group for ref in txn.layers if ref.kind.overwrites),
    )
