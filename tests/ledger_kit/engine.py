"""A small engine without a model: blocks, tables, drafts, prefix caching, preemption, sessions.

The engine manages requests, blocks and drafts like an LLM engine, with random tokens in place of a
model, and reports each step to one or several ledgers. It stores blocks outside, under their
tokens, and loads them again. Each operation in which an engine can go wrong is a method, which
``mutants`` overrides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvtxn.audit.groups import Group, RowGroup, StateGroup
from kvtxn.audit.step import Step

from .blocks import NULL_BLOCK, OutOfBlocks, Part, Pool, Request

#: The fields of a step that say where its rows stand.
_WAYS: Final = (("positions",), ("first",), ("first", "positions"))


class SmallEngine:
    """An engine without a model; see the module's text.

    Args:
        groups: groups of rows and of states; groups of one pool share its blocks.
        ledgers: the ledgers and models that the engine reports to.
        seed: seed of the random choices.
        drafts: the most drafts per request and step.
        budget: the most prompt tokens per request and step.
        vocabulary: number of tokens; small, so that prompts have beginnings in common.
        max_length: the most tokens of a request.
        device: the device of the tensors in ``Step``.

    Attributes:
        says: where the rows of the last step stand was said by these fields of it; the ways follow
            each other.
        stored: the digests of each stored block, by the block's hash.
        whole: the digests of rows and states that were stored together, by tokens, then by group.
    """

    says: tuple[str, ...] = _WAYS[-1]

    def __init__(
        self,
        groups: Sequence[Group],
        ledgers: Sequence[Any],
        *,
        seed: int = 0,
        drafts: int = 3,
        budget: int = 9,
        vocabulary: int = 3,
        max_length: int = 60,
        device: str = "cpu",
    ) -> None:
        self.random = random.Random(seed)
        self.groups = {group.name: group for group in groups}
        self.ledgers = ledgers
        self.pools = {self.pool_name(g): Pool(g.num_blocks) for g in groups}
        self.drafts, self.budget, self.vocabulary = drafts, budget, vocabulary
        self.max_length, self.device = max_length, device
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.names = 0
        self.fresh: list[tuple[str, int]] = []
        self.publications: list[Callable[[], None]] = []
        self.stored: dict[object, list[Any]] = {}
        self.whole: dict[tuple[int, ...], dict[str, list[Any]]] = {}

    # -- requests ----------------------------------------------------------------------------

    def pool_name(self, group: Group) -> str:
        """Return the name of a group's pool."""
        written = self.groups[group.reads] if group.reads is not None else group
        return written.pool or f"own {written.name}"

    def pool(self, group: Group) -> Pool:
        """Return the pool of a group."""
        return self.pools[self.pool_name(group)]

    def add(self, prompt: Sequence[int]) -> Request:
        """Queue a new request."""
        self.names += 1
        request = Request(f"r{self.names}", list(prompt))
        self.waiting.append(request)
        return request

    def start(self, request: Request) -> None:
        """Start a waiting request with its cached blocks, then its stored blocks."""
        self.waiting.remove(request)
        self.running.append(request)
        self.tell("admit", request.name, request.tokens)
        request.tables = {group.name: [] for group in self.row_groups}
        request.computed = request.published = request.column = 0
        request.told = -1
        try:
            self.take_states(request)
            self.take_hits(request)
        except OutOfBlocks:
            self.preempt(request)
        else:
            self.load(request)

    def take_states(self, request: Request) -> None:
        """Take a block for each column of each group of states."""
        for group in self.state_groups:
            columns = request.states[group.name] = []
            for _ in range(1 + self.drafts):
                columns.append(self.take(group))

    def take_hits(self, request: Request) -> None:
        """Give a request its cached blocks, but leave at least one token to compute."""
        size = max((g.block_size for g in self.row_groups), default=1)
        if any(g.ring is not None for g in self.row_groups) or self.state_groups:
            return
        length = (len(request.tokens) - 1) // size * size
        while length and not all(self.hits(g, request, length) for g in self.row_groups):
            length -= size
        for group in self.row_groups:
            for block in self.hits(group, request, length) if length else ():
                request.tables[group.name].append(self.pool(group).share(block))
        request.computed = request.published = length

    def hits(self, group: RowGroup, request: Request, length: int) -> list[int]:
        """Find the blocks of a request's first tokens; return none if a block is missing."""
        if length % group.block_size:
            return []
        ends = range(group.block_size, length + 1, group.block_size)
        found = [self.pool(group).found.get(self.key(group, request, end)) for end in ends]
        return [] if None in found else found  # type: ignore[return-value]

    def key(self, group: Group, request: Request, end: int) -> object:
        """Return the hash of a block that ends at a position."""
        return (group.name, tuple(request.tokens[:end]))

    def take(self, group: Group) -> int:
        """Take a free block for a group, and report it."""
        block = self.pool(group).take()
        self.fresh.append((group.name, block))
        return block

    def leave(self, request: Request) -> None:
        """Give back all blocks of a request."""
        for held in (request.tables, request.states):
            for name, blocks in held.items():
                for block in reversed(blocks):
                    self.pool(self.groups[name]).give_back(block)
            held.clear()
        self.running.remove(request)
        self.tell("release", request.name)

    def finish(self, request: Request) -> None:
        """End a request that is done or aborted."""
        self.leave(request)

    def preempt(self, request: Request) -> None:
        """Send a request back to the queue."""
        self.leave(request)
        self.waiting.append(request)

    def go_on(self, request: Request, more: Sequence[int], *, drop: bool) -> None:
        """Begin a session's next turn.

        Args:
            request: a running request.
            more: the new turn's tokens.
            drop: True to leave out the last token of the previous turn, which has no row yet.
        """
        kept = self.kept_of_turn(request) if drop else len(request.tokens)
        request.tokens[kept:] = more
        request.computed = min(request.computed, kept)
        self.tell("admit", request.name, request.tokens)
        request.told = -1

    def kept_of_turn(self, request: Request) -> int:
        """Return the number of tokens of an ended turn that stay."""
        return max(request.computed, 1)

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> int:
        """Run one forward pass over all requests that can run; return how many took part."""
        parts: list[Part] = []
        for request in list(self.running):
            parts += self.schedule(request)
        for request in list(self.waiting):
            if self.random.random() < 0.5:
                self.start(request)
                parts += self.schedule(request)
        parts = [part for part in parts if part.request in self.running]
        self.random.shuffle(parts)
        self.hand_out_fresh()
        if not parts:
            self.publications.clear()
            return 0
        step = self.build(parts)
        self.tell("write", step)
        publications, self.publications = self.publications, []
        self.tell("check", step)
        for publish in publications:
            publish()
        accepted = [self.random.randint(0, part.drafts) for part in parts]
        sampled = [self.sample(p, a) for p, a in zip(parts, accepted, strict=True)]
        self.resolve(accepted, sampled)
        for part, count, new in zip(parts, accepted, sampled, strict=True):
            self.keep(part, count, new)
        return len(parts)

    def hand_out(self, group: str, block: int) -> None:
        """Report a block that was taken."""
        self.tell("hand_out", group, [block])

    def resolve(self, accepted: list[int], sampled: list[list[int]]) -> None:
        """Report the accepted drafts and the sampled tokens."""
        width = 1 + self.drafts
        self.tell("resolve", accepted, [[*s, *[-1] * (width - len(s))] for s in sampled])

    def schedule(self, request: Request) -> list[Part]:
        """Take blocks for a request's next rows; preempt the last requests while there are too few.

        Returns:
            The one part of the step, with random drafts; empty if the request itself was preempted.
        """
        if request not in self.running:
            return []
        first = request.computed
        settled = request.tokens[first : first + self.budget]
        room = self.max_length - first - len(settled)
        last = first + len(settled) == len(request.tokens)
        drafts = self.random.randint(0, min(self.drafts, room)) if last else 0
        end = first + len(settled) + drafts
        while True:
            try:
                self.grow(request, end)
                break
            except OutOfBlocks:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    return []
        self.publish(request, min(first + len(settled), len(request.tokens)))
        proposed = [self.token() for _ in range(drafts)]
        return [Part(request, first, [*settled, *proposed], drafts)]

    def token(self) -> int:
        """Return a random token."""
        return self.random.randrange(self.vocabulary)

    def grow(self, request: Request, end: int) -> None:
        """Take blocks for all positions below ``end``."""
        for group in self.row_groups:
            table = request.tables[group.name]
            length = end if group.ring is None else min(end, group.ring)
            while len(table) * group.block_size < length:
                table.append(self.take(group))

    def publish(self, request: Request, end: int) -> None:
        """Let hashes find the blocks that are full at ``end``, as soon as the step is scheduled.

        Each block is published once; the ledgers hear of it after ``write``. Rings publish nothing.
        """
        size = max((g.block_size for g in self.row_groups), default=1)
        for group in self.row_groups:
            if group.ring is not None:
                continue
            ends = range(group.block_size, end // size * size + 1, group.block_size)
            for at in ends:
                block = request.tables[group.name][at // group.block_size - 1]
                if at <= request.published or block == NULL_BLOCK:
                    continue
                self.pool(group).publish(block, self.key(group, request, at))
                self.publications.append(self.publication(request, group, at))
        request.published = max(request.published, end // size * size)

    def publication(self, request: Request, group: RowGroup, end: int) -> Callable[[], None]:
        """Return a function that reports a publication; the engine calls it after ``write``.

        It reports nothing if the request has left by then.
        """
        table = list(request.tables[group.name])

        def tell() -> None:
            if request in self.running:
                arguments = (request.name, group.name, table, end - group.block_size, end)
                self.tell("publish", *arguments)

        return tell

    def sample(self, part: Part, accepted: int) -> list[int]:
        """Return the accepted drafts and one random token.

        An empty list if the request has tokens behind this part, as in a part of a prompt.
        """
        if part.first + len(part.tokens) - part.drafts < len(part.request.tokens):
            return []
        start = len(part.tokens) - part.drafts
        return [*part.tokens[start : start + accepted], self.token()]

    def keep(self, part: Part, accepted: int, sampled: list[int]) -> None:
        """Count accepted drafts, append sampled tokens, give back blocks that no later query sees.

        A request whose length comes near the engine's limit ends.
        """
        request = part.request
        request.computed = part.first + len(part.tokens) - part.drafts + accepted
        request.tokens += sampled
        request.column = self.next_column(accepted)
        request.told = self.next_told(accepted)
        for group in self.row_groups:
            self.slide(group, request)
        if len(request.tokens) >= self.max_length - self.drafts:
            self.finish(request)

    def next_column(self, accepted: int) -> int:
        """Return the column whose state is after exactly the accepted drafts."""
        return accepted

    def next_told(self, accepted: int) -> int:
        """Return the accepted count that the next step gets."""
        return accepted

    def slide(self, group: RowGroup, request: Request) -> None:
        """Give back the blocks that lie before a sliding window."""
        if group.window is None or group.ring is not None:
            return
        table = request.tables[group.name]
        for column in range(max(0, request.computed - group.window + 1) // group.block_size):
            if table[column] != NULL_BLOCK and not self.is_read(group):
                self.pool(group).give_back(table[column])
                table[column] = NULL_BLOCK

    def is_read(self, group: RowGroup) -> bool:
        """Return whether layers of another group, which may see further, read these rows."""
        return any(g.reads == group.name for g in self.groups.values())

    # -- what it reports ---------------------------------------------------------------------

    def tell(self, call: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of every ledger, and return the results."""
        return [getattr(ledger, call)(*arguments, **named) for ledger in self.ledgers]

    @property
    def row_groups(self) -> list[RowGroup]:
        """Groups of rows, except groups that only read another group's rows."""
        return [g for g in self.groups.values() if isinstance(g, RowGroup) and g.reads is None]

    @property
    def state_groups(self) -> list[StateGroup]:
        """Groups of states."""
        return [g for g in self.groups.values() if isinstance(g, StateGroup)]

    def build(self, parts: list[Part]) -> Step:
        """Describe the rows that a forward pass writes and the tables that it reads."""
        counts = [len(part.tokens) for part in parts]
        ledger = self.ledgers[0]
        written: list[Group] = [*self.row_groups, *self.state_groups]
        self.says = _WAYS[(_WAYS.index(self.says) + 1) % len(_WAYS)]
        return Step(
            lines=self.numbers([self.line(ledger, part.request) for part in parts]),
            starts=self.numbers([sum(counts[:i]) for i in range(len(counts) + 1)]),
            first=self.numbers([part.first for part in parts]) if "first" in self.says else None,
            tokens=self.numbers([t for part in parts for t in self.fed(part)]),
            drafts=self.numbers([part.drafts for part in parts]),
            slots={
                group.name: self.numbers([s for part in parts for s in self.slots(group, part)])
                for group in written
            },
            tables={
                group.name: self.padded([self.table(group, part.request) for part in parts])
                for group in self.groups.values()
                if isinstance(group, RowGroup)
            },
            sources={
                group.name: self.numbers([self.source(group, part) for part in parts])
                for group in self.state_groups
            },
            told=self.numbers([part.request.told for part in parts]),
            positions=self.numbers([p for part in parts for p in self.positions(part)])
            if "positions" in self.says
            else None,
        )

    @staticmethod
    def line(ledger: Any, request: Request) -> int:
        """Return a request's line in a ledger or its model."""
        known = getattr(ledger, "requests", None)
        return int(ledger.line(request.name) if known is None else known[request.name].line)

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Return numbers as an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def padded(self, tables: list[list[int]]) -> Tensor:
        """Return tables of different lengths as one tensor, padded."""
        width = max(1, *(len(table) for table in tables))
        lines = [[*table, *[-1] * (width - len(table))] for table in tables]
        return torch.tensor(lines, dtype=torch.int32, device=self.device)

    def fed(self, part: Part) -> list[int]:
        """Return the tokens that the forward gets."""
        return part.tokens

    def positions(self, part: Part) -> list[int]:
        """Return the positions that the forward gets."""
        return [*range(part.first, part.first + len(part.tokens))]

    def table(self, group: RowGroup, request: Request) -> list[int]:
        """Return the table that the forward reads through."""
        return request.tables[group.reads or group.name]

    def slots(self, group: Group, part: Part) -> list[int]:
        """Return the slots that the forward writes, one per row.

        Of a state they are -1 for all rows but the last settled one and the drafts.
        """
        if isinstance(group, StateGroup):
            settled = len(part.tokens) - part.drafts
            columns = part.request.states[group.name]
            return [*[-1] * (settled - 1), *columns[: 1 + part.drafts]]
        table, size = part.request.tables[group.name], group.block_size
        positions = range(part.first, part.first + len(part.tokens))
        at = [p if group.ring is None else p % group.ring for p in positions]
        return [table[p // size] * size + p % size for p in at]

    def source(self, group: StateGroup, part: Part) -> int:
        """Return the block of the state that the forward continues."""
        if part.first == 0:
            return -1
        return part.request.states[group.name][part.request.column]

    # -- rows that leave and come ------------------------------------------------------------

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
        """Store a request's durable states and the rows before them, all together, by its tokens.

        Nothing is stored where a group has a ring or a window: rows are missing there.
        """
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
        """Load the longest stored state, and the rows before it, for a request that begins.

        Nothing is loaded without a stored prefix or enough free blocks.
        """
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
        """Report the blocks that were taken, before a step or a load writes them."""
        for name, block in self.fresh:
            self.hand_out(name, block)
        self.fresh.clear()

    def load(self, request: Request) -> None:
        """Load the stored rows of a request's next tokens, if all its groups have them.

        Nothing is loaded without enough free blocks, or where a group has a ring or a window.
        """
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
