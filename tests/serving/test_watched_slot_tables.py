"""A watch over an engine whose slots are data in one table, and whose drafts are trees."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Arrival, Changes, Room, Rows
from token_slots import CONTEXT, RUNNING, SLOTS, LosesMoves, MovesAnotherRow, TokenSlots

from kvtxn.audit import RowGroup

NAME = "group.0"


class Watched(TokenSlots):
    """Tells a watch what it would tell a ledger."""

    def __init__(self, seed) -> None:
        super().__init__([SimpleNamespace(line=lambda _: 0)], seed, "cpu")
        group, room = RowGroup(NAME, 1, SLOTS), Room(RUNNING, CONTEXT, caches_prefixes=True)
        self.watch = Watch({NAME: group}, room, 0, "log")
        self.gone, self.come = [], []

    def tell(self, call, *arguments, **named):
        getattr(self, f"tell_{call}")(*arguments, **named)

    def tell_admit(self, name, tokens):
        computed = self.running[-1].computed
        self.come.append(Arrival(name, list(tokens), [], {}, computed, [[]]))

    def tell_release(self, name):
        self.gone.append(name)

    def tell_write(self, step):
        number, names = len(step.lines) - 1, [each.name for each in self.running]
        rows = Rows(
            names,
            step.starts[: number + 1],
            step.positions[step.starts[:number]],
            step.tokens,
            step.drafts[:number],
            {NAME: step.slots["rows"]},
            {NAME: step.tables["rows"]},
            positions=step.positions,
            table_lines=step.table_lines[:number],
            parents=step.parents,
        )
        self.watch.change(Changes(self.gone, self.come, [[]], ()))
        self.gone, self.come = [], []
        self.watch.step(lambda: (rows, None), lambda name: pytest.fail(f"{name} is forgotten"))

    def tell_check(self, step):
        """The watch has done that."""

    def tell_resolve(self, accepted, sampled):
        self.watch.sampled(accepted[:-1] + 1, sampled[:-1])

    def tell_carry(self, copies):
        self.watch.hear(partial(carry, {NAME: copies["rows"]}))
        self.watch.end_step()


def carry(copies, watch):
    watch.ledger.carry(copies)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_alarm_is_false(seed):
    """Nor is one of a row that others can find, which is compared once more."""
    engine = Watched(seed)
    for _ in range(150):
        engine.step()
    watch = engine.watch
    assert not watch.stopped
    assert watch.report() == []
    assert engine.moved > 50
    assert watch.ledger.counters()["kvtxn_audit_rows_checked_total"] > 5000


@pytest.mark.parametrize("fault", [LosesMoves, MovesAnotherRow])
def test_a_lost_or_wrong_move_is_found(fault):
    engine = type(fault.__name__, (fault, Watched), {})(3)
    for _ in range(60):
        engine.step()
    wrong = {each[1:4] for each in engine.wrong}
    found = {(v["request"], v["position"], v["slot"]) for v in engine.watch.report()}
    assert found
    assert found <= wrong
