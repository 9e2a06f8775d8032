"""``FilledBlocks``: checks each block when its last row is written; for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy
import torch

from ....audit import Ledger, RowGroup, Step, Stretch
from ..internals.audited import Rows


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
        self._next: Final = [(group, numpy.zeros(number, numpy.int64)) for group in groups.values()]

    def begin(self, line: int, computed: int) -> None:
        """Note how many positions of a request are computed: blocks before them are known."""
        for group, ends in self._next:
            ends[line] = (computed // group.block_size + 1) * group.block_size

    def publish(self, rows: Rows, step: Step) -> None:
        """Check the blocks that a step fills, since other requests may already find them."""
        lines, starts = step.lines.numpy(), rows.starts.numpy()
        settled = rows.first.numpy() + starts[1:] - starts[:-1]
        if rows.drafts is not None:
            settled -= rows.drafts.numpy()
        for group, ends in self._next:
            size, end = group.block_size, ends[lines]
            if (settled >= end).any():
                first, full = end - size, numpy.maximum(settled // size * size, end - size)
                bounds = torch.from_numpy(first), torch.from_numpy(full)
                tables = {group.name: step.tables[group.name]}
                self._ledger.inspect(Stretch(step.lines, *bounds, tables, "published"))
                ends[lines] = full + size
