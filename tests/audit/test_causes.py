"""One cause, one report to each reader; and a report names the last that wrote the slot."""

from __future__ import annotations

import pytest
import torch

from kvtxn.audit import Ledger, RowGroup, Step


def test_a_writer_that_the_journal_has_forgotten_is_not_named():
    """The wrong row is found all the same."""
    for journal, writer in ((4, None), (64, "a")):
        ledger = Ledger((RowGroup("a", 4, 8),), max_requests=2, max_length=32, journal=journal)
        ledger.admit("a", [1] * 4)
        ledger.admit("b", [2] * 5)
        assert lone(ledger, "a", 0, [1] * 4, [1], range(4, 8)) == []
        assert lone(ledger, "a", 4, [1], [1, 2], [8]) == []
        ledger.publish("b", "a", [1], 0, 1)
        (found,) = ledger.violations()
        assert (found.kind, found.found, found.slot) == ("published", "foreign", 4)
        assert (found.written_request, bool(found.written_for)) == (writer, writer is not None)


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
