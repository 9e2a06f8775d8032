"""Random programs of the V2 runner's stand-in: a healthy one is silent, a faulty one is not."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

import v2_rig
from test_audit_v2 import engine_facts  # noqa: F401  # a fixture

REQUESTS = 8
TURNS = 60


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


def started(seed):
    """A rig whose requests have the most drafts in most steps."""
    rig = v2_rig.Rig()
    rig.start()
    rig.chance, batch = Chance(seed), rig._batch

    def drafting(chunk):
        rig.chance.drafting = True
        try:
            return batch(chunk)
        finally:
            rig.chance.drafting = False

    rig._batch = drafting
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
        rig.tamper = self._fault() if self._random.random() < self._faults else None
        rig.step(chunk=self._random.choice([3, 96]))

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


@pytest.mark.parametrize("faults", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(4))
def test_programs(seed, faults, monkeypatch):
    """Requests come, end, wait, return and change places; each counts, and nothing is unjudged."""
    monkeypatch.setattr(v2_rig, "REQUESTS", REQUESTS)
    monkeypatch.setattr(v2_rig, "BLOCKS", 300)
    rig = started(seed)
    program = Program(rig, 7 * seed + 1, faults)
    for _ in range(TURNS):
        program.turn()
    assert bool(rig.watch.report()) == bool(faults)
    counters = rig.watch.counters()
    assert counters["kvtxn_audit_active"] == 1
    assert counters["kvtxn_audit_steps_total"] == TURNS
    assert counters["kvtxn_audit_rows_checked_total"] > 1000
    assert faults or counters["kvtxn_audit_unjudged_total"] == 0
