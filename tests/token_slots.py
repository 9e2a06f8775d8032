"""A small engine whose requests' slots are data in one table, and whose drafts are trees.

As in SGLang: a page has one row, line 0 of the table is of padding, a request's table has slots
for its drafts one after the other, and accepted rows are moved to the front. Rows are stood for by
the tokens that they are computed of, so that each read can be judged by itself.
"""

from __future__ import annotations

import random

import attrs
import torch

from kvtxn.audit import Ledger, RowGroup, Step

SLOTS, CONTEXT, RUNNING, NODES, VOCABULARY = 200, 40, 3, 6, 3
#: A slot without a row, which nobody has written.
EMPTY = (), None, None


@attrs.define(eq=False)
class Request:
    """A request: ``computed`` of its tokens have rows in the cache."""

    name: str
    line: int
    tokens: list[int]
    computed: int = 0
    held: int = 0
    shared: int = 0


@attrs.define(eq=False)
class Part:
    """A request's rows of a step: nodes of a tree, each with the number of the row it follows."""

    request: Request
    tokens: list[int]
    ahead: list[int]
    settled: int

    def way(self, row):
        """Return the tokens of a row and of all that it follows."""
        before = self.request.tokens[: self.request.computed]
        if self.ahead[row] >= 0:
            before = self.way(self.ahead[row])
        return (*before, self.tokens[row])


def next_of(tokens):
    """Return the token that the model samples after these."""
    return (sum(tokens[-3:]) * 5 + len(tokens) // 2) % VOCABULARY


class TokenSlots:
    """The engine; each operation in which it can go wrong is a method.

    Args:
        ledgers: are told of each step alike.
        seed: of the random choices.
        device: of the tensors.

    Attributes:
        rows: by slot, the tokens of its row, who wrote it, and in which step.
        wrong: each wrong read: the step, the request, the position, the slot, and who wrote the
            row that is there, in which step.
        moved: accepted rows that were moved.
    """

    def __init__(self, ledgers, seed, device) -> None:
        self.random, self.ledgers, self.device = random.Random(seed), ledgers, device
        self.table = torch.zeros(RUNNING + 4, CONTEXT, dtype=torch.int32)
        self.free = [*range(1, SLOTS)]
        self.running, self.kept = [], []
        self.rows, self.wrong = {}, []
        self.steps = self.names = self.moved = 0

    def numbers(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def tell(self, call, *arguments, **named):
        for ledger in self.ledgers:
            getattr(ledger, call)(*arguments, **named)

    # -- requests ----------------------------------------------------------------------------

    def begin(self):
        """Begin a request, with the rows of an earlier one of the same first tokens."""
        self.names += 1
        lines = {*range(1, len(self.table))} - {each.line for each in self.running}
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, 9))]
        request = Request(f"r{self.names}", self.random.choice([*lines]), tokens)
        for tokens, slots in self.kept:
            same = 0
            while same < min(len(tokens), len(request.tokens) - 1):
                if tokens[same] != request.tokens[same]:
                    break
                same += 1
            if same > request.shared:
                request.shared = request.held = request.computed = same
                self.table[request.line, :same] = torch.tensor(slots[:same])
        self.running.append(request)
        self.tell("admit", request.name, request.tokens)

    def end(self, request):
        """End a request; its rows stay for others, as long as there is room."""
        self.running.remove(request)
        self.tell("release", request.name)
        slots = self.table[request.line].tolist()
        self.kept.append((request.tokens[: request.computed], slots[: request.computed]))
        self.free += slots[request.computed : request.held]

    def make_room(self):
        """Give away the rows of earlier requests that nobody reads; nobody is told."""
        self.kept.clear()
        used = {
            slot for each in self.running for slot in self.table[each.line, : each.held].tolist()
        }
        self.free = [slot for slot in range(1, SLOTS) if slot not in used]
        self.random.shuffle(self.free)

    # -- a step ------------------------------------------------------------------------------

    def step(self):
        while len(self.running) < RUNNING and self.random.random() < 0.6:
            self.begin()
        if not self.running:
            return
        self.steps += 1
        if len(self.free) < RUNNING * CONTEXT // 2:
            self.make_room()
        parts = [self.plan(each) for each in self.running]
        slots = [self.allocate(part) for part in parts]
        written = [self.written(mine) for mine in slots]
        step = self.describe(parts, written)
        self.tell("write", step)
        for part, mine in zip(parts, written, strict=True):
            for row, slot in enumerate(mine):
                if slot >= 0:
                    self.rows[slot] = part.way(row), part.request.name, self.steps
        self.tell("check", step)
        for part in parts:
            self.judge(part)
        self.verify(parts, slots)
        for request in [*self.running]:
            if len(request.tokens) > CONTEXT - NODES - 4 or self.random.random() < 0.06:
                self.end(request)

    def plan(self, request):
        """Take the next rows of a prompt, or the last token and a tree of drafts."""
        tokens = request.tokens[request.computed :][: self.random.randint(1, 6)]
        settled = len(tokens)
        ahead = [row - 1 for row in range(settled)]
        if request.computed + settled == len(request.tokens):
            for node in range(self.random.randint(0, NODES)):
                tokens.append(self.random.randrange(VOCABULARY))
                ahead.append(self.random.randint(settled - 1, settled + node - 1))
        return Part(request, tokens, ahead, settled)

    def allocate(self, part):
        """Return the slots of a step's rows; those of drafts are there again in the next step."""
        request, count = part.request, len(part.tokens)
        while request.held < request.computed + count:
            self.table[request.line, request.held] = self.free.pop(0)
            request.held += 1
        return self.table[request.line, request.computed :][:count].tolist()

    def written(self, slots):
        """Return the slots that a request's rows are written to."""
        return slots

    def describe(self, parts, slots):
        counts = [len(part.tokens) for part in parts]
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        followed = [
            ahead - part.settled if ahead >= part.settled else -1
            for part in parts
            for ahead in part.ahead
        ]
        return Step(
            lines=self.numbers([self.ledgers[0].line(part.request.name) for part in parts] + [-1]),
            starts=self.numbers([*starts, starts[-1]]),
            first=None,
            tokens=self.numbers([token for part in parts for token in part.tokens]),
            drafts=self.numbers([len(part.tokens) - part.settled for part in parts] + [0]),
            slots={"rows": self.numbers([slot for mine in slots for slot in mine])},
            tables={"rows": self.table.to(self.device)},
            table_lines=self.numbers([part.request.line for part in parts] + [0]),
            positions=self.numbers(
                [len(part.way(row)) - 1 for part in parts for row in range(len(part.tokens))]
            ),
            parents=self.numbers(followed),
        )

    def judge(self, part):
        """Note the wrong rows among those that a request reads: those before, and its own."""
        request, begin = part.request, part.request.computed
        for position in range(begin + len(part.tokens)):
            slot = int(self.table[request.line, position])
            wanted = tuple(request.tokens[: position + 1])
            wanted = wanted if position < begin else part.way(position - begin)
            tokens, *writer = self.rows.get(slot, EMPTY)
            if tokens != wanted:
                self.wrong.append((self.steps, request.name, position, slot, *writer))

    # -- its outcome -------------------------------------------------------------------------

    def verify(self, parts, slots):
        """Sample, accept the way in each tree that is of the sampled tokens, and move its rows."""
        sampled, moves = [], []
        for part, mine in zip(parts, slots, strict=True):
            request, new, row = part.request, [], part.settled - 1
            goes_on = request.computed + part.settled < len(request.tokens)
            path = []
            while not goes_on:
                new.append(next_of(request.tokens + new))
                rows = [
                    child
                    for child in range(part.settled, len(part.tokens))
                    if part.ahead[child] == row and part.tokens[child] == new[-1]
                ]
                if not rows:
                    break
                row = self.random.choice(rows)
                path.append(row)
            sampled.append(new)
            request.tokens += new
            moves += self.moves(part, mine, path)
            request.computed += part.settled + len(path)
        width = NODES + 2
        self.tell(
            "resolve",
            self.numbers([len(new) - 1 for new in sampled] + [-1]),
            self.numbers([[*new, *[-1] * (width - len(new))] for new in [*sampled, []]]),
        )
        self.move([pair for pair in moves if pair[0] != pair[1]])

    def moves(self, part, mine, path):
        """Return from where to where the accepted rows of a request are moved."""
        return [(mine[row], mine[part.settled + number]) for number, row in enumerate(path)]

    def move(self, pairs):
        """Move rows, all at once, and tell which: the engine's kernel and the ledgers alike."""
        here, there = zip(*pairs, strict=True) if pairs else ((), ())
        padding = [-1] * (2 * NODES - len(pairs) % NODES)
        self.tell(
            "carry", {"rows": (self.numbers([*here, *padding]), self.numbers([*there, *padding]))}
        )
        self.rows |= {to: self.rows.get(at, EMPTY) for at, to in pairs}
        self.moved += len(pairs)


# -- faults --------------------------------------------------------------------------------------


class LosesMoves(TokenSlots):
    """Accepted rows stay where they are now and then."""

    def move(self, pairs):
        super().move(pairs if self.random.random() < 0.7 else [])


class MovesAnotherRow(TokenSlots):
    """A row that is moved is now and then that of the slot before."""

    def moves(self, part, mine, path):
        pairs = super().moves(part, mine, path)
        if pairs and self.random.random() < 0.3:
            here, there = pairs[-1]
            pairs[-1] = mine[mine.index(here) - 1], there
        return pairs


class MovesToAnotherSlot(TokenSlots):
    """The last of several rows is moved to where the first of them belongs."""

    def moves(self, part, mine, path):
        pairs = super().moves(part, mine, path)
        if len(pairs) > 1 and self.random.random() < 0.5:
            pairs = [(pairs[-1][0], pairs[0][1])]
        return pairs


class LosesAWrite(TokenSlots):
    """A row is written nowhere now and then."""

    def written(self, slots):
        return [-1 if self.random.random() < 0.05 else slot for slot in slots]


class NamesAnotherSlot(TokenSlots):
    """An entry of a request's table becomes that of a neighbouring line."""

    def plan(self, request):
        if request.computed > 2 and self.random.random() < 0.1:
            other = (request.line + 1) % len(self.table)
            self.table[request.line, request.shared] = self.table[other, 1]
        return super().plan(request)


class GivesASlotTwice(TokenSlots):
    """A slot that a request reads is given to another one."""

    def allocate(self, part):
        if len(self.running) > 1 and self.random.random() < 0.1:
            other = self.running[self.running.index(part.request) - 1]
            if other.computed:
                self.free.insert(0, int(self.table[other.line, other.computed - 1]))
        return super().allocate(part)


class SeesAnotherBranch(TokenSlots):
    """Drafts are computed as if they followed another row than the one that counts."""

    def verify(self, parts, slots):
        for part in parts:
            for row in range(part.settled + 1, len(part.tokens)):
                if self.random.random() < 0.5:
                    part.ahead[row] = self.random.randint(part.settled - 1, row - 1)
        super().verify(parts, slots)


FAULTS = (
    LosesMoves, MovesAnotherRow, MovesToAnotherSlot, LosesAWrite, NamesAnotherSlot, GivesASlotTwice,
    SeesAnotherBranch,
)  # fmt: skip


def new_ledger(backend, device, key=None, kind=Ledger):
    """Make a ledger for the engine."""
    group = RowGroup("rows", 1, SLOTS)
    return kind(
        [group], max_requests=RUNNING + 2, max_length=CONTEXT, device=device, backend=backend,
        key=key, journal=256,
    )  # fmt: skip
