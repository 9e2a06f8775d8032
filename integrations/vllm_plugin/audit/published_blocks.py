"""Blocks that a step fills, checked when their last rows are written: others find them then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from ....audit import Ledger, RowGroup, Step, Stretch
from ....audit.rows import first_of
from ....host_values import to_device
from ...serving.step import Arrival


class PublishedBlocks:
    """The blocks of each request that are full, in groups whose steps do not read all of them.

    A row of a full block may have left the window of the step that fills the block. All other rows
    of a published block are rows that its step has read.

    Args:
        ledger: the ledger.
        groups: all watched groups with a row per token.
        drafts: the most drafts of a request in one step.

    Attributes:
        groups: those whose blocks are checked.
    """

    def __init__(self, ledger: Ledger, groups: Iterable[RowGroup], drafts: int) -> None:
        self._ledger: Final = ledger
        self.groups: Final = [
            group
            for group in groups
            if group.chunk is not None
            or (group.window is not None and group.window < group.block_size + drafts + 1)
        ]
        number = ledger.books.sizes.max_requests
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            zeros = [
                torch.zeros(number, dtype=torch.int64, device=ledger.device) for _ in self.groups
            ]
        # By line, the position after the last block that is known to be right.
        self._ends: Final = [*zip(self.groups, zeros, strict=True)]

    def begin(self, lines: Sequence[int], arrivals: Sequence[Arrival]) -> None:
        """Note what is known of requests that came, given their lines."""
        if not (arrivals and self._ends):
            return
        device = self._ledger.device
        there = to_device(lines, device, torch.int64)
        for group, ends in self._ends:
            full = [each.computed // group.block_size * group.block_size for each in arrivals]
            ends.index_copy_(0, there, to_device(full, device, torch.int64))

    def publish(self, step: Step) -> None:
        """Check the blocks that a step fills."""
        for group, ends in self._ends:
            number, size = len(step.lines), group.block_size
            first = first_of(self._ledger.books, step)[:number].long()
            settled = first + step.starts[: number + 1].diff()
            if step.drafts is not None:
                settled = settled - step.drafts[:number]
            lines = step.lines.clamp(min=0)
            before = ends.index_select(0, lines)
            end = (settled // size * size).maximum(before)
            tables = {group.name: step.tables[group.name]}
            begin = not_left(group, first, before)
            self._ledger.inspect(
                Stretch(step.lines, begin, end.maximum(begin), tables, "published")
            )
            ends.index_copy_(0, lines, end)


def not_left(group: RowGroup, first: Tensor, begin: Tensor) -> Tensor:
    """Return where the blocks begin that a request still has, of those from ``begin`` on.

    A block that leaves the window or the chunk of a request's next row goes back to the pool before
    it is published, if only that row's step says that its last row was an accepted draft's.

    Args:
        group: the group.
        first: int64 ``[num_requests]``, the position of each request's first row in the step.
        begin: int64 ``[num_requests]``, positions at which blocks begin.
    """
    if group.chunk is not None:
        first = first // group.chunk * group.chunk
    elif group.window is not None:
        first = (first - group.window + 1).clamp(min=0)
    else:
        return begin
    return begin.maximum(first // group.block_size * group.block_size)


class FilledBlocks:
    """The blocks of each request that are full, and so can be found by other requests.

    Args:
        ledger: the ledger, on a CPU.
        groups: the groups with a row per token.
    """

    def __init__(self, ledger: Ledger, groups: Iterable[RowGroup]) -> None:
        self._ledger: Final = ledger
        # By group and line, the position after the block that is filled next.
        number, groups = ledger.books.sizes.max_requests, [*groups]
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            zeros = [torch.zeros(number, dtype=torch.int64) for _ in groups]
        self._next: Final = [*zip(groups, zeros, strict=True)]

    def begin(self, lines: Sequence[int], arrivals: Sequence[Arrival]) -> None:
        """Note what is known of requests that came, given their lines: blocks that are computed."""
        for line, each in zip(lines, arrivals, strict=True):
            for group, ends in self._next:
                ends[line] = (each.computed // group.block_size + 1) * group.block_size

    def publish(self, step: Step) -> None:
        """Check the blocks that a step fills, since other requests may already find them."""
        at = first_of(self._ledger.books, step)
        for group, ends in self._next:
            if self._ledger.input.reaches(step, ends):
                first = ends[step.lines] - group.block_size
                settled = at + step.starts.diff()
                settled = settled if step.drafts is None else settled - step.drafts
                full = first.maximum(settled // group.block_size * group.block_size)
                tables = {group.name: step.tables[group.name]}
                begin = not_left(group, at, first)
                full = full.maximum(begin)
                self._ledger.inspect(Stretch(step.lines, begin, full, tables, "published"))
                ends[step.lines] = full + group.block_size
