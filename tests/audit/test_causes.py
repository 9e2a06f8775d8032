"""One cause, one report; and the writer that a report names is the last that wrote the slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtxn.audit import Ledger, RowGroup, Step
from kvtxn.testing.audit_life import GROUPS, MAX_LENGTH, MAX_REQUESTS, live, new_engine
from kvtxn.testing.audit_mutants import MUTANTS, ExportsTooMuch


class WitnessedLedger(Ledger):
    """A ledger that also remembers, slot by slot, who wrote last; in plain Python.

    Attributes:
        judged: each violation, with the entry of ``writers`` at the time it was found; None if it
            names no slot.
        writers: by pool and word, the last writer's step and request, and the number of the write.
            A block that is handed out has no writer; a copy or a load has one of its own.
    """

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.judged = []
        self.writers = {}
        self.writes = 0
        self.name_of = {}

    def admit(self, request, tokens, **named):
        line = super().admit(request, tokens, **named)
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
            self.judged.append((violation, where, entry))

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
        starts = step.starts.tolist()
        for name, slots in step.slots.items():
            group = self.books.layout.places[name].group
            for index, line in enumerate(step.lines.tolist()):
                count = starts[index + 1] - starts[index]
                for within in range(count):
                    slot = int(slots[starts[index] + within])
                    if slot >= 0 and (group.ring is None or within + group.ring >= count):
                        block, offset = divmod(slot, group.block_size)
                        self.put(name, block, [offset], now, self.name_of[line])

    def _import(self, operation, request, place, table, first, end, digests):
        now = int(self.books.counters[0])
        for position in range(first, end):
            at = 0 if place.group.is_state else position
            block = int(table[at // place.group.block_size])
            self.put(place.group.name, block, [at % place.group.block_size], now, request)
        super()._import(operation, request, place, table, first, end, digests)

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
def test_one_report_for_each_cause_with_the_last_writer(mutant, name, seed, journal):
    """Of one write of a slot there is one report at most, whoever reads it and however often."""
    if mutant.needs == "states" and name != "states":
        name = "states"
    ledger = WitnessedLedger(
        GROUPS[name], max_requests=MAX_REQUESTS + 4, max_length=MAX_LENGTH + 8, journal=journal
    )
    engine = new_engine(mutant, name, [ledger], seed=seed)
    seen = set()
    live(engine, 12)
    for violation, where, entry in ledger.judged:
        if entry is None:
            continue
        step, request, number = entry
        assert (where, number) not in seen
        seen.add((where, number))
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
    """The first reader is named, once; all later steps and other requests are silent."""
    ledger = Ledger((RowGroup("a", 2, 8),), max_requests=8, max_length=32)
    names = [f"r{number}" for number in range(readers)]
    for name in names:
        ledger.admit(name, [1, 2, 3])
    lines = torch.tensor([ledger.line(name) for name in names])
    for _ in range(3):
        made = Step(
            lines=lines,
            starts=torch.arange(readers + 1),
            first=torch.full((readers,), 2),
            tokens=torch.full((readers,), 3),
            slots={"a": torch.arange(readers) + 4},
            tables={"a": torch.tensor([[1, 2 + index // 2] for index in range(readers)])},
        )
        ledger.write(made)
        ledger.check(made)
    found = [v for v in ledger.violations() if v.block == 1]
    assert [(v.request, v.position, v.found) for v in found] == [("r0", 0, "unwritten")]
