"""Tables with a line for each request that there can be, and tables of another pool's numbers."""

from __future__ import annotations

import attrs
import pytest
import torch
from kernels_here import ON_GPU
from kvtxn.backends.audit_numba import NumbaPasses
from ledger_kit.bytes import BYTE_MUTANTS, ByteEngine
from ledger_kit.engine import SmallEngine
from ledger_kit.life import GROUPS, live, new_engine, said
from ledger_pairs import DEVICE, PASSES, assert_equal_books, pair
from test_audit_bytes import BACKENDS, assert_equal_bytes, in_torch, twin

from kvtxn import ConfigError
from kvtxn.audit import Ledger, RecordingLedger, RowGroup, Step, Stretch
from kvtxn.audit.lengths import report_lengths

__all__ = ["pair"]

LINES = 17


class InOneTable:
    """An engine with one table per group, in which requests lie in another order than in steps."""

    def build(self, parts):
        step = super().build(parts)
        lines = (torch.arange(len(parts), device=DEVICE) * 5 + 3) % LINES
        tables = {}
        for name, table in step.tables.items():
            tables[name] = table.new_full((LINES, table.shape[1]), 1)
            tables[name][lines] = table
        return attrs.evolve(step, tables=tables, table_lines=lines)

    def read_rows(self, step, name, table):
        return super().read_rows(step, name, table[step.table_lines])


class ThroughMaps(InOneTable):
    """Its tables name numbers of another pool, in another order than the group's blocks."""

    def build(self, parts):
        step = super().build(parts)
        tables, maps = {}, {}
        for name, table in step.tables.items():
            blocks = self.groups[name].num_blocks
            number = (torch.arange(blocks + 5, device=DEVICE) * 7 + 2) % (blocks + 5)
            maps[name] = torch.full_like(number, -1)
            maps[name][number[:blocks]] = torch.arange(blocks, device=DEVICE)
            inside = (table >= 0) & (table < blocks)
            named = number[torch.where(inside, table, 0).long()]
            tables[name] = torch.where(inside, named, blocks + 99).to(table.dtype)
        return attrs.evolve(step, tables=tables, block_maps=maps)

    def read_rows(self, step, name, table):
        known = step.block_maps[name]
        blocks = known[table.clamp(max=len(known) - 1).long()]
        return super().read_rows(step, name, torch.where(table < len(known), blocks, -1))


def in_one_table(engine):
    return type(engine.__name__, (ThroughMaps, engine), {})


@pytest.mark.parametrize("name", GROUPS)
def test_a_healthy_life(pair, name):
    """The books are those of an engine whose tables have the step's requests alone."""
    one, other = ledgers = pair(name)
    for kind, ledger in ((SmallEngine, one), (in_one_table(SmallEngine), other)):
        live(new_engine(kind, name, [ledger], seed=2, device=DEVICE), 60 if ON_GPU else 8)
        assert said(ledger) == []
    assert_equal_books(*ledgers)
    assert one.counters()["kvtxn_audit_rows_checked_total"] > 50


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mutant", [ByteEngine, *BYTE_MUTANTS[:1]])
def test_the_same_bytes_are_compared(mutant, backend):
    found = []
    one = in_torch("sliding", backend, mutant, seed=4, every=2)
    other = twin(one, "sliding", backend, in_one_table(mutant), seed=4, every=2)
    for engine in (one, other):
        live(engine, 40 if ON_GPU else 8)
        found.append([*map(str, engine.ledgers[0].violations())])
    if not ON_GPU:
        assert found[0] == found[1]
    assert one.scrub.compared == other.scrub.compared > 2
    if not ON_GPU or mutant is ByteEngine:
        assert_equal_bytes(one, other)


# -- slots in one table, as in SGLang: a page has one row, and line 0 belongs to padding -----------

GROUP = (RowGroup("rows", 1, 64),)


def numbers(*values):
    return torch.tensor(values, device=DEVICE)


@pytest.fixture(params=["torch", *PASSES])
def ledger(request):
    """One ledger of the groups above by each of the passes."""
    sizes = {"max_requests": 4, "max_length": 16, "journal": 128}
    return Ledger(GROUP, device=DEVICE, backend=request.param, **sizes)


class Slots:
    """Requests "a" and "b" have written eight rows each, in slots that their lines name."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.table = torch.zeros(6, 16, dtype=torch.int32, device=DEVICE)
        self.lines = {"a": 4, "b": 2}
        self.table[4, :9] = torch.arange(10, 19, device=DEVICE)
        self.table[2, :9] = torch.arange(40, 31, -1, device=DEVICE)
        for name in "ab":
            ledger.admit(name, self.tokens(name))
        self.step(0, 8)

    def tokens(self, name):
        return [ord(name), *range(2, 10)]

    def slots(self, first, count):
        return torch.cat([self.table[line, first : first + count] for line in (4, 2)]).long()

    def step(self, first, count, slots=None, **other):
        """Both requests' next step, and one of padding, whose numbers are stale."""
        tokens = [t for name in "ab" for t in self.tokens(name)[first : first + count]]
        step = Step(
            lines=numbers(*map(self.ledger.line, "ab"), -1),
            starts=numbers(0, count, 2 * count, 2 * count),
            first=numbers(first, first, 99),
            tokens=numbers(*tokens),
            slots={"rows": self.slots(first, count) if slots is None else slots},
            tables={"rows": self.table},
            table_lines=numbers(*self.lines.values(), 10**9),
        )
        step = attrs.evolve(step, **other)
        self.ledger.write(step)
        self.ledger.check(step)
        return step

    def found(self):
        return [
            (v.kind, v.request, v.position, v.slot, v.written_request, v.written_step)
            for v in self.ledger.violations()
        ]


def test_the_table_is_read_at_the_lines_of_requests(ledger):
    slots = Slots(ledger)
    slots.step(8, 1)
    assert slots.found() == []
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] == 2 * (8 + 9)


def test_a_wrong_entry_of_the_table_is_named(ledger):
    """It names a slot of the other request, or one that nobody has written."""
    slots = Slots(ledger)
    slots.table[4, 3], slots.table[2, 5] = 37, 60
    slots.step(8, 1)
    wrong = {("foreign", "a", 3, 37, "b", 1), ("unwritten", "b", 5, 60, None, None)}
    assert set(slots.found()) == wrong  # on a GPU the kernel's programs end in any order


def test_the_line_of_another_request_is_found(ledger):
    slots = Slots(ledger)
    slots.step(8, 1, table_lines=numbers(2, 2, -5))
    assert ("foreign", "a", 0, 40, "b", 1) in slots.found()


def test_a_row_that_is_written_elsewhere_is_found(ledger):
    slots = Slots(ledger)
    slots.step(8, 1, slots=numbers(60, 32))
    assert slots.found() == [("unwritten", "a", 8, 18, None, None)]


@pytest.mark.parametrize("line", [-1, 6, 1 << 40])
def test_a_line_that_a_table_does_not_have_leads_nowhere(ledger, line):
    """And is said once, as of a table that is too narrow."""
    slots = Slots(ledger)
    slots.step(8, 1, table_lines=numbers(line, 2, 0))
    assert slots.found() == [("unwritten", "a", 0, None, None, None)]


def test_lines_of_any_dtype_and_stride(ledger):
    slots = Slots(ledger)
    apart = numbers(4, -9, 2, -9, 0, -9)[::2]
    for lines in (apart, apart.int(), numbers(4, 2, 0, 99)):
        slots.step(8, 1, table_lines=lines)
    assert slots.found() == []


def test_a_map_leads_from_numbers_of_another_pool(ledger):
    """To this group's slots; what the map does not have leads nowhere."""
    slots = Slots(ledger)
    block_map = torch.full((200,), -1, device=DEVICE)
    block_map[100:164] = torch.arange(64, device=DEVICE)
    slots.table[1:] += 100
    slots.table[:, 12:] = 1 << 30
    here = numbers(18, 32)
    for given in (block_map, block_map.int(), torch.stack([block_map] * 2, 1)[:, 0]):
        slots.step(8, 1, here, block_maps={"rows": given})
    assert slots.found() == []
    block_map[112], slots.table[2, 4] = 33, 999
    slots.step(8, 1, here, block_maps={"rows": block_map})
    wrong = {("foreign", "a", 2, 33, "b", 1), ("unwritten", "b", 4, None, None, None)}
    assert set(slots.found()) == wrong


def test_published_rows_are_looked_up_likewise(ledger):
    slots = Slots(ledger)
    slots.table[2, 5] = 60
    lines = numbers(*map(ledger.line, "ab"))
    for _ in range(2):
        ledger.inspect(
            Stretch(
                lines, numbers(0, 0), numbers(8, 8), {"rows": slots.table}, "published",
                numbers(4, 2), {"rows": torch.arange(64, device=DEVICE)},
            )
        )  # fmt: skip
    assert slots.found() == [("published", "b", 5, 60, None, None)] * 2


def test_lengths_are_compared_at_the_lines(ledger):
    slots = Slots(ledger)
    step = slots.step(8, 1)
    report_lengths(ledger.books, step, {"rows": numbers(9, 7, 0)})
    assert slots.found() == [("foreign", "b", 7, 33, "b", 1)]


def test_a_recording_looks_rows_up_at_the_lines():
    ledger = RecordingLedger(GROUP, max_requests=4, max_length=16, device=DEVICE)
    slots = Slots(ledger)
    ledger.admit("c", slots.tokens("a"))
    slots.table[5] = slots.table[4]
    step = Step(
        lines=numbers(ledger.line("c")), starts=numbers(0, 1), first=numbers(8),
        tokens=numbers(9), slots={"rows": numbers(18)}, tables={"rows": slots.table},
        table_lines=numbers(5),
    )  # fmt: skip
    ledger.write_and_check(step)
    recording = ledger.recording()
    found = recording["happenings"].index("found")
    runs = [recording["runs"][at : at + 7] for at in range(0, len(recording["runs"]), 7)]
    assert [run[3:] for run in runs if run[1] == found] == [[10, 8, 2, 0]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"table_lines": numbers(4)}, "table_lines"),
        ({"table_lines": numbers(4.0, 2.0, 0.0)}, "table_lines"),
        ({"table_lines": None, "tables": {"rows": torch.zeros(2, 16).int()}}, "tables"),
        ({"tables": {"rows": torch.zeros(0, 16).int()}}, "tables"),
        ({"block_maps": {"rows": numbers()}}, "block_maps"),
        ({"block_maps": {"others": numbers(1)}}, "group"),
        ({"block_maps": [numbers(1)]}, "block_maps"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, says):
    slots = Slots(Ledger(GROUP, max_requests=4, max_length=16, device=DEVICE, backend="torch"))
    with pytest.raises(ConfigError, match=says):
        slots.step(8, 1, **wrong)


@pytest.mark.skipif(ON_GPU, reason="its passes are for CPUs")
def test_numba_reads_a_whole_table_where_it_lies():
    """A step that comes again is not read again: no copy of the table is made."""
    ledger = Ledger(GROUP, max_requests=4, max_length=16, backend=NumbaPasses)
    slots = Slots(ledger)
    step = slots.step(8, 1)
    assert ledger.passes.reader.read(step).shared
