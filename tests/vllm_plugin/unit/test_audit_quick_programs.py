"""Random programs of the V2 runner's stand-in: steps told in one call, beside steps told in many.

Two rigs play the same program with the same key. The second one's steps are all told one thing
after the other. Both ledgers have the same books all along, and in the end the same violations.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from kernels_here import ON_GPU

pytest.importorskip("vllm")

import v2_rig
from graph_rig import Capture, Manager
from v2_kernel_rig import Graphed, rig_maker

from kvtxn.audit.digest import Key

pytestmark = pytest.mark.skipif(ON_GPU, reason="the rig's tensors are on the host")

#: Rows of the graphs.
SIZES = (4, 8, 16, 32)
REQUESTS = 8
TURNS = 25


class Chance:
    """Draws as many drafts as there can be in most cases; all else is drawn evenly."""

    def __init__(self, seed):
        self._random, self.drafting = random.Random(seed), False

    def randrange(self, first, last=None):
        if last is not None:
            return self._random.randrange(first, last)
        if self.drafting and self._random.random() < 0.93:
            return first - 1
        return self._random.randrange(first)


def rigged(make, monkeypatch, seed, *, quick, **asked):
    """A rig; ``went`` counts what its quick calls said."""
    rig = make(Graphed, capture=Capture(monkeypatch), **asked)
    monkeypatch.setattr(rig.watch.ledger, "require", lambda *given, **named: None)
    rig.chance, rig.went, batch = Chance(seed), Counter(), type(rig)._batch

    def drafting(chunk):
        rig.chance.drafting = True
        try:
            return batch(rig, chunk)
        finally:
            rig.chance.drafting = False

    rig._batch, reader = drafting, rig.runner.kvtxn_reader
    if not quick:
        reader.goes_on = reader.lacks_requests = lambda *given: None
        return rig

    def counted(name):
        call = getattr(rig.watch, name)

        def counting(*given):
            said = call(*given)
            rig.went[name, said] += 1
            return said

        setattr(rig.watch, name, counting)

    counted("repeat")
    counted("repeat_without")
    return rig


class Program:
    """Plays one rig: requests come, end, wait and return; some steps have a fault.

    Args:
        rig: the rig.
        seed: of all that is drawn.
        faults: how often a step has a fault.
    """

    def __init__(self, rig, seed, faults):
        self.rig, self._random, self._faults = rig, random.Random(seed), faults
        self._aside, self._preempted, self._number = [], [], 0

    def turn(self):
        rig = self.rig
        self._end()
        self._wait()
        self._come()
        if self._random.random() < 0.06:
            self._random.shuffle(rig.running)
        if self._random.random() < 0.03:
            rig.replay(self._random.choice(SIZES))  # nobody's
        rig.tamper = self._fault() if self._random.random() < self._faults else None
        rig.wrong_count = int(self._random.random() < self._faults)
        rig.step(chunk=self._random.choice([3, 96]))
        for request in rig.running if rig.wrong_count else ():
            if len(request.tokens) == request.computed + 1:
                request.computed += 1
                request.tokens.append(5)

    def _finish(self, request):
        self.rig.end(request)
        self.rig.free += request.tables[0]

    def _end(self):
        rig, draw = self.rig, self._random
        for request in [each for each in rig.running if len(each.tokens) > v2_rig.LENGTH - 14]:
            self._finish(request)
        if draw.random() < 0.25:
            number = draw.choice([1, 1, 1, 2, len(rig.running) - 1])
            for request in draw.sample(rig.running, max(0, min(number, len(rig.running)))):
                self._finish(request)
        if draw.random() < 0.03:
            rig.gone.add("somebody unknown")

    def _wait(self):
        """Some requests are preempted, or left out of some steps."""
        rig, draw = self.rig, self._random
        if draw.random() < 0.04 and rig.running:
            request = draw.choice(rig.running)
            rig.end(request, preempt=True)
            rig.free += request.tables[0]
            self._preempted.append(request)
        elif self._preempted and draw.random() < 0.2:
            rig.resume(self._preempted.pop())
        if draw.random() < 0.05 and rig.running:
            request = draw.choice(rig.running)
            if not request.is_new:
                rig.running.remove(request)
                self._aside.append(request)
        elif self._aside and draw.random() < 0.25:
            rig.running.insert(draw.randrange(len(rig.running) + 1), self._aside.pop())

    def _come(self):
        rig, draw = self.rig, self._random
        room = REQUESTS - len(rig.running) - len(self._aside) - len(self._preempted)
        wanted = draw.choice([1, 2, 3]) if draw.random() < 0.1 or not rig.running else 0
        for _ in range(min(wanted, room)):
            self._number += 1
            first = draw.randrange(1, 40)
            rig.add(f"r{self._number}", [*range(first, first + draw.randrange(2, 9))])

    def _fault(self):
        kind, one, other = self._random.randrange(3), self._random.random(), self._random.random()

        def tamper(rig, batch):
            number, rows = len(rig.running), int(batch.query_start_loc[-1])
            slots = rig.runner.block_tables.slot_mappings[0]
            if kind == 0:
                table = rig.runner.tables[0]
                table[int(one * number), 0] = table[int(other * number), 1]
            elif kind == 1:
                slots[int(one * rows)] = -1
            else:
                slots[int(one * rows)] = slots[int(other * rows)]

        return tamper


def books(rig):
    """All that is known of a rig's rows and requests."""
    watch, ledger = rig.watch, rig.watch.ledger
    watch._catch_up()
    ledger.graphs.settle()
    found, names = ledger.books, sorted(ledger._requests._lines)
    lines = [ledger.line(name) for name in names]
    parts = found.words, found.owners, found.fingerprints, found.found, found.own[lines]
    told = names, lines, watch._buffer.all.tolist(), sorted(watch._left), watch.steps
    return [each.clone() for each in (*parts, found.facts[:, lines])], told


@pytest.mark.parametrize("faults", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(2))
def test_programs_leave_the_same_books(seed, faults, monkeypatch):
    monkeypatch.setattr(v2_rig, "REQUESTS", REQUESTS)
    monkeypatch.setattr(v2_rig, "SIZES", SIZES)
    monkeypatch.setattr(v2_rig, "BLOCKS", 300)
    monkeypatch.setattr(Manager.capture, "__defaults__", (SIZES,))
    monkeypatch.setattr(Key, "new", classmethod(lambda cls: cls((1, 2, 3, 4))))
    make = rig_maker(monkeypatch)
    rigs = [rigged(make, monkeypatch, seed, quick=quick) for quick in (True, False)]
    programs = [Program(rig, 7 * seed + 1, faults) for rig in rigs]
    for turn in range(TURNS):
        for program in programs:
            program.turn()
        if turn % 5 == 4:  # what is asked of the books makes the next step one that is not quick
            (tensors, told), (others, too) = map(books, rigs)
            assert told == too
            assert all(map(torch.equal, tensors, others))
    reports = [rig.watch.report() for rig in rigs]
    assert reports[0] == reports[1]
    assert bool(reports[0]) == bool(faults)
    counters = [rig.watch.counters() for rig in rigs]
    assert counters[0] == counters[1]
    assert counters[0]["kvtxn_audit_active"] == 1
    assert rigs[0].went["repeat", True] + rigs[0].went["repeat_without", True] >= 3
