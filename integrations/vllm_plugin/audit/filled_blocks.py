"""``FilledBlocks``: checks each block when its last row is written; for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ....audit import Ledger, RowGroup, Step, Stretch
from ....audit.rows import first_of
from ..internals.audited import Rows
from .published_blocks import not_left


class FilledBlocks:
    """The blocks of each request that are full, and so can be found by other requests.

    Args:
        ledger: the ledger, on a CPU.
        groups: the groups, by name.
    """

    def __init__(self, ledger: Ledger, groups: Mapping[str, RowGroup]) -> None:
        self._ledger: Final = ledger
        # By group and line, the position after the block that is filled next.
        number = ledger.books.sizes.max_requests
        with torch.inference_mode(False):  # steps write into them in inference mode or not
            zeros = [torch.zeros(number, dtype=torch.int64) for _ in groups]
        self._next: Final = [*zip(groups.values(), zeros, strict=True)]

    def begin(self, line: int, computed: int) -> None:
        """Note how many positions of a request are computed: blocks before them are known."""
        for group, ends in self._next:
            ends[line] = (computed // group.block_size + 1) * group.block_size

    def publish(self, rows: Rows, step: Step) -> None:
        """Check the blocks that a step fills, since other requests may already find them."""
        at = first_of(self._ledger.books, step)
        for group, ends in self._next:
            if self._ledger.input.reaches(step, ends):
                first = ends[step.lines] - group.block_size
                settled = at + rows.starts.diff()
                settled = settled if rows.drafts is None else settled - rows.drafts
                full = first.maximum(settled // group.block_size * group.block_size)
                tables = {group.name: step.tables[group.name]}
                begin = not_left(group, at, first)
                full = full.maximum(begin)
                self._ledger.inspect(Stretch(step.lines, begin, full, tables, "published"))
                ends[step.lines] = full + group.block_size
