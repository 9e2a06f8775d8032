"""The requests that a runner was told of, and which of them each block of its cache belongs to.

Both runners are told the same by the scheduler. Neither keeps a block's owner: a V1 runner's table
goes on naming blocks that have left a window, and the blocks of requests that were put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final
from weakref import WeakValueDictionary

import attrs

from .engine_protocols import NewRequest, SchedulerOutput


@attrs.define(eq=False)
class _Told:
    """A request, from its first step until nobody has its name and no block is its own."""

    name: str
    came: NewRequest | None = None
    tables: list[list[int]] = attrs.field(factory=list)


class RequestBlocks:
    """The request that each block was handed to last, its KV-cache group and its column.

    The block has that request's rows until another request gets it: also when it has left a sliding
    window, when the request is put back, and when it has ended. Of requests that share a block, it
    belongs to the one that was told last.
    """

    def __init__(self) -> None:
        self._requests: Final[dict[str, _Told]] = {}
        #: Also of requests that ended, as long as a block is theirs; a name may be used again.
        self._latest: Final[WeakValueDictionary[str, _Told]] = WeakValueDictionary()
        self._owners: Final[dict[int, tuple[_Told, int, int]]] = {}

    def hear(self, told: SchedulerOutput, filled: Iterable[int] = ()) -> None:
        """Take over a step, in which requests come, grow, end or are put back.

        A request that ended or was put back has no blocks, but its old ones stay its own until
        others get them.

        Args:
            told: the step.
            filled: blocks that a connector fills for requests of which the runner is told later;
                they belong to nobody until then.
        """
        cached = told.scheduled_cached_reqs
        for name in told.finished_req_ids:
            if name in self._requests:
                ended = self._requests.pop(name)
                ended.came, ended.tables = None, []  # it may hold an image
        for name in {*(told.preempted_req_ids or ()), *cached.resumed_req_ids}:
            if name in self._requests:
                self._requests[name].tables = []
        for block in filled:
            self._owners.pop(block, None)
        for new in told.scheduled_new_reqs:
            request = self._requests.setdefault(new.req_id, _Told(new.req_id))
            self._latest[new.req_id] = request
            request.came, request.tables = new, []
            self._give(request, new.block_ids)
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if more and name in self._requests:
                self._give(self._requests[name], more)

    def _give(self, request: _Told, more: Sequence[Sequence[int]]) -> None:
        """Add blocks to a request's, by group, and make it their owner; block 0 has none."""
        request.tables = request.tables or [[] for _ in more]
        for group, (own, blocks) in enumerate(zip(request.tables, more, strict=True)):
            for column, block in enumerate(blocks, len(own)):
                if block:  # block 0 belongs to nobody
                    self._owners[block] = request, group, column
            own += blocks

    def tables(self, name: str) -> Sequence[Sequence[int]]:
        """Return the blocks of a request by group; () of one that has ended or is not known.

        Also empty of one that was put back.
        """
        return self._requests[name].tables if name in self._requests else ()

    def content(self, name: str) -> NewRequest | None:
        """Return a request as it came last; None if it has ended or never came."""
        return self._requests[name].came if name in self._requests else None

    def owner(self, block: int) -> tuple[str, int, int] | None:
        """Return the name of a block's request, the group's number and the column; None: nobody's.

        Nobody's are also blocks of a request whose name another one has used since.
        """
        for name, group, column, _ in self.owned([block]):
            return name, group, column
        return None

    def owned(self, blocks: Iterable[int]) -> list[tuple[str, int, int, int]]:
        """Return request, group, column and number of each block; nobody's are left out."""
        owners, latest, found = self._owners, self._latest, []
        for block in blocks:
            request, group, column = owners.get(block, (None, 0, 0))
            if request is not None and latest.get(request.name) is request:
                found.append((request.name, group, column, block))
        return found

    def column(self, name: str, group: int, block: int, after: int) -> int:
        """Return the first column behind ``after`` in which a request has a block.

        Of a request that has ended, the column that the block had counts. If the block is not the
        request's, it is ``after + 1``.

        Args:
            name: the request's.
            group: number of the KV-cache group.
            block: the block.
            after: the column before.
        """
        tables = self.tables(name)
        if group < len(tables):
            with suppress(ValueError):  # a long job has its blocks in a row: each is found at once
                return tables[group].index(block, after + 1)
        owner = self.owner(block)  # of a request that has ended
        if owner is not None and owner[1] == group and owner[2] > after:
            return owner[2]
        return after + 1
