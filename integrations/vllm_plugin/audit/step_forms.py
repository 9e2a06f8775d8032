"""``StepForms``: describes the rows of a runner's forward as a ``Step`` of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ....audit import Step
from ...serving.step import Rows
from ..internals.audited_states import States

#: Steps that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048

#: Pairs of a tensor of the runner's and the watch's own copy of it.
Copies = Sequence[tuple[Tensor, Tensor]]


class StepForms:
    """The steps of a runner; forwards out of the same buffers are one ``Step``.

    So the ledger examines its tensors once, and packs the arguments of its launches once.
    """

    def __init__(self) -> None:
        self._known: Final[dict[tuple[int, int], tuple[object, Step, Copies]]] = {}
        self._copies: Final[dict[tuple[int, int], Tensor]] = {}

    def step(self, rows: Rows, lines: Tensor, states: States | None, *, copies: bool) -> Step:
        """Return the step of a forward.

        Args:
            rows: the batch's rows.
            lines: int64 ``[num_requests]``, the lines of its requests.
            states: its states; None if the model has none.
            copies: copy the rows' slots, because the drafter writes into the runner's buffers
                before the step has ended.
        """
        recurs = rows.buffers is not None and (states is None or states.buffers is not None)
        key = id(rows.buffers), id(states and states.buffers)
        known = self._known.get(key) if recurs else None
        if known is None:
            own, pairs = self._copied(rows) if copies else (rows, ())
            known = (rows.buffers, states and states.buffers), _step(own, lines, states), pairs
            if recurs:
                if len(self._known) >= _MAX_REMEMBERED:
                    self._known.clear()
                self._known[key] = known
        for theirs, copy in known[2]:
            copy.copy_(theirs)
        return known[1]

    def _copied(self, rows: Rows) -> tuple[Rows, Copies]:
        """Return rows with starts and slots in tensors of their own, and what is copied there."""
        copies = {theirs: self._copy_of(theirs) for theirs in (rows.starts, *rows.slots.values())}
        slots = {name: copies[each] for name, each in rows.slots.items()}
        own = attrs.evolve(rows, starts=copies[rows.starts], slots=slots)
        return own, tuple(copies.items())

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor for copies of a runner's buffer; the same one for the same buffer."""
        key = tensor.data_ptr(), len(tensor)
        if key not in self._copies:
            with torch.inference_mode(False):
                self._copies[key] = torch.empty_like(tensor)
        return self._copies[key]


def _step(rows: Rows, lines: Tensor, states: States | None) -> Step:
    """Describe a forward."""
    return Step(
        lines=lines,
        starts=rows.starts,
        first=rows.first,
        tokens=rows.tokens,
        drafts=rows.drafts,
        slots=rows.slots if states is None else {**rows.slots, **states.slots},
        tables=rows.tables,
        positions=rows.positions,
        sources={} if states is None else states.sources,
        told=None if states is None else states.told,
    )
