"""``RecordRepeat``: a step like the last one, filled into the next step's record in one call.

An engine's own code runs for milliseconds between two calls, so each function and each object that
a call needs comes from the host's memory, and costs more than what is done there. So this is one
function, which reads few objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...audit.graph_steps import LinesInPlace, NewBlocks
from ...audit.groups import Place
from ...audit.step import Step
from .next_step import (
    ACCEPTED,
    BLOCKS,
    COLUMNS,
    COUNT,
    FIRST_LINE,
    HANDED_OUT,
    LINES,
    MOST,
    MOST_LINES,
    NUM_LINES,
    OUTCOME,
    RECORDS,
    REQUESTS,
    SAMPLED,
    TARGET,
    outcome_row,
)
from .pending_changes import PendingChanges


class RecordRepeat:
    """Fills the outcome of the last step and new blocks into the record of the next step.

    It is valid until another call changes the record; each call after that returns False. See
    ``Repeat``.

    Args:
        pending: has the records.
        accepted: an outcome of a form that can wait: the counts, int32 or int64 ``[num_requests]``.
        sampled: the ids, int32 or int64 ``[num_requests, n]``.
        besides: as for ``Passes.resolve``.
        places: for each group by which blocks are given its place; None for a group that the ledger
            does not watch.
    """

    __slots__ = (
        *("_counts", "_device", "_record", "_ids", "_places", "_row", "_shapes", "_told"),
        "_pending",
    )

    def __init__(
        self,
        pending: PendingChanges,
        accepted: Tensor,
        sampled: Tensor,
        besides: int,
        places: Sequence[Place | None],
    ) -> None:
        self._pending, self._record = pending, pending.next
        self._told = pending.next.told
        self._counts, self._ids = accepted.dtype, sampled.dtype
        self._shapes, self._device = (accepted.shape, sampled.shape), accepted.get_device()
        self._row = memoryview(outcome_row(accepted, sampled, besides))
        self._places = [
            (index, place.base, place.stride, place.group.num_blocks)
            for index, place in enumerate(places)
            if place is not None
        ]

    def same(self, accepted: Tensor, sampled: Tensor, new_blocks: NewBlocks) -> bool:
        """End the last step; a graph writes a step of the same requests next.

        The tensors are held until another outcome takes their place.

        Args:
            accepted: as for the class; as it is now until the step after this one.
            sampled: likewise.
            new_blocks: for each request that gets blocks the numbers of its new ones, by group.

        Returns:
            False if another call changed the record since, if the outcome has another form, if the
            blocks do not fit or are not all the groups', or if the device may not have read what
            this would replace, or what the step after it will. Nothing was changed then.
        """
        record = self._record
        step, shapes = record.steps + 1, self._shapes
        if record.told != self._told or step + 1 >= record.free_until:
            return False
        if accepted.dtype is not self._counts or sampled.dtype is not self._ids:
            return False
        if accepted.shape != shapes[0] or sampled.shape != shapes[1]:
            return False
        if not (accepted.is_contiguous() and sampled.is_contiguous()):
            return False
        if accepted.get_device() != self._device or sampled.get_device() != self._device:
            return False
        memory, begin, row = record.memory, step % RECORDS * COLUMNS, self._row
        if new_blocks:
            at = first = begin + BLOCKS
            for index, base, stride, end in self._places:
                for tables in new_blocks:
                    for block in tables[index]:
                        if at == first + 2 * MOST or not 0 <= block < end:
                            return False
                        memory[at] = base + block * stride
                        memory[at + 1] = stride
                        at += 2
            memory[begin + COUNT] = (at - first) // 2
            memory[begin + HANDED_OUT] = step
        row[OUTCOME], row[ACCEPTED], row[SAMPLED] = step, accepted.data_ptr(), sampled.data_ptr()
        memory[begin : begin + len(row)] = row
        record.held, record.steps = (accepted, sampled), step
        return True

    def fewer(
        self,
        step: Step,
        accepted: Tensor,
        sampled: Tensor,
        new_blocks: NewBlocks,
        lines: LinesInPlace,
    ) -> bool:
        """End the last step; a graph writes a step that lacks some of its requests next.

        Args:
            step: the step that begins, with at most as many rows as the last one.
            accepted: as for ``same``.
            sampled: likewise.
            new_blocks: likewise.
            lines: the arguments of ``NextStep.put_lines``.

        Returns:
            As ``same``; False, too, if there are too many lines.
        """
        target, numbers = lines
        if len(numbers) > MOST_LINES or not self.same(accepted, sampled, new_blocks):
            return False
        record = self._record
        memory, begin = record.memory, record.steps % RECORDS * COLUMNS
        at = begin + FIRST_LINE
        memory[at : at + len(numbers)] = memoryview(array("q", numbers))
        memory[begin + TARGET], memory[begin + NUM_LINES] = target.data_ptr(), len(numbers)
        memory[begin + LINES] = record.steps
        record.target = target
        number = self._row[REQUESTS] = step.lines.shape[0]
        self._shapes = (torch.Size([number]), torch.Size([number, sampled.shape[1]]))
        self._pending.repeated(step)
        record.told += 1
        self._told = record.told
        return True
