"""A small engine with a real cache: paged rows, rings and states, drafts, preemption, prefix hits.

Each step has one window, and one step of a ledger that follows the windows' manager. Where an
engine can go wrong there is a method, which ``test_toy_engine`` overrides.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate, pairwise

import attrs
import torch
from toy_model import DIM, LONGEST, WIDTH, WINDOW, ToyModel

from kvtxn import LayerRef, TransactionManager, TxnConfig
from kvtxn.audit import Ledger, RowGroup, StateGroup, Step
from kvtxn.recurrent import ShortConv

BLOCK, RING, RUNNING, DRAFTS, CHUNK, SNAPSHOTS = 4, 8, 4, 3, 4, 3
#: Blocks of each group: too few for the rows of all requests, so that some are preempted.
BLOCKS = {"full": 26, "ring": 2 * (RUNNING + SNAPSHOTS), "state": RUNNING + SNAPSHOTS}


@attrs.define(eq=False)
class Request:
    """A request.

    Attributes:
        name: its name.
        prompt: its first tokens.
        tokens: its tokens so far.
        blocks: by group, its blocks in order.
        computed: the number of its tokens whose rows are in the cache.
        told: the accepted drafts of its last step; -1 before the first.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: list[int]
    blocks: dict[str, list[int]] = attrs.field(factory=dict)
    computed: int = 0
    told: int = -1


@attrs.frozen(eq=False)
class Part:
    """A request's rows in a step; the last ``drafts`` of ``tokens`` are drafts."""

    request: Request
    tokens: list[int]
    drafts: int
    first: int


def ids_of(tokens: list[list[int]]) -> torch.Tensor:
    """Return the tokens that requests got, int ``[num_requests, n]``, -1 behind them."""
    return torch.tensor([each + [-1] * (1 + DRAFTS - len(each)) for each in tokens])


class OutOfBlocks(Exception):
    """No block is free."""


class ToyEngine:
    """An engine over a toy model; see the module's text.

    Args:
        model: the model.
        policy: that of the windows.
        seed: of the random choices.
        fails: how often a forward fails, so that its window aborts.
    """

    def __init__(self, model: ToyModel, policy: str, seed: int = 0, fails: float = 0.05) -> None:
        self.model, self.fails, self.random = model, fails, random.Random(seed)
        rows = {name: torch.zeros(2, BLOCKS[name], BLOCK, 1, DIM) for name in ("full", "ring")}
        self.caches = rows | {"state": torch.zeros(BLOCKS["state"], WIDTH - 1, DIM)}
        refs = {
            "full": LayerRef("full", *rows["full"], group="full"),
            "ring": LayerRef.ring(
                "ring", *rows["ring"], window=WINDOW, ring_size=RING, group="ring"
            ),
            "state": LayerRef.recurrent(
                "state", self.caches["state"], replay=ShortConv(WIDTH), group="state"
            ),
        }
        groups = {
            "full": RowGroup("full", BLOCK, BLOCKS["full"]),
            "ring": RowGroup("ring", BLOCK, BLOCKS["ring"], ring=RING, window=WINDOW),
            "state": StateGroup("state", BLOCKS["state"]),
        }
        config = TxnConfig(policy=policy, backend="torch", max_rows=64)
        self.manager = TransactionManager([refs[name] for name in model.layers], config)
        self.ledger = Ledger(
            [groups[name] for name in model.layers],
            max_requests=RUNNING, max_length=LONGEST, backend="torch",
        )  # fmt: skip
        self.following = self.ledger.follow(self.manager)
        self.free = {name: list(range(BLOCKS[name])) for name in model.layers}
        self.used: Counter[tuple[str, int]] = Counter()
        self.snapshots: dict[tuple[int, ...], dict[str, list[int]]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.events: Counter[str] = Counter()

    # -- requests and blocks -----------------------------------------------------------------

    def add(self, prompt) -> Request:
        """Queue a request."""
        request = Request(f"r{self.events['added']}", tuple(prompt), list(prompt))
        self.events["added"] += 1
        self.waiting.append(request)
        return request

    def take(self, name: str, count: int = 1) -> list[int]:
        """Take free blocks of a group; nobody has written them."""
        while len(self.free[name]) < count and self.snapshots:
            self.give_back(self.snapshots.pop(next(iter(self.snapshots))))
        if len(self.free[name]) < count:
            raise OutOfBlocks
        blocks = [self.free[name].pop(0) for _ in range(count)]
        self.used.update((name, block) for block in blocks)
        self.ledger.hand_out(name, blocks)
        return blocks

    def give_back(self, blocks: dict[str, list[int]]) -> None:
        """Give blocks back; those that nobody else has are free."""
        for name, numbers in blocks.items():
            for block in numbers:
                self.used[name, block] -= 1
                if not self.used[name, block]:
                    self.free[name].append(block)

    def start(self, request: Request) -> None:
        """Let a waiting request run, from the longest beginning that the prefix cache has."""
        fixed = {name: count for name, count in (("ring", 2), ("state", 1)) if name in self.free}
        blocks = {name: self.take(name, count) for name, count in fixed.items()}
        request.blocks, request.computed, request.told = blocks | {"full": []}, 0, -1
        self.waiting.remove(request)
        self.running.append(request)
        self.ledger.admit(request.name, request.tokens)
        if "state" in fixed:
            self.caches["state"][request.blocks["state"]] = 0
        for length in range((len(request.tokens) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            found = self.snapshots.get(tuple(request.tokens[:length]))
            if found is not None:
                request.blocks["full"] = list(found["full"])
                self.used.update(("full", block) for block in found["full"])
                self.copy(found, request.blocks)
                request.computed = length
                self.events["hits"] += 1
                return

    def copy(self, source: dict[str, list[int]], target: dict[str, list[int]]) -> None:
        """Copy rings and states, which requests cannot share."""
        for name in ("ring", "state"):
            if name in self.free:
                one, other = source[name], target[name]
                places = (slice(None), other) if name == "ring" else (other,)
                self.caches[name][places] = self.caches[name][(*places[:-1], one)]
                self.ledger.copy(name, one, other)

    def leave(self, request: Request) -> None:
        """End a request, or send it back to the queue."""
        self.give_back(request.blocks)
        request.blocks = {}
        self.running.remove(request)
        self.ledger.release(request.name)

    def offer(self, request: Request) -> None:
        """Let others find a request's rows, ring and state, if they end where a block does."""
        end = request.computed
        key = tuple(request.tokens[:end])
        if end % BLOCK or end > len(request.prompt) or key in self.snapshots:
            return
        counts = {name: count for name, count in (("ring", 2), ("state", 1)) if name in self.free}
        if any(len(self.free[name]) < count for name, count in counts.items()):
            return
        kept = {name: self.take(name, count) for name, count in counts.items()}
        kept["full"] = request.blocks["full"][: end // BLOCK]
        self.used.update(("full", block) for block in kept["full"])
        self.copy(request.blocks, kept)
        self.snapshots[key] = kept
        self.ledger.publish(request.name, "full", kept["full"], 0, end)
        if "ring" in kept:
            self.ledger.publish(request.name, "ring", kept["ring"], max(0, end - WINDOW + 1), end)
        if "state" in kept:
            self.ledger.publish_state(request.name, "state", kept["state"][0], end)

    # -- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the next rows of every request that runs."""
        parts = self.plan()
        if not parts:
            return
        first = torch.tensor([part.first for part in parts])
        counts = torch.tensor([len(part.tokens) for part in parts])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rows = [name for name in self.free if name != "state"]
        states = {"state": self.states(parts)} if "state" in self.free else {}
        step = Step(
            lines=torch.tensor([self.ledger.line(part.request.name) for part in parts]),
            starts=starts,
            first=first,
            tokens=torch.tensor([token for part in parts for token in part.tokens]),
            drafts=torch.tensor([part.drafts for part in parts]),
            slots={name: self.slots(name, parts) for name in rows},
            tables={name: self.tables(name, parts) for name in rows},
            sources={name: torch.where(first > 0, slots, -1) for name, slots in states.items()},
            told=torch.tensor([part.request.told for part in parts]),
        )
        self.ledger.write_and_check(step)
        drafts = [part.drafts for part in parts]
        settled = [len(part.tokens) - part.drafts for part in parts]
        try:
            with self.manager.window(drafts, {**step.slots, **states}, settled) as window:
                chosen = self.forward(window, step, states).argmax(-1).tolist()
                new = self.verified(parts, chosen)
                self.following.sampled(ids_of(new))
                window.commit(
                    [self.committed(p, len(n) - 1) for p, n in zip(parts, new, strict=True)]
                )
        except ArithmeticError:
            self.events["aborts"] += 1
            return  # and the step is repeated
        for part, tokens in zip(parts, new, strict=True):
            self.keep(part, tokens)

    def plan(self) -> list[Part]:
        """Start requests that wait, and plan the rows of a step."""
        while self.waiting and len(self.running) < RUNNING:
            self.start(self.waiting[0])
        parts = [part for request in list(self.running) for part in self.schedule(request)]
        parts = [part for part in parts if part.request in self.running]
        self.events["steps"] += bool(parts)
        return parts

    def schedule(self, request: Request) -> list[Part]:
        """Plan a request's next rows, and take blocks for them; the last request may have to go."""
        if request not in self.running:
            return []
        tokens = request.tokens[request.computed : request.computed + CHUNK]
        if request.computed + len(tokens) == len(request.tokens) and len(tokens) < CHUNK:
            drafts = self.draft(request)[: CHUNK - len(tokens)]
        else:
            drafts = []
        end = request.computed + len(tokens) + len(drafts)
        while len(request.blocks["full"]) * BLOCK < end:
            try:
                request.blocks["full"] += self.take("full")
            except OutOfBlocks:
                victim = self.running[-1]
                self.leave(victim)
                self.waiting.insert(0, victim)
                self.events["preempted"] += 1
                if victim is request:
                    return []
        return [Part(request, [*tokens, *drafts], len(drafts), request.computed)]

    def draft(self, request: Request) -> list[int]:
        """Propose what the model will say; some proposals are wrong."""
        count = self.random.randint(0, DRAFTS)
        length = len(request.tokens)
        right = self.model.text(request.prompt, length + count)[length:]
        return [self.random.choice((token, token, token, 0)) for token in right]

    def slots(self, name: str, parts: list[Part]) -> torch.Tensor:
        """The slot of each row in a group of rows."""
        size = RING if name == "ring" else LONGEST
        places = [
            (part.request.blocks[name], (part.first + i) % size)
            for part in parts
            for i in range(len(part.tokens))
        ]
        return torch.tensor([blocks[at // BLOCK] * BLOCK + at % BLOCK for blocks, at in places])

    def tables(self, name: str, parts: list[Part]) -> torch.Tensor:
        """The blocks of each request, padded with 0."""
        tables = [part.request.blocks[name] for part in parts]
        width = max(map(len, tables))
        return torch.tensor([table + [0] * (width - len(table)) for table in tables])

    def states(self, parts: list[Part]) -> torch.Tensor:
        """The slot of each request's state."""
        return torch.tensor([part.request.blocks["state"][0] for part in parts])

    def forward(self, window, step: Step, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the model over a step's rows, and return its logits.

        Raises:
            ArithmeticError: the forward fails, after one of the layers.
        """
        fails = self.random.choice(self.model.layers) if self.random.random() < self.fails else None
        spans = pairwise(step.starts.tolist())
        lengths = step.first + step.starts.diff()
        positions = torch.cat(
            [torch.arange(*span) for span in zip(step.first, lengths, strict=True)]
        )
        x = self.model.embed(step.tokens, positions)
        for name in self.model.layers:
            ref = self.manager.layers[name]
            if name == "state":
                window.stage(ref, [x])
                pasts = self.caches[name][states[name]]
                rows = [
                    self.model.convolve(past, x[i:j])
                    for past, (i, j) in zip(pasts, spans, strict=True)
                ]
                x = torch.cat(rows)
            else:
                query, key, value = self.model.query_key_value(name, x)
                window.stage(ref, key, value)
                x = x + window.attend(ref, query, step.tables[name], lengths)[:, 0]
            if name == fails:
                raise ArithmeticError("the forward failed")
        return self.model.logits(x)

    def verified(self, parts: list[Part], chosen: list[int]) -> list[list[int]]:
        """Return the tokens that each request gets, given the most likely one after each row."""
        ends = list(accumulate(len(part.tokens) for part in parts))
        return [
            self.verify(part, chosen[end - 1 - part.drafts : end])
            for part, end in zip(parts, ends, strict=True)
        ]

    def verify(self, part: Part, chosen: list[int]) -> list[int]:
        """Return the accepted drafts and one token more; nothing before the prompt has ended."""
        if part.first + len(part.tokens) - part.drafts < len(part.request.tokens):
            return []
        drafts = part.tokens[len(part.tokens) - part.drafts :]
        kept = next((i for i in range(part.drafts) if drafts[i] != chosen[i]), part.drafts)
        return chosen[: kept + 1]

    def committed(self, part: Part, accepted: int) -> int:
        """Return the number of drafts to commit."""
        return max(accepted, 0)

    def keep(self, part: Part, tokens: list[int]) -> None:
        """Go on from the sampled tokens; offer the rows to others, or end the request."""
        request, kept = part.request, max(len(tokens) - 1, 0)
        request.computed = part.first + len(part.tokens) - part.drafts + kept
        request.told = kept
        request.tokens += tokens
        self.offer(request)
        if len(request.tokens) > LONGEST // 2:
            self.leave(request)
            self.events["done"] += 1
