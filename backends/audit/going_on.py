"""``GoingOn``: a step that follows one like it, told to the next step's record in one call.

An engine's own code runs for milliseconds between two calls, so each function and each object that
a call needs comes from the host's memory, and costs more than what is done there. So this is one
function, which reads few objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from ...audit.goes_on import Grown, Put
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
from .waiting import Waiting


class GoingOn:
    """Tells the record of the next step how the last one ended, and which blocks are handed out.

    It is good until anything else is told, to whomever: each call after that returns False. See
    ``GoesOn``.

    Args:
        waiting: has the records.
        accepted: an outcome of a form that can wait: the counts, int32 or int64 ``[num_requests]``.
        sampled: the ids, int32 or int64 ``[num_requests, n]``.
        besides: as for ``Passes.resolve``.
        places: for each group by which blocks are told, where its words are; None for a group that
            the ledger does not know.
    """

    __slots__ = (
        *("_counts", "_device", "_following", "_ids", "_places", "_row", "_shapes", "_told"),
        "_waiting",
    )

    def __init__(
        self,
        waiting: Waiting,
        accepted: Tensor,
        sampled: Tensor,
        besides: int,
        places: Sequence[Place | None],
    ) -> None:
        self._waiting, self._following = waiting, waiting.next
        self._told = waiting.next.told
        self._counts, self._ids = accepted.dtype, sampled.dtype
        self._shapes, self._device = (accepted.shape, sampled.shape), accepted.get_device()
        self._row = memoryview(outcome_row(accepted, sampled, besides))
        self._places = [
            (index, place.base, place.stride, place.group.num_blocks)
            for index, place in enumerate(places)
            if place is not None
        ]

    def tell(self, accepted: Tensor, sampled: Tensor, grown: Grown) -> bool:
        """Tell that the last step ended, and that a graph writes the same one again.

        The tensors are held until another outcome takes their place.

        Args:
            accepted: as for the class; as it is now until the step after this one.
            sampled: likewise.
            grown: for each request that gets blocks the numbers of its new ones, by group.

        Returns:
            False if anything else was told since, if the outcome has another form, if the blocks do
            not fit or are not all the groups', or if the device may not have read what this would
            replace, or what the step after it will. Nothing was told then.
        """
        following = self._following
        step, shapes = following.steps + 1, self._shapes
        if following.told != self._told or step + 1 >= following.free_until:
            return False
        if accepted.dtype is not self._counts or sampled.dtype is not self._ids:
            return False
        if accepted.shape != shapes[0] or sampled.shape != shapes[1]:
            return False
        if not (accepted.is_contiguous() and sampled.is_contiguous()):
            return False
        if accepted.get_device() != self._device or sampled.get_device() != self._device:
            return False
        memory, begin, row = following.memory, step % RECORDS * COLUMNS, self._row
        if grown:
            at = first = begin + BLOCKS
            for index, base, stride, end in self._places:
                for tables in grown:
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
        following.held, following.steps = (accepted, sampled), step
        return True

    def tell_fewer(
        self, step: Step, accepted: Tensor, sampled: Tensor, grown: Grown, put: Put
    ) -> bool:
        """Tell the same of a step that lacks requests of the last one.

        Args:
            step: the step that begins, with at most as many rows as the last one.
            accepted: as for ``tell``.
            sampled: likewise.
            grown: likewise.
            put: the arguments of ``NextStep.put_lines``.

        Returns:
            As ``tell``; False, too, if there are too many lines.
        """
        target, lines = put
        if len(lines) > MOST_LINES or not self.tell(accepted, sampled, grown):
            return False
        following = self._following
        memory, begin = following.memory, following.steps % RECORDS * COLUMNS
        at = begin + FIRST_LINE
        memory[at : at + len(lines)] = memoryview(array("q", lines))
        memory[begin + TARGET], memory[begin + NUM_LINES] = target.data_ptr(), len(lines)
        memory[begin + LINES] = following.steps
        following.target = target
        number = self._row[REQUESTS] = step.lines.shape[0]
        self._shapes = (torch.Size([number]), torch.Size([number, sampled.shape[1]]))
        self._waiting.went_on(step)
        following.told += 1
        self._told = following.told
        return True
