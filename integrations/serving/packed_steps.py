"""``GraphSteps`` for batches in which requests with drafts may lie anywhere.

The V1 model runner keeps requests where they were when others leave, so requests with drafts do
not lead the batch, and its slots lie in one buffer per KV-cache group. Before each forward the
slots of the rows that matter are copied together; from there on it is a step like any other.
Under ``deferred`` the fixed tensors mark drafts among the batch's first rows. So a window begins
with the batch's first request and ends with the last one that has drafts, and requests between them
that have none take part with all their rows settled. A step is bypassed if one of those has more
rows than a request with drafts may have: as many as a part of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...layout import to_device
from ...manager import TransactionManager
from ...row_io import LayerRows
from .graph_steps import GraphSteps


class PackedGraphSteps(GraphSteps):
    """The windows of one model runner, over slots of its own.

    Args:
        manager: over the target's layers, in the order of the groups.
        query_len: most rows that a request with drafts has.
        vocab_size: sampled ids at or above it do not count as tokens.
        rows: where draft rows wait, see ``CapturedWindows``.
    """

    among_others = True

    def __init__(
        self,
        manager: TransactionManager,
        query_len: int,
        vocab_size: int,
        rows: LayerRows | None = None,
    ) -> None:
        shape = (len(manager.groups), manager.config.max_rows)
        slots = torch.full(shape, -1, dtype=torch.int64, device=manager.device)
        super().__init__(manager, slots, query_len, rows)
        self._vocab_size = vocab_size
        self._requests: Tensor | None = None
        self._index = lru_cache(maxsize=512)(
            lambda places: to_device(places, manager.device, torch.int64)
        )

    def begin_among(
        self, drafts: Any, lengths: Any, prefilling: Any, slots: Sequence[Tensor]
    ) -> None:
        """Plan the forward that comes next.

        Args:
            drafts: numpy int ``[num_requests]``, draft rows of each request; None without drafts.
            lengths: numpy int ``[num_requests]``, rows of each request, drafts included.
            prefilling: numpy bool ``[num_requests]``, True for requests still at their prompt.
            slots: int64 ``[num_tokens or more]`` for each group, on the device, filled.
        """
        if self.window is not None:
            self.abandon()  # in its own slots, which are filled anew below
        self._requests = None
        which = [] if drafts is None else drafts.nonzero()[0].tolist()
        if not which:
            self.begin(None, lengths, prefilling)
            return
        try:
            if self.deferred or which[-1] == len(which) - 1:
                self._copy(slots, int(lengths[: which[-1] + 1].sum()))
            else:
                self._gather(slots, which, lengths)
                drafts, lengths, prefilling = (
                    part[which] for part in (drafts, lengths, prefilling)
                )
        except Exception as error:
            self._failed("begin", error)
            drafts = None
        self.begin(drafts, lengths, prefilling)

    def _copy(self, slots: Sequence[Tensor], count: int) -> None:
        if count <= self._slots.shape[1]:  # else the step has no window
            for line, source in zip(self._slots, slots, strict=True):
                line[:count].copy_(source[:count])

    def _gather(self, slots: Sequence[Tensor], which: list[int], lengths: Any) -> None:
        ends = lengths.cumsum().tolist()
        rows = tuple(row for r in which for row in range(ends[r] - int(lengths[r]), ends[r]))
        if len(rows) > self._slots.shape[1]:
            return
        index = self._index(rows)
        for line, source in zip(self._slots, slots, strict=True):
            torch.index_select(source, 0, index, out=line[: len(rows)])
        self._requests = self._index(tuple(which))

    def commit_ids(self, ids: Tensor) -> None:
        """Make the accepted rows durable.

        Args:
            ids: int ``[num_requests, n]`` of the batch, on the device: sampled token ids, -1
                where there is none.
        """
        if self.window is None:
            return
        if self._requests is not None:
            ids = ids.index_select(0, self._requests)
        self.commit(((ids >= 0) & (ids < self._vocab_size)).sum(1, dtype=torch.int32))
