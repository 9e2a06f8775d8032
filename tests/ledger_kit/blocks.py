"""The blocks, requests and step parts of the small engine that ledgers are tested with."""

from __future__ import annotations

from typing import Final

import attrs

#: A block that is never handed out; tables name it in place of blocks behind a sliding window.
NULL_BLOCK: Final = 0


class OutOfBlocks(Exception):
    """A pool has no free block; a request has to be preempted."""


@attrs.define(eq=False)
class Request:
    """A request of the small engine.

    Attributes:
        name: the request's name.
        tokens: the request's own tokens.
        computed: number of positions whose rows are computed and stay.
        tables: by group of rows, the request's block table.
        states: by group of states, its columns: one for the settled rows, one per draft.
        column: the column from which its next step continues.
        told: the accepted count of its last step, as told in the next step.
        published: by group, blocks of its table that others can find.
    """

    name: str
    tokens: list[int]
    computed: int = 0
    tables: dict[str, list[int]] = attrs.Factory(dict)
    states: dict[str, list[int]] = attrs.Factory(dict)
    column: int = 0
    told: int = -1
    published: int = 0


@attrs.define(eq=False)
class Part:
    """A request's share of a step."""

    request: Request
    first: int
    tokens: list[int]
    drafts: int


class Pool:
    """The blocks of a pool: free blocks, blocks in use, and blocks that a hash finds.

    Args:
        num_blocks: the number of blocks, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.users = dict.fromkeys(self.free, 0)
        self.hash_of: dict[int, object] = {}
        self.found: dict[object, int] = {}

    def take(self) -> int:
        """Hand out the block that has been free for longest; no hash finds it any more.

        Raises:
            OutOfBlocks: none is free.
        """
        if not self.free:
            raise OutOfBlocks
        block = self.free.pop(0)
        self.users[block] = 1
        self.found.pop(self.hash_of.pop(block, None), None)
        return block

    def share(self, block: int) -> int:
        """Share a block of the prefix cache with one more request."""
        if self.users[block] == 0:
            self.free.remove(block)
        self.users[block] += 1
        return block

    def give_back(self, block: int) -> None:
        """Take a block back from a request; a hash finds the block until it is handed out again."""
        if block == NULL_BLOCK:
            return
        self.users[block] -= 1
        if self.users[block] == 0:
            self.free.append(block)

    def publish(self, block: int, key: object) -> None:
        """Publish a block under a hash, unless the hash has another block already."""
        if key not in self.found and block not in self.hash_of:
            self.found[key] = block
            self.hash_of[block] = key

    def forget(self) -> None:
        """Remove all blocks from the prefix cache."""
        self.found.clear()
        self.hash_of.clear()
