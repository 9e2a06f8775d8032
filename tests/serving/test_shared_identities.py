"""What other processes know of blocks that a connector brings, without an engine."""

from __future__ import annotations

import threading
from pathlib import Path

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger.block_identities import Span
from kvtxn.integrations.serving.ledger.handed_blocks import Handed, Transfers
from kvtxn.integrations.serving.ledger.shared_identities import SharedIdentities
from kvtxn.integrations.serving.ledger.transfers import TransferWatch
from kvtxn.integrations.serving.step import Arrival, Rows

from kvtxn.audit import Key, Ledger, RowGroup, Step
from kvtxn.audit.identity_store import SqliteStore, StoredBlock
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
    path: Path
    tables: dict[str, list[list[int]]] = attrs.field(factory=dict)

    def admit(self, name, tokens, extras=()):
        self.ledger.admit(name, tokens, extras=extras)

    def write(self, name, table, tokens, first=0):
        """Compute the rows of a prompt from a position on."""
        count, self.tables[name] = len(tokens), [table]
        places = range(first, first + count)
        slots = torch.tensor([4 * table[at // 4] + at % 4 for at in places])
        step = Step(
            lines=torch.tensor([self.ledger.line(name)]), starts=torch.tensor([0, count]),
            first=torch.tensor([first]), tokens=torch.tensor(tokens),
            slots={"group.0": slots}, tables={"group.0": torch.tensor([table])},
        )  # fmt: skip
        rows = Rows([name], step.starts, step.first, step.tokens, None, step.slots, step.tables)
        self.watch.forward(rows)
        self.ledger.write(step)
        self.watch.end()
        self.watch.end_step()

    def leave(self, name, table, keys=None):
        """Let a connector store blocks."""
        self.watch._export([Handed("group.0", table, 0, name, keys=keys)])

    def come(self, name, table, tokens, extras=(), length=None, keys=None):
        """Let a request come whose blocks a connector fills."""
        self.ledger.hand_out("group.0", table)
        self.admit(name, tokens, extras)
        computed = 4 * len(table) if length is None else length
        arrival = Arrival(name, list(tokens), [*extras], {}, computed, [table])
        self.watch.change([arrival], [("group.0", block) for block in table])
        self.watch.begin([Handed("group.0", table, 0, name, keys=keys)])
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

    def make(
        *,
        weights=7,
        scope=b"one layout",
        label="engine 1",
        opens=None,
        drafter=None,
        context_free=False,
    ):
        group = attrs.evolve(GROUP, drafter=drafter is None, context_free=context_free)
        ledger = Ledger([group], max_requests=4, max_length=32, key=KEY)
        path = tmp_path / "identities.db"
        opens = opens or (lambda: SqliteStore(path))
        thread, contents = StoreThread(opens), {}
        threads.append(thread)

        def stop(error):
            raise error

        made = Process(ledger, thread, None, contents, weights, path)
        shared = SharedIdentities(
            ledger, thread, {"group.0": scope},
            lambda counts: drafter if counts and drafter else made.weights,
            lambda request: f"{label}, request {request}",
        )  # fmt: skip
        made.watch = TransferWatch(
            ledger, {"group.0": group}, {}, lambda loads: Transfers([], loads, [], opaque=False),
            lambda loads: [],
            lambda group, blocks: torch.tensor([[contents[each], 5] for each in blocks]),
            made.tables.__getitem__, stop, shared,
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


@pytest.mark.parametrize("knows", ["the store", "the process"])
def test_a_models_first_layer_alone_has_equal_rows_after_any_tokens(process, first, knows):
    """A row of it depends on no token before, so bytes say nothing of a prefix."""
    made = process(label="engine 2", context_free=True)
    if knows == "the process":
        first.thread.close(LONG)
        made.bytes |= {1: 100, 2: 200}
        made.admit("a", TOKENS)
        made.ledger.hand_out("group.0", [1, 2])
        made.write("a", [1, 2], TOKENS[:8])
    made.bytes |= {4: 100, 5: 200, 6: 200}
    made.come("b", [4, 5], [99, *TOKENS[1:]])
    assert made.settled() == (8, [])
    made.come("c", [4, 6], TOKENS)
    assert made.settled() == (8, [])


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


def test_rows_of_a_group_without_a_drafter_know_no_drafter(process):
    """Engines with other drafters, or a drafter that was trained meanwhile, share such rows."""
    first, second = process(drafter=100), process(drafter=200)
    first.bytes |= {1: 100, 2: 200}
    first.admit("a", TOKENS)
    first.ledger.hand_out("group.0", [1, 2])
    first.write("a", [1, 2], TOKENS[:8])
    assert first.settled() == (0, [])
    second.bytes |= {4: 100, 5: 200}
    second.come("b", [4, 5], TOKENS)
    assert second.settled() == (0, [])


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


def test_bytes_of_several_prefixes_say_nothing_of_one_more(process, first):
    """Such as of tokens with equal embeddings: the store may have lost the reader's own."""
    second, reader = process(label="engine 2"), process(label="engine 3")
    other = [99, *TOKENS[1:]]
    second.bytes |= {1: 100, 2: 200}
    second.admit("b", other)
    second.ledger.hand_out("group.0", [1, 2])
    second.write("b", [1, 2], other[:8])
    assert second.settled() == (0, [])
    reader.bytes |= {4: 100, 5: 200}
    reader.come("c", [4, 5], [98, *TOKENS[1:]])
    assert reader.settled() == (8, [])


def test_a_prefix_that_is_forgotten_beside_another_is_no_violation(process, tmp_path):
    """The other one's bytes were the same, and it alone is written again."""

    def small():
        return SqliteStore(tmp_path / "identities.db", 40)

    first, other, store = process(opens=small), process(), small()
    first.bytes |= {1: 100, 2: 200}

    def compute(name, tokens):
        first.admit(name, tokens)
        first.ledger.hand_out("group.0", [1, 2])
        first.write(name, [1, 2], tokens[:8])
        assert first.settled() == (0, [])

    compute("a", TOKENS)
    compute("b", [99, *TOKENS[1:]])
    store.put(b"one layout", [StoredBlock(b"%016d" % at, 5, 7, 0, "c") for at in range(100)])
    compute("c", TOKENS)
    other.bytes |= {4: 100, 5: 200}
    other.come("d", [4, 5], [99, *TOKENS[1:]])
    assert other.settled() == (8, [])
    other.come("e", [4, 5], TOKENS)
    assert other.settled() == (8, [])
    store.close()


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


@pytest.mark.parametrize(("length", "kinds"), [(6, []), (7, ["imported"])])
def test_part_of_a_block_whose_end_is_to_be_computed(second, length, kinds):
    """The bytes after the part are nobody's word, unless only the last token is computed anew."""
    second.come("b", [4, 5], [*TOKENS[:6], 98, 99], length=length)
    unverified, found = second.settled()
    assert ([v.kind for v in found], unverified) == (kinds, 0 if kinds else 2)


def test_wrong_rows_that_are_stored_again_stay_wrong(process, first, second):
    """A request that got them stores them under its own tokens: that is no evidence."""
    other = [99, *TOKENS[1:]]
    second.come("b", [4, 5], other)
    second.leave("b", [4, 5])
    assert len(second.settled()[1]) == 2
    third = process(label="engine 3")
    for made, table in ((second, [6, 7]), (third, [4, 5])):
        made.bytes |= dict(zip(table, (100, 200), strict=True))
        made.come("c", table, other)
        unverified, found = made.settled()
        assert (unverified, {v.written_request for v in found}) == (0, {"engine 1, request a"})


def test_believed_rows_that_are_stored_again_are_no_evidence(process):
    """Neither for their own tokens, nor against others with these bytes."""
    made = process()
    made.bytes |= {4: 900, 5: 901, 6: 900, 7: 901}
    made.come("b", [4, 5], [99, *TOKENS[1:]])
    made.leave("b", [4, 5], keys=[1, 2])
    made.settled()
    made.come("c", [6, 7], [99, *TOKENS[1:]], keys=[1, 2])
    assert made.settled() == (16, [])
    made.come("d", [6, 7], TOKENS)
    assert made.settled() == (24, [])


@pytest.mark.parametrize("copied", ["doubtful", "over"])
def test_doubt_goes_with_the_rows_of_a_block_that_is_copied(process, copied):
    """Bytes that were believed once say nothing, wherever they lie; what is copied over is gone."""
    made = process()
    made.bytes |= {1: 100, 2: 200, 3: 300, 4: 900, 5: 901, 6: 100, 7: 200, 8: 900, 9: 901}
    made.come("b", [4, 5], [99, *TOKENS[1:]])
    made.admit("a", TOKENS)
    made.ledger.hand_out("group.0", [1, 2, 3])
    made.write("a", [1, 2, 3], TOKENS)
    source, target = ([4, 5], [6, 7]) if copied == "doubtful" else ([1, 2], [4, 5])
    made.watch.change([], [], zip(source, target, strict=True))
    made.ledger.copy("group.0", source, target)
    for one, other in zip(source, target, strict=True):
        made.bytes[other] = made.bytes[one]
    made.leave("b" if copied == "doubtful" else "a", target, keys=[1, 2])
    before, _ = made.settled()
    place = [8, 9] if copied == "doubtful" else [6, 7]
    made.come("d", place, [99, *TOKENS[1:]] if copied == "doubtful" else TOKENS)
    assert made.settled() == (before + 8 * (copied == "doubtful"), [])


def test_a_block_that_was_believed_and_is_computed_later_is_remembered(process):
    made = process()
    made.bytes |= {4: 900, 5: 901, 6: 900, 7: 901}
    made.come("b", [4, 5], TOKENS)
    made.watch.change([], [("group.0", 4), ("group.0", 5)])
    made.ledger.hand_out("group.0", [4, 5])
    made.admit("e", TOKENS)
    made.write("e", [4, 5], TOKENS[:8])
    made.come("c", [6, 7], TOKENS)
    assert made.settled() == (8, [])


def test_a_block_that_spans_an_update_comes_back(process):
    """Its rows have two ages, and no entry has room for them: it is taken for right."""
    made = process(weights=None)
    made.bytes |= {1: 900, 2: 901, 4: 900, 5: 901}
    made.admit("a", TOKENS)
    made.ledger.hand_out("group.0", [1, 2])
    made.write("a", [1, 2], TOKENS[:6])
    made.ledger.new_epoch("target")
    made.write("a", [1, 2], TOKENS[6:8], first=6)
    made.leave("a", [1, 2], keys=[1, 2])
    made.come("b", [4, 5], TOKENS, keys=[1, 2])
    assert made.settled() == (4, [])


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
    made.watch._blocks.remember([Span("a", "group.0", [1, 2], 0)])
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
    made.watch._blocks.remember([Span("a", "group.0", [1, 2], 0)])
    assert made.thread.wait(LONG)
    made.come("b", [4, 5], TOKENS)
    assert made.settled() == (4, [])


@pytest.mark.parametrize("alike", [7, 12])
def test_more_prefixes_with_the_same_bytes_than_a_table_has_places_for(process, alike):
    """As of adapters that change nothing yet: what one of them has stored comes back to it."""
    made = process(weights=None)
    made.bytes |= {1: 100, 2: 200, 4: 100, 5: 200, 6: 100, 7: 200}
    for number in range(alike):
        made.admit("a", TOKENS, [number])
        made.ledger.hand_out("group.0", [1, 2])
        made.write("a", [1, 2], TOKENS[:8])
        made.leave("a", [1, 2])
    made.come("b", [4, 5], TOKENS, [0])
    unverified, found = made.settled()
    assert (found, unverified) == ([], 0 if alike == 7 else 8)
    made.come("c", [6, 7], TOKENS, [99])  # nobody's
    assert len(made.settled()[1]) == (2 if alike == 7 else 0)


def test_a_step_that_failed_fills_no_block(first):
    first.watch.restart()
    first.admit("e", TOKENS)
    first.tables["e"] = [[1, 2, 3]]
    rows = Rows(["e"], torch.tensor([0, 10]), torch.tensor([0]), torch.zeros(10), None, {},
                {"group.0": torch.tensor([[1, 2, 3]])})  # fmt: skip
    first.watch.forward(rows)
    first.watch.take_back()
    first.watch.end_step()
    assert len(first.watch._blocks._table) == 0
    first.watch.forward(rows)
    first.watch.end_step()
    assert len(first.watch._blocks._table) == 2


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


def test_a_store_that_hangs_is_waited_for_once(process, first, monkeypatch):
    """A server asks for its counters every few seconds, and no step runs while they wait."""
    may, patience = threading.Event(), []

    class Hanging(SqliteStore):
        def get(self, *asked):
            may.wait(LONG)
            return super().get(*asked)

    made = process(opens=lambda: Hanging(first.path))
    wait = made.thread.wait
    monkeypatch.setattr(made.thread, "wait", lambda some: patience.append(some) or wait(some / 100))
    made.bytes |= {4: 100, 5: 200}
    for name in "bcd":
        made.come(name, [4, 5], TOKENS)
        made.watch.settle()
    assert patience == [1.0, 0.0, 0.0]
    may.set()
    assert wait(LONG)
    made.watch.settle()
    made.come("b", [4, 5], TOKENS)
    made.watch.settle()
    assert patience[3:] == [0.0, 1.0]


def test_a_store_that_fails_is_not_waited_for(process, first, monkeypatch):
    class Failing(SqliteStore):
        def get(self, *asked):
            raise OSError("gone")

    patience = []
    made = process(opens=lambda: Failing(first.path))
    wait = made.thread.wait
    made.bytes |= {4: 100, 5: 200}
    for _ in range(2):
        made.come("b", [4, 5], TOKENS)
        assert wait(LONG)
        monkeypatch.setattr(made.thread, "wait", lambda some: patience.append(some) or wait(some))
        made.watch.settle()
    assert patience == [0.0, 0.0]


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
