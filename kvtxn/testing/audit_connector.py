"""A small engine whose rows leave it and are loaded again."""

from __future__ import annotations

from typing import Any

from ..audit.groups import RowGroup, StateGroup
from .audit_blocks import OutOfBlocks, Request
from .audit_engine import SmallEngine


class ConnectedEngine(SmallEngine):
    """An engine that stores blocks outside, under their tokens, and loads them again.

    Attributes:
        stored: the digests of each stored block, by the block's hash.
        whole: the digests of rows and states that were stored together, by tokens, then by group.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.stored: dict[object, list[Any]] = {}
        self.whole: dict[tuple[int, ...], dict[str, list[Any]]] = {}

    def start(self, request: Request) -> None:
        """Start a waiting request with its cached blocks, then its stored blocks."""
        super().start(request)
        if request in self.running:
            self.load(request)

    def store(self, request: Request) -> None:
        """Store a request's full blocks, or all its rows and states, under their tokens."""
        if self.state_groups:
            self.store_states(request)
            return
        for group in self.row_groups:
            if group.ring is not None or group.window is not None:
                continue
            for end in range(group.block_size, self.durable(request) + 1, group.block_size):
                table, first = request.tables[group.name], end - group.block_size
                payload = self.tell("export", request.name, group.name, table, first, end)
                self.stored[self.key(group, request, end)] = payload

    def durable(self, request: Request) -> int:
        """Return the number of positions whose rows may leave the engine."""
        return request.computed

    def store_states(self, request: Request) -> None:
        """Store a request's states and the rows before them: other requests need all of them."""
        end = self.durable(request)
        if not end or any(g.ring or g.window for g in self.row_groups):
            return
        stored = {}
        for rows in self.row_groups:
            table = request.tables[rows.name]
            stored[rows.name] = self.tell("export", request.name, rows.name, table, 0, end)
        for states in self.state_groups:
            block = self.exported_state(states, request)
            stored[states.name] = self.tell("export_state", request.name, states.name, block, end)
        self.whole[tuple(request.tokens[:end])] = stored

    def exported_state(self, group: StateGroup, request: Request) -> int:
        """Return the block of the state that leaves the engine."""
        return request.states[group.name][request.column]

    def load_states(self, request: Request) -> None:
        """Load stored states and the rows before them for a request that begins."""
        if request.computed or not request.states:
            return
        lengths = range(len(request.tokens) - 1, 0, -1)
        found = (end for end in lengths if tuple(request.tokens[:end]) in self.whole)
        end = next(found, 0)
        if not end:
            return
        try:
            self.grow(request, end)
        except OutOfBlocks:
            return
        self.hand_out_fresh()
        stored = self.whole[self.loaded_key(tuple(request.tokens[:end]))]
        for group in self.row_groups:
            self.bring(request, group, request.tables[group.name], 0, end, stored[group.name])
        for states in self.state_groups:
            self.bring_state(request, states, request.states[states.name][0], end, stored)
        request.computed, request.column = end, 0

    def bring(
        self, request: Request, group: RowGroup, table: list[int], first: int, end: int,
        payload: list[Any],
    ) -> None:  # fmt: skip
        """Load stored rows into the blocks of a request."""
        for ledger, digests in zip(self.ledgers, payload, strict=True):
            ledger.import_rows(request.name, group.name, table, first, end, digests)

    def bring_state(
        self, request: Request, group: StateGroup, block: int, end: int,
        stored: dict[str, list[Any]],
    ) -> None:  # fmt: skip
        """Load a stored state into a block of a request."""
        for ledger, digest in zip(self.ledgers, stored[group.name], strict=True):
            ledger.import_state(request.name, group.name, block, end, digest)

    def loaded_key(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens under which the rows and states were stored that are loaded."""
        return tokens

    def hand_out_fresh(self) -> None:
        """Report the blocks that were taken, before something is loaded into them."""
        for name, block in self.fresh:
            self.hand_out(name, block)
        self.fresh.clear()

    def load(self, request: Request) -> None:
        """Load the stored rows of a request's next tokens, if all its groups have them."""
        if self.state_groups:
            self.load_states(request)
            return
        if any(g.ring or g.window for g in self.row_groups):
            return
        size = max(g.block_size for g in self.row_groups)
        end = request.computed + size
        if request.computed % size or end >= len(request.tokens):
            return
        wanted = [
            (g, at)
            for g in self.row_groups
            for at in range(request.computed + g.block_size, end + 1, g.block_size)
        ]
        if any(self.key(g, request, at) not in self.stored for g, at in wanted):
            return
        try:
            self.grow(request, end)
        except OutOfBlocks:
            return
        self.hand_out_fresh()
        for group, at in wanted:
            payload = self.payload(group, request, at)
            table, first = request.tables[group.name], at - group.block_size
            self.bring(request, group, table, first, at, payload)
        request.computed = end

    def payload(self, group: RowGroup, request: Request, end: int) -> list[Any]:
        """Return the stored rows of the block that ends at ``end``."""
        return self.stored[self.key(group, request, end)]
