"""A small engine without a model: blocks, tables, drafts, prefix caching, preemption, sessions.

The engine manages requests, blocks and drafts like an LLM engine, with random tokens in place of a
model, and reports each step to one or several ledgers. Each operation in which an engine can go
wrong is a method, which ``audit_mutants`` overrides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ..audit.groups import Group, RowGroup
from .audit_blocks import NULL_BLOCK, OutOfBlocks, Part, Pool, Request
from .audit_telling import Telling


class SmallEngine(Telling):
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
    """

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
        """Start a waiting request: find its cached blocks, and take columns for its states."""
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
        for name, block in self.fresh:
            self.hand_out(name, block)
        self.fresh.clear()
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
        """Take blocks for a request's next rows; preempt the last request if there are none."""
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
        """Publish the blocks that are full at ``end``, as soon as the step is scheduled."""
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
        """Return a function that reports a publication; the engine calls it after ``write``."""
        table = list(request.tables[group.name])

        def tell() -> None:
            if request in self.running:
                arguments = (request.name, group.name, table, end - group.block_size, end)
                self.tell("publish", *arguments)

        return tell

    def sample(self, part: Part, accepted: int) -> list[int]:
        """Return the accepted drafts and one more token; nothing before the prompt has ended."""
        if part.first + len(part.tokens) - part.drafts < len(part.request.tokens):
            return []
        start = len(part.tokens) - part.drafts
        return [*part.tokens[start : start + accepted], self.token()]

    def keep(self, part: Part, accepted: int, sampled: list[int]) -> None:
        """Count the accepted drafts, and give back the blocks that no later query sees."""
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
