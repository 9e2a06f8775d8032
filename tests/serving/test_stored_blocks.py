"""Blocks that a connector stores are read some steps later, but before the next thing changes."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.ledger.handed_blocks import Handed, Transfers
from kvtxn.integrations.serving.ledger.transfers import TransferWatch
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import NO_CHANGES, Arrival, Changes, Room
from watched_rows import GROUP, TOKENS, rows_in_blocks

from kvtxn.audit.weights import WeightWatch


class Engine:
    """A watch over a request that wrote 8 rows, which a connector has stored in the last step."""

    def __init__(self):
        self.watch = Watch({"group.0": GROUP}, Room(1, 32, False), 0, "log", lines=2)
        self.bytes = {block: block for block in range(12)}
        ledger, tables = self.watch.ledger, {"a": [[1, 2, 3]]}
        self.transfers = self.watch.transfers = TransferWatch(
            ledger, {"group.0": GROUP}, {}, lambda told: told, lambda told: [], self.checksums,
            tables.__getitem__, self.watch.stop,
        )  # fmt: skip
        weights = torch.nn.Linear(2, 2)
        self.watch.weights = WeightWatch(ledger, {"target": weights.parameters})
        self.step(changes([arrival("a", [1, 2, 3])]), rows_in_blocks("a", 0, 8, [1, 2, 3]))
        self.transfers.begin(told(stores=[Handed("group.0", [1, 2], 0, "a")]))
        self.step(NO_CHANGES, rows_in_blocks("a", 8, 9, [1, 2, 3]))
        assert self.known() == 0

    def checksums(self, group, blocks):
        return torch.tensor([[self.bytes[block], 5] for block in blocks])

    def step(self, changes, of):
        self.watch.change(changes)
        self.watch.step(lambda: (of, None), lambda name: pytest.fail(name))
        self.transfers.end()
        self.watch.end_step()
        assert not self.watch.stopped

    def known(self):
        """The number of blocks whose bytes were read."""
        self.transfers._blocks.look()
        return len(self.transfers._blocks._table)


def told(stores=(), loads=(), nameless=(), opaque=False):
    return Transfers([*stores], [*loads], [*nameless], opaque=opaque)


def arrival(name, table):
    return Arrival(name, TOKENS[:9], [], {}, 0, [table])


def changes(arrivals=(), grown=()):
    return Changes((), arrivals, grown, ())


@pytest.fixture
def engine():
    return Engine()


def test_before_a_block_is_handed_out(engine):
    engine.watch.change(changes(grown=[[4]]))
    assert engine.known() == 0  # another block
    engine.watch.change(changes(grown=[[2]]))
    assert engine.known() == 2
    engine.bytes |= {2: 0, 9: 2}  # new rows in the block, its old ones elsewhere
    [(_, known)] = engine.transfers._known_of([("group.0", 9)]).values()
    assert [each.last for each in known] == [*engine.watch.ledger.expected("a", "group.0", 7, 8)]


@pytest.mark.parametrize(
    ("nothing", "filled"),
    [
        (told(nameless=[4]), told(nameless=[4, 2])),
        (
            told(loads=[Handed("group.0", [4], 0, "b")]),
            told(loads=[Handed("group.0", [4, 2], 0, "b")]),
        ),
    ],
)
def test_before_a_connector_fills_a_block(engine, nothing, filled):
    """The ledger does not hear of the block, if its request still waits."""
    engine.transfers.begin(nothing)
    assert engine.known() == 0
    engine.transfers.begin(filled)
    assert engine.known() == 2


def test_at_once_and_with_the_step_if_nobody_says_what_is_filled(engine):
    """Those that were stored before, as of a request that the step puts back, may be filled now."""
    engine.transfers.begin(told(opaque=True))
    assert engine.known() == 2
    engine.bytes[2] = 20
    engine.transfers.begin(told(stores=[Handed("group.0", [2], 1, "a")], opaque=True))
    assert engine.known() == 2
    engine.step(NO_CHANGES, rows_in_blocks("a", 8, 9, [1, 2, 3]))
    assert engine.known() == 3


def test_before_layers_that_are_not_watched_get_a_block(engine):
    """They have blocks of the same pool, and the ledger is not told of them."""
    engine.watch.change(changes(grown=[[], [4]]))
    assert engine.known() == 0
    engine.watch.change(changes(grown=[[], [2]]))
    assert engine.known() == 2


def test_before_the_engine_fills_a_block_with_zeros(engine):
    engine.transfers.before_overwritten([4])
    assert engine.known() == 0
    engine.transfers.before_overwritten([4, 2])
    assert engine.known() == 2


def test_never_once_the_audit_has_ended(engine):
    """The caches may be gone by then, though counters are still asked for."""
    engine.watch.stop(RuntimeError("planted"))
    engine.transfers._blocks._checksums = lambda *_: pytest.fail("a cache was read")
    engine.transfers.tell(lambda: pytest.fail("a connector was heard"))
    engine.watch.counters()
    engine.watch.report()
    assert engine.known() == 0


def test_before_a_request_comes(engine):
    """The ledger may give it the line of one that has ended, whose tokens it then forgets."""
    engine.watch.change(changes([arrival("b", [5, 6, 7]), arrival("c", [8, 9, 10])]))
    assert "a" not in engine.watch.ledger
    assert engine.known() == 2


@pytest.mark.parametrize("how", ["epoch", "report", "steps"])
def test_before_weights_change_or_somebody_asks_or_many_steps_go_by(engine, how):
    if how == "epoch":
        engine.watch.weights.changed()
        engine.watch.change(NO_CHANGES)
    elif how == "report":
        engine.watch.report()
    else:
        for _ in range(6):  # two have gone by
            assert engine.known() == 0
            engine.watch.change(NO_CHANGES)
            engine.watch.end_step()
    assert engine.known() == 2
