"""What other processes know of blocks that a connector brings, without an engine."""

from __future__ import annotations

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger.shared_identities import SharedIdentities
from kvtxn.integrations.serving.ledger.transfers import Handed, Transfers, TransferWatch
from kvtxn.integrations.serving.step import Arrival, Rows

from kvtxn.audit import Key, Ledger, RowGroup, Step
from kvtxn.audit.identity_store import SqliteStore
from kvtxn.audit.store_thread import StoreThread

GROUP = RowGroup("group.0", 4, 12)
TOKENS = [*range(20, 30)]
KEY = Key.new()
LONG = 60.0


@attrs.define
class Process:
    """A ledger with the transfers of a connector, and the bytes of its blocks."""

    ledger: Ledger
    thread: StoreThread
    watch: TransferWatch
    bytes: dict[int, int]
    weights: int | None

    def admit(self, name, tokens, extras=()):
        self.ledger.admit(name, tokens, extras=extras)

    def write(self, name, table, tokens):
        """Compute the rows of a prompt."""
        count = len(tokens)
        slots = torch.tensor([4 * table[at // 4] + at % 4 for at in range(count)])
        step = Step(
            lines=torch.tensor([self.ledger.line(name)]), starts=torch.tensor([0, count]),
            first=torch.tensor([0]), tokens=torch.tensor(tokens),
            slots={"group.0": slots}, tables={"group.0": torch.tensor([table])},
        )  # fmt: skip
        rows = Rows([name], step.starts, step.first, step.tokens, None, step.slots, step.tables)
        self.watch.forward(rows)
        self.ledger.write(step)
        self.watch.end()
        self.watch.end_step()

    def come(self, name, table, tokens, extras=(), length=None):
        """Let a request come whose blocks a connector fills."""
        self.admit(name, tokens, extras)
        computed = 4 * len(table) if length is None else length
        arrival = Arrival(name, list(tokens), [*extras], {}, computed, [table])
        self.watch.change([arrival], [])
        self.watch.begin([Handed("group.0", table, 0, name)])
        nobody = Rows([], torch.zeros(1), None, torch.zeros(0), None, {}, {})
        self.watch.forward(nobody)

    def settled(self):
        """Return the rows that nobody vouches for, and the violations."""
        assert self.thread.wait(LONG)
        self.watch.settle()
        count = self.ledger.counters()["kvtxn_audit_rows_unverified_total"]
        return count, self.ledger.violations()


@pytest.fixture
def process(tmp_path):
    """Make processes with one store."""
    threads = []

    def make(*, weights=7, scope=b"one layout", label="engine 1", opens=None):
        ledger = Ledger([GROUP], max_requests=4, max_length=32, key=KEY)
        opens = opens or (lambda: SqliteStore(tmp_path / "identities.db"))
        thread, contents = StoreThread(opens), {}
        threads.append(thread)

        def stop(error):
            raise error

        made = Process(ledger, thread, None, contents, weights)
        shared = SharedIdentities(
            ledger, thread, {"group.0": scope}, lambda: made.weights,
            lambda request: f"{label}, request {request}",
        )  # fmt: skip
        made.watch = TransferWatch(
            ledger, {"group.0": GROUP}, {}, lambda loads: Transfers([], [], loads, opaque=False),
            lambda group, blocks: torch.tensor([[contents[each], 5] for each in blocks]),
            stop, shared,
        )  # fmt: skip
        return made

    yield make
    for thread in threads:
        thread.close(LONG)


@pytest.fixture
def first(process):
    """The process that computes two blocks and some rows; their bytes are 100 and 200."""
    made = process()
    made.bytes |= {1: 100, 2: 200, 3: 300}
    made.admit("a", TOKENS)
    made.ledger.hand_out("group.0", [1, 2, 3])
    made.write("a", [1, 2, 3], TOKENS)
    assert made.settled() == (0, [])
    return made


@pytest.fixture
def second(process, first):
    made = process(label="engine 2")
    made.bytes |= {4: 100, 5: 200}
    made.ledger.hand_out("group.0", [4, 5])
    return made


def test_rows_of_another_process_are_right(second):
    second.come("b", [4, 5], TOKENS)
    assert second.settled() == (0, [])
    second.watch.change([], [])
    assert second.settled() == (0, [])


def test_they_are_read_as_rows_of_the_request(second):
    second.come("b", [4, 5], TOKENS)
    second.ledger.hand_out("group.0", [6])
    step = Step(
        lines=torch.tensor([second.ledger.line("b")]), starts=torch.tensor([0, 1]),
        first=torch.tensor([8]), tokens=torch.tensor(TOKENS[8:9]),
        slots={"group.0": torch.tensor([24])}, tables={"group.0": torch.tensor([[4, 5, 6]])},
    )  # fmt: skip
    second.ledger.write_and_check(step)
    assert second.settled() == (0, [])


@pytest.mark.parametrize(("tokens", "extras"), [([99, *TOKENS[1:]], ()), (TOKENS, (3,))])
def test_rows_of_other_tokens_or_extras(second, tokens, extras):
    """Reader and writer are named, and nothing of a text."""
    second.come("b", [4, 5], tokens, extras)
    unverified, found = second.settled()
    assert unverified == 0
    assert [(v.kind, v.request, v.position, v.block, v.slot) for v in found] == [
        ("imported", "b", 0, 4, 16),
        ("imported", "b", 4, 5, 20),
    ]
    assert {v.written_request for v in found} == {"engine 1, request a"}
    assert {(v.found, v.differs, v.brought, v.expected, v.written_for) for v in found} == {
        ("foreign", "unknown", True, (), ())
    }
    assert "stored by engine 1, request a for position 4" in str(found[1])
    counts = second.ledger.counters()
    assert counts["kvtxn_audit_violations_total_imported"] == 2


def test_blocks_in_each_others_places(second):
    second.bytes |= {4: 200, 5: 100}
    second.come("b", [4, 5], TOKENS)
    _, found = second.settled()
    assert [(v.position, v.written_position, v.differs) for v in found] == [
        (0, 4, "position"),
        (4, 0, "position"),
    ]


def test_rows_of_other_weights(second):
    second.weights = 8
    second.come("b", [4, 5], TOKENS)
    unverified, found = second.settled()
    assert unverified == 0
    assert {(v.kind, v.differs) for v in found} == {("imported", "weights")}


def test_rows_that_both_weights_have_computed_alike(process, first, second):
    """As where the weights differ after the last layer's keys and values."""
    third = process(weights=8)
    third.bytes |= first.bytes
    third.admit("c", TOKENS)
    third.ledger.hand_out("group.0", [1, 2, 3])
    third.write("c", [1, 2, 3], TOKENS)
    third.settled()
    second.come("b", [4, 5], TOKENS)
    assert second.settled() == (0, [])


@pytest.mark.parametrize("why", ["bytes", "layout", "weights", "part"])
def test_rows_that_nobody_can_vouch_for(process, first, why):
    """Of other bytes, of another layout, by weights that nobody knows, of a block in part."""
    scope = b"another" if why == "layout" else b"one layout"
    made = process(scope=scope, weights=None if why == "weights" else 7)
    made.bytes |= {4: 100, 5: 201 if why == "bytes" else 200}
    made.ledger.hand_out("group.0", [4, 5])
    tokens = TOKENS[:7] if why == "part" else TOKENS
    made.come("b", [4, 5], tokens, length=7 if why == "part" else 8)
    unverified, found = made.settled()
    assert found == []
    assert unverified == {"bytes": 4, "layout": 8, "weights": 8, "part": 3}[why]


def test_an_epoch_of_one_process_is_none_of_another(first, second):
    """New weights have another hash, however many updates each process has seen."""
    first.ledger.new_epoch("target")
    first.weights = 9
    first.ledger.hand_out("group.0", [1, 2, 3])
    first.bytes |= {1: 111, 2: 222}
    first.admit("d", TOKENS)
    first.write("d", [1, 2, 3], TOKENS)
    assert first.settled() == (0, [])
    second.bytes |= {4: 111, 5: 222}
    second.weights = 9
    second.come("b", [4, 5], TOKENS)
    assert second.settled() == (0, [])
    second.bytes |= {6: 100}
    second.ledger.hand_out("group.0", [6])
    second.come("c", [6], TOKENS)
    assert [v.differs for v in second.settled()[1]] == ["weights"]


def test_stale_rows_are_not_written(process, first):
    """They are of other weights than those of now."""
    made = process()
    made.admit("a", TOKENS)
    made.bytes |= {1: 500, 2: 600, 3: 700}
    made.ledger.hand_out("group.0", [1, 2, 3])
    made.ledger.import_rows("a", "group.0", [1, 2, 3], 0, 8)
    made.ledger.new_epoch("target")
    made.weights = 9
    made.watch._remember([("a", "group.0", [1, 2], 0)])
    other = process(weights=9)
    other.bytes |= {4: 500, 5: 600}
    other.ledger.hand_out("group.0", [4, 5])
    other.come("b", [4, 5], TOKENS)
    assert other.settled() == (8, [])


@pytest.mark.parametrize("position", [0, 5, 7])
def test_a_block_with_a_row_that_is_not_there_is_not_remembered(process, first, position):
    """Nobody may take it for a whole one later, in this process or in another."""
    made = process()
    made.bytes |= {1: 500, 2: 600, 4: 500, 5: 600}
    made.admit("a", TOKENS)
    made.ledger.hand_out("group.0", [1, 2, 4, 5])
    words = made.ledger.expected("a", "group.0", 0, 8)
    words[position] = 1  # of a draft that was taken back
    made.ledger.import_rows("a", "group.0", [1, 2], 0, 8, words)
    made.ledger.violations()
    made.watch._remember([("a", "group.0", [1, 2], 0)])
    assert made.thread.wait(LONG)
    made.come("b", [4, 5], TOKENS)
    assert made.settled() == (4, [])


def test_a_step_that_failed_fills_no_block(first):
    first.watch.restart()
    first.admit("e", TOKENS)
    rows = Rows(["e"], torch.tensor([0, 10]), torch.tensor([0]), torch.zeros(10), None, {},
                {"group.0": torch.tensor([[1, 2, 3]])})  # fmt: skip
    first.watch.forward(rows)
    first.watch.take_back()
    first.watch.end_step()
    assert len(first.watch._table) == 0
    first.watch.forward(rows)
    first.watch.end_step()
    assert len(first.watch._table) == 2


def test_a_block_that_could_not_be_loaded_is_no_finding(second):
    second.come("b", [4, 5], [99, *TOKENS[1:]])
    second.watch.failed([4])
    assert second.watch.take_failed() == (["b"], [4])
    assert [v.block for v in second.settled()[1]] == [5]


def test_a_store_that_cannot_be_reached(process, first):
    def fail():
        raise OSError("gone")

    made = process(opens=fail)
    made.bytes |= {4: 100, 5: 200}
    made.ledger.hand_out("group.0", [4, 5])
    made.come("b", [4, 5], TOKENS)
    assert made.settled() == (8, [])


def test_a_block_that_comes_back_to_its_own_process_asks_nobody(first):
    """However it left: it was remembered when it became full."""
    first.thread.close(LONG)
    first.bytes |= {4: 100, 5: 200}
    first.ledger.hand_out("group.0", [4, 5])
    first.come("b", [4, 5], TOKENS)
    first.come("c", [4, 5], [99, *TOKENS[1:]])
    unverified, found = first.settled()
    assert unverified == 0
    assert [(v.request, v.written_request, v.position) for v in found] == [
        ("c", "a", 0),
        ("c", "a", 4),
    ]
    assert found[0].written_for == tuple(TOKENS[:1])
