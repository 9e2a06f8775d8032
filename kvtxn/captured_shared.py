"""The parts that windows over one captured forward share: fixed tensors, and a plan per layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import attrs
from torch import Tensor

from .captured_launches import CapturedPlaces, LayoutLaunches
from .context import WindowContext
from .executor import StagedLayer, Txn
from .layout import RowLayout
from .turn import Turn
from .window_transitions import TRANSITIONS, Event, WindowState

OPEN: Final = WindowState.OPEN
STAGED: Final = TRANSITIONS[OPEN, Event.STAGE_LAST]

#: Most numbers of rows for which views of every layer's rows are kept.
_MOST_SIZES: Final = 64


@attrs.define(eq=False)
class StepPlan:
    """The facts about windows of one layout that are known before their steps.

    Attributes:
        windows: the ``CapturedWindows`` that made the plan, and that it is for.
        layout: the layout; the window's rows are the first rows of the batch.
        launches: the executor's prepared launches; None if it has none.
        marks: int64 ``[max_rows]``, the content of ``position`` that marks these drafts.
        stage_operations: number of rows x number of layers whose drafts wait for commit, those
            with states of a supplier included.
        num_requests: requests of the window.
    """

    windows: object
    layout: RowLayout
    launches: LayoutLaunches | None
    marks: Tensor | None
    stage_operations: int
    num_requests: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.num_requests = self.layout.num_requests


class SharedPlaces:
    """The tensors and counters that all windows over one captured forward share.

    Args:
        context: the manager's context.
        turn: the manager's ``Turn``, which lets one window at a time be open.
        places: the fixed tensors.
        saves: True where the executor's own launches copy the old rows of a window into ``rows``
            before the forward writes over them (policy ``undo``). Then ``rows`` is what an abort or
            a fallback puts back; else it holds the drafts that wait for the commit.

    Attributes:
        quiet: True if kvtxn's debug log was off when the open window began. Its commit then makes
            no log event.
        on_commit: a live view of the callbacks given to ``manager.on_commit``. It is empty while
            nobody listens; then a commit makes no ``EndedWindow`` to hand around.
        on_host: True if the caches are in the host's memory.
        device: the number of the caches' device.
        stored: function of a number of rows; returns that many rows of each layer, by layer name,
            as ``StagedLayer``.
        pattern: for ``Txn.pattern``: the rows of all these windows have the same strides.
        supplier: commits the states of the engine's own kernels; None without any.
        num_supplied: number of layers whose states these are.
    """

    def __init__(
        self,
        context: WindowContext,
        turn: Turn,
        places: CapturedPlaces,
        *,
        saves: bool,
    ) -> None:
        self.context = context
        self.turn = turn
        self.metrics = context.metrics
        self.supplier = context.supplier
        self.num_supplied = 0 if self.supplier is None else len(self.supplier.names)
        self.outcomes = context.metrics.windows
        self.first_state = OPEN if context.policy == "deferred" else STAGED
        self.quiet = False
        self.on_commit = context.hooks.live("on_commit")
        self.slots = places.slots
        self.rows = places.rows
        self.counters = places.counters
        self.num_layers = len(context.refs)
        self.pattern = object()
        self.stored = lru_cache(maxsize=_MOST_SIZES)(self._stored)
        self.on_host = self.slots.is_cpu
        self.device = self.slots.get_device()
        self._saves = saves
        self._filled, self._saved_slots = places.filled, places.saved_slots

    def save(self, launches: LayoutLaunches | None) -> None:
        """Copy the step's slots, where an abort may need them, and its old rows by a launch.

        Without ``launches`` of the step's layout the caller copies the rows.
        """
        filled, saved = self._filled, self._saved_slots
        if filled is not None and saved is not None and not (launches and launches.saves_slots):
            saved.copy_(filled)
        if launches is not None:
            launches.save()

    def fill(self, txn: Txn, *, saved: bool) -> None:
        """Set a ``Txn``'s counters, pattern, slots, range check and, if ``saved``, its old rows.

        All of these are views of the shared tensors; nothing waits for the device.
        """
        txn.counters, txn.pattern = self.counters, self.pattern
        layout, slots = txn.layout, self.slots
        if saved and self._saved_slots is not None:
            slots = self._saved_slots
        for line, (group, limit) in zip(slots, self.context.groups.items(), strict=True):
            if self.context.kinds[group].per_request:
                slots = line[: layout.num_requests][layout.request]
            else:
                slots = line[: layout.num_rows]
            txn.slots[group] = slots
            inside = ((slots >= -1) & (slots < limit)).all()
            txn.in_range = inside if txn.in_range is None else txn.in_range & inside
        if self._saves and saved:
            stored = self.stored(layout.num_rows)
            txn.saved = {name: layer.rows for name, layer in stored.items()}

    def _stored(self, num_rows: int) -> dict[str, StagedLayer]:
        """View the first ``num_rows`` rows of each layer in the caches' own dtypes."""
        found = {}
        for ref in self.context.refs:
            parts = zip(self.rows[ref.name], ref.kept, strict=True)
            rows = tuple(part[:num_rows].view(kept.format.dtype) for part, kept in parts)
            found[ref.name] = StagedLayer(ref, rows)
        return found
