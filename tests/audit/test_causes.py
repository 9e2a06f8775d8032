"""One cause, one report to each reader; and a report names the last that wrote the slot."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtxn.audit import Ledger, RowGroup, Step
from kvtxn.audit.rows import first_of
from kvtxn.testing.audit_life import GROUPS, MAX_LENGTH, MAX_REQUESTS, live, new_engine
from kvtxn.testing.audit_mutants import MUTANTS, ExportsTooMuch


class WitnessedLedger(Ledger):
    """A ledger that also remembers, slot by slot, who wrote last; in plain Python.

    Attributes:
        judged: each violation, with its word, the entry of ``writers`` at the time it was found
            (None if it names no slot), and how often its request was admitted, and its position
            computed.
        writers: by pool and word, the last writer's step and request, and the number of the write.
            A block that is handed out has no writer; a copy or a load has one of its own.
    """

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.judged = []
        self.writers = {}
        self.writes = 0
        self.name_of = {}
        self.lives = Counter()
        self.computed = Counter()

    def admit(self, request, tokens, **named):
        line = super().admit(request, tokens, **named)
        self.lives[request] += 1
        self.name_of[line] = request
        return line

    def hand_out(self, group, blocks):
        super().hand_out(group, blocks)
        for block in blocks:
            self.put(group, block, range(self.books.layout.places[group].stride), None, None)

    def put(self, group, block, offsets, step, request):
        place = self.books.layout.places[group]
        self.writes += 1
        for offset in offsets:
            where = place.base + block * place.stride + offset
            self.writers[where] = (step, request, self.writes)

    def judge(self):
        for violation in self.violations():
            where = None if violation.slot is None else self.where(violation)
            entry = None if where is None else self.writers.get(where, (None, None, 0))
            life = self.lives[violation.request]
            times = self.computed[violation.request, violation.position]
            self.judged.append((violation, where, entry, (life, times)))

    def check(self, step):
        super().check(step)
        self.judge()

    def inspect(self, stretch):
        super().inspect(stretch)
        self.judge()

    def write(self, step):
        super().write(step)
        self.judge()  # states, which are compared before the step writes
        now = int(self.books.counters[0])
        starts, first = step.starts.tolist(), first_of(self.books, step)
        for name, slots in step.slots.items():
            group = self.books.layout.places[name].group
            for index, line in enumerate(step.lines.tolist()):
                count = starts[index + 1] - starts[index]
                for within in range(count):
                    position = int(first[index]) + within
                    self.computed[self.name_of[line], position] += 1
                    slot = int(slots[starts[index] + within])
                    if slot >= 0 and (group.ring is None or within + group.ring >= count):
                        block, offset = divmod(slot, group.block_size)
                        self.put(name, block, [offset], now, self.name_of[line])

    def import_rows(self, request, group, table, first, end, *arguments, **named):
        self.brought(request, group, table, range(first, end))
        super().import_rows(request, group, table, first, end, *arguments, **named)
        self.judge()

    def import_state(self, request, group, block, length, *arguments, **named):
        self.brought(request, group, [block], [0])
        super().import_state(request, group, block, length, *arguments, **named)
        self.judge()

    def brought(self, request, group, table, positions):
        size, now = self.books.layout.places[group].group.block_size, int(self.books.counters[0])
        for position in positions:
            self.put(group, int(table[position // size]), [position % size], now, request)

    def publish(self, *arguments):
        super().publish(*arguments)
        self.judge()

    def publish_state(self, *arguments):
        super().publish_state(*arguments)
        self.judge()

    def export(self, *arguments):
        digests = super().export(*arguments)
        self.judge()
        return digests

    def export_state(self, *arguments):
        digest = super().export_state(*arguments)
        self.judge()
        return digest

    def where(self, violation):
        """Return the word that a violation names."""
        place = self.books.layout.places[violation.group]
        block, offset = divmod(violation.slot, place.group.block_size)
        return place.base + block * place.stride + offset


QUIET = [mutant for mutant in MUTANTS if not mutant.contested]


@given(
    st.sampled_from(QUIET), st.sampled_from(sorted(GROUPS)), st.integers(0, 2**20),
    st.sampled_from([1 << 16, 50]),
)  # fmt: skip
@example(ExportsTooMuch, "plain", 0, 1 << 16)  # exports right after an admission, two times
@settings(max_examples=40)
def test_one_report_of_each_cause_to_each_reader_with_the_last_writer(mutant, name, seed, journal):
    """Of one write of a slot, a request is told once at most, however often its steps read it."""
    if mutant.needs == "states" and name != "states":
        name = "states"
    ledger = WitnessedLedger(
        GROUPS[name], max_requests=MAX_REQUESTS + 4, max_length=MAX_LENGTH + 8, journal=journal
    )
    engine = new_engine(mutant, name, [ledger], seed=seed)
    seen = set()
    live(engine, 12)
    for violation, where, entry, life in ledger.judged:
        if entry is None:
            continue
        step, request, number = entry
        reader = violation.request, violation.group, violation.position, life
        if violation.kind == violation.found:
            assert (where, number, reader) not in seen
            seen.add((where, number, reader))
        named = violation.written_step is not None
        if violation.found != "unwritten" and (named or journal > 50):
            assert (violation.written_step, violation.written_request) == (step, request)
        assert named or not violation.written_for


def test_reads_outside_a_group_are_reported_once_per_request_and_group():
    """There is no slot to mark; a request that is admitted anew may be reported anew."""
    groups = (RowGroup("a", 2, 8), RowGroup("b", 2, 8))
    ledger = Ledger(groups, max_requests=2, max_length=32)
    ledger.admit("r", [1] * 9)

    def step(table):
        made = Step(
            lines=torch.tensor([ledger.line("r")]),
            starts=torch.tensor([0, 1]),
            first=torch.tensor([8]),
            tokens=torch.tensor([1]),
            slots={},
            tables={"a": torch.tensor([table]), "b": torch.tensor([table])},
        )
        ledger.write(made)
        ledger.check(made)
        return [(v.group, v.position) for v in ledger.violations() if v.slot is None]

    assert step([-1, 99, -5]) == [("a", 0), ("b", 0)]
    assert step([-1, 99]) == []
    ledger.admit("r", [1] * 9)
    assert step([-1]) == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("readers", [2, 5])
def test_many_readers_of_one_wrong_row(readers):
    """Each of them is named, once; their later steps are silent."""
    ledger = Ledger((RowGroup("a", 2, 16),), max_requests=8, max_length=32)
    names = [f"r{number}" for number in range(readers)]
    for name in names:
        ledger.admit(name, [1, 2, 3])
    lines = torch.tensor([ledger.line(name) for name in names])
    for position in range(2, 5):
        made = Step(
            lines=lines,
            starts=torch.arange(readers + 1),
            first=torch.full((readers,), position),
            tokens=torch.full((readers,), 3),
            slots={"a": torch.arange(readers) * 4 + 4 + position - 2},
            tables={
                "a": torch.tensor([[1, 2 + index * 2, 3 + index * 2] for index in range(readers)])
            },
        )
        ledger.write(made)
        ledger.check(made)
    found = [v for v in ledger.violations() if v.block == 1]
    assert [(v.request, v.position, v.found) for v in found] == [(n, 0, "unwritten") for n in names]


def lone(ledger, name, first, tokens, table, slots):
    """Let one request write and read; return who read what."""
    made = Step(
        lines=torch.tensor([ledger.line(name)]),
        starts=torch.tensor([0, len(tokens)]),
        first=torch.tensor([first]),
        tokens=torch.tensor(tokens),
        slots={"a": torch.tensor(slots)},
        tables={"a": torch.tensor([table])},
    )
    ledger.write(made)
    ledger.check(made)
    return [(v.request, v.kind, v.position, v.slot) for v in ledger.violations()]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_wrong_reader_hides_no_other_one(backend):
    """Two tables lead to one good block by mistake: both are told, and the block stays known."""
    ledger = Ledger((RowGroup("a", 4, 8),), max_requests=4, max_length=32, backend=backend)
    blocks = {"a": [1, 2], "b": [3, 4], "c": [5, 6]}
    tokens = {"a": [1, 2, 3, 4, 5], "b": [9] * 5, "c": [7] * 5}
    for name in blocks:
        ledger.admit(name, tokens[name])
        own = [blocks[name][at // 4] * 4 + at % 4 for at in range(5)]
        assert lone(ledger, name, 0, tokens[name], blocks[name], own) == []
    assert lone(ledger, "b", 5, [9], [1, 4], [17]) == [("b", "foreign", 0, 4)]
    assert lone(ledger, "c", 5, [7], [1, 6], [25]) == [("c", "foreign", 0, 4)]
    assert lone(ledger, "b", 6, [9], [1, 4], [18]) == []
    assert lone(ledger, "a", 5, [6], [1, 2], [9]) == []
    digests = ledger.export("a", "a", [1, 2], 0, 4)
    ledger.hand_out("a", [7])
    ledger.admit("d", [6, 6, 6, 6])
    ledger.import_rows("d", "a", [7], 0, 4, digests)
    assert [(v.request, v.kind, v.position) for v in ledger.violations()] == [("d", "imported", 0)]


def test_a_request_that_goes_back_is_compared_from_its_beginning():
    """It was told of its first block; then it is computed again, and reads another wrong one."""
    ledger = Ledger((RowGroup("a", 4, 8),), max_requests=2, max_length=32)
    ledger.admit("r", [1, 2, 3, 4, 5])
    assert lone(ledger, "r", 4, [5], [1, 2], [8]) == [("r", "unwritten", 0, 4)]
    assert lone(ledger, "r", 5, [6], [1, 2], [9]) == []
    assert lone(ledger, "r", 0, [1, 2, 3, 4], [3, 4], [12, 13, 14, 15]) == []
    assert lone(ledger, "r", 4, [5, 6], [5, 4], [16, 17]) == [("r", "unwritten", 0, 20)]


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_rows_that_a_connector_brought_are_told_once(backend):
    """They are not told again when the request's first step reads them; the other rows are read."""
    ledger = Ledger((RowGroup("a", 4, 8),), max_requests=4, max_length=32, backend=backend)
    ledger.admit("a", [1, 2, 3, 4, 5, 6, 7, 8])
    lone(ledger, "a", 0, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2], range(4, 12))
    digests = ledger.export("a", "a", [1, 2], 0, 8)
    ledger.admit("b", [1, 9, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14])
    ledger.hand_out("a", [3, 4, 5])
    ledger.import_rows("b", "a", [3], 0, 4, digests[:4])
    ledger.import_rows("b", "a", [3, 4], 4, 8, digests[4:])
    told = [("b", "imported", 1, 13), ("b", "imported", 4, 16)]
    assert [(v.request, v.kind, v.position, v.slot) for v in ledger.violations()] == told
    # Block 5 is one of its own that nobody wrote.
    unwritten = [("b", "unwritten", 8, 20)]
    assert lone(ledger, "b", 12, [14], [3, 4, 5, 6], [24]) == unwritten
    assert lone(ledger, "b", 13, [15], [3, 4, 5, 6], [25]) == []
