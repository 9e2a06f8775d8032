"""``FilledBlocks``: checks each block when its last row is written; for CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from ....audit import Ledger, RowGroup, Step, Stretch
from ....audit.rows import first_of
from ..internals.audited import Arrival
from .published_blocks import not_left


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
