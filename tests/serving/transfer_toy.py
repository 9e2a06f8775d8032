"""A toy of an engine with a connector: random histories of blocks that come, leave and change.

The toy gives blocks to requests. Its connector stores and loads them, and at times errs. A second
group of layers is not watched, and has blocks of the same pool. The engine may fill new blocks with
zeros before the ledger hears of them.
"""

from __future__ import annotations

from random import Random

import torch
from kvtxn.integrations.serving.ledger.handed_blocks import Handed, Transfers
from kvtxn.integrations.serving.ledger.transfers import TransferWatch
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Arrival, Changes, Room, Rows

from kvtxn.audit import RowGroup
from kvtxn.audit.weights import WeightWatch

GROUP = RowGroup("group.0", 4, 14, pool="blocks")
PROMPTS = [[*range(20, 20 + same), *range(20 + 9 * same, 34 + 8 * same)] for same in (4, 8, 11)]


class Request:
    def __init__(self, name, tokens, keys):
        self.name, self.tokens, self.keys = name, tokens, keys
        self.computed, self.table = 4 * len(keys), []

    def key(self, column):
        return tuple(self.tokens[: 4 * column + 4])

    def arrival(self):
        return Arrival(self.name, self.tokens, [], {}, self.computed, [self.table, []])


class Toy:
    """An engine of two running requests, with a ledger that remembers no more."""

    def __init__(self, seed, key):
        room, groups = Room(2, 32, True), {"group.0": GROUP}
        self.watch = Watch(groups, room, 0, "log", lines=2, shared_key=key)
        self.transfers = self.watch.transfers = TransferWatch(
            self.watch.ledger, groups, {}, lambda told: told, lambda told: [], self.checksums,
            lambda name: [self.running[name].table], self.watch.stop,
        )  # fmt: skip
        weights = torch.nn.Linear(2, 2)
        self.watch.weights = WeightWatch(self.watch.ledger, {"target": weights.parameters})
        self.random, self.epoch, self.number = Random(seed), 0, 0
        self.rows = {block: [0] * 4 for block in range(14)}  # stand for the bytes of blocks
        self.free, self.others, self.store = [*range(1, 14)], [], {}
        self.running, self.waiting = {}, []

    def checksums(self, group, blocks):
        return torch.tensor([[hash(tuple(self.rows[block])), 5] for block in blocks])

    def maybe(self, chance):
        return self.random.random() < chance

    def new(self):
        self.number += 1
        return self.number

    def grow(self, request, length):
        """Give a request blocks for so many tokens; tell whether enough are free."""
        more = -(-length // 4) - len(request.table)
        if more <= len(self.free):
            request.table += self.free[:more]
            del self.free[:more]
        return more <= 0 or 4 * len(request.table) >= length

    def arrive(self):
        """Return the requests that begin in the step, and one whose rows are loaded from now on."""
        new = Request(f"r{self.new()}", self.random.choice(PROMPTS), [])
        most = self.random.randint(0, 3)
        while len(new.keys) < most and new.key(len(new.keys)) in self.store:
            new.keys.append(new.key(len(new.keys)))
        new.computed = 4 * len(new.keys)
        waits = bool(new.keys) and self.maybe(0.6)
        begin = [each for each in self.waiting if self.maybe(0.5)]
        begin += [new] * (not waits and self.maybe(0.7))
        begin = begin[: 2 - len(self.running)]
        begin = [each for each in begin if self.grow(each, len(each.tokens))]
        self.waiting = [each for each in self.waiting if each not in begin]
        self.running |= {each.name: each for each in begin}
        loads = (new in begin and new.keys) or (waits and self.grow(new, new.computed))
        return begin, new if loads else None

    def change(self, begin, taken):
        """Tell the watch what the step changes, for new blocks once they are zeros, maybe."""
        if self.maybe(0.1):
            self.watch.weights.changed()
            self.epoch += 1
        if self.maybe(0.3):
            fresh = [block for each in begin for block in each.table[each.computed // 4 :]]
            self.transfers.before_overwritten([*taken, *fresh])
            self.rows |= {block: [0] * 4 for block in [*taken, *fresh]}
        arrivals = [each.arrival() for each in begin]
        self.watch.change(Changes((), arrivals, [[], taken], ()))

    def load(self, request, named, stores):
        """Tell of the step's transfers, and fill blocks, at times with rows that are not theirs."""
        keys, name = ([], "") if request is None else (request.keys, request.name)
        blocks = [] if request is None else request.table[: len(keys)]
        loads = [Handed("group.0", blocks, 0, name, keys=keys)] if blocks and named else []
        self.transfers.begin(Transfers(stores, loads, [] if named else blocks, opaque=False))
        for block, key in zip(blocks, keys, strict=True):
            key = self.random.choice([*self.store]) if self.maybe(0.1) else key
            self.rows[block] = [*self.store[key]]
            if self.maybe(0.05):
                self.rows[block][2] = self.new()

    def forward(self, counts):
        """Compute rows: what they are depends on the tokens before, and on the weights."""
        at = [(each, place) for each, more in counts.items()
              for place in range(each.computed, each.computed + more)]  # fmt: skip
        slots = [each.table[place // 4] * 4 + place % 4 for each, place in at]
        starts = torch.tensor([0, *counts.values()]).cumsum(0)
        table = torch.tensor([each.table + [0] * (4 - len(each.table)) for each in counts])
        tokens = torch.tensor([each.tokens[place] for each, place in at])
        first = torch.tensor([each.computed for each in counts])
        rows = Rows([each.name for each in counts], starts, first, tokens, None,
                    {"group.0": torch.tensor(slots)}, {"group.0": table.int()})  # fmt: skip
        self.watch.step(lambda: (rows, None), lambda name: self.running[name].arrival())
        for (each, place), slot in zip(at, slots, strict=True):
            self.rows[slot // 4][slot % 4] = hash((*each.tokens[: place + 1], self.epoch))
            each.computed = place + 1

    def step(self):
        for name in [name for name in self.running if self.maybe(0.3)]:
            self.free += self.running.pop(name).table
        self.free += [self.others.pop() for _ in [*self.others] if self.maybe(0.5)]
        self.random.shuffle(self.free)
        begin, loading = self.arrive()
        taken = [self.free.pop(0) for _ in self.free[:1] if self.maybe(0.6)]
        self.others += taken
        self.change(begin, taken)
        left = {each: len(each.tokens) - each.computed for each in self.running.values()}
        counts = {each: min(self.random.randint(1, 6), n) for each, n in left.items() if n}
        stores = [(each, at) for each, more in counts.items()
                  for at in range((each.computed + more) // 4) if self.maybe(0.4)]  # fmt: skip
        self.load(loading, loading in begin or self.maybe(0.5), [
            Handed("group.0", [each.table[at]], at, each.name, keys=[each.key(at)])
            for each, at in stores
        ])  # fmt: skip
        self.rows |= {block: [self.new()] * 4 for block in taken}
        if counts:
            self.forward(counts)
        self.transfers.end()
        self.store |= {each.key(at): [*self.rows[each.table[at]]] for each, at in stores}
        if loading is not None and loading not in begin:
            self.transfers.received([loading.name])
            self.waiting.append(loading)
        elif loading is not None and self.maybe(0.2):
            at = self.random.randrange(len(loading.keys))
            self.transfers.failed([loading.table[at]])
            loading.computed = 4 * at
        if counts:
            self.watch.sampled(torch.zeros(len(counts)).int(), torch.full((len(counts), 1), -1))
        self.watch.end_step()
        if self.maybe(0.02):
            self.watch.forget()
            gone = [*self.running.values(), *self.waiting]
            self.free += [block for each in gone for block in each.table]
            self.running, self.waiting = {}, []
        assert not self.watch.stopped
