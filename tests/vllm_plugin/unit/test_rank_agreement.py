"""Ranks end each step of the audit alike: whatever one of them meets, no other one waits for it.

Two ranks run in threads here, with collectives that fail a test which waits for long.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger.violation_log import AuditError
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Arrival, Changes, Room, Rows

from kvtxn import ConfigError
from kvtxn.audit import Key, RowGroup

GROUP = RowGroup("group.0", 4, 12, pool="blocks")
TOKENS = list(range(20, 36))


class World:
    """Collectives of some threads, each of which is a rank; see ``Ranks``."""

    def __init__(self, number=2):
        self.number, self.met = number, 0
        self._barrier, self._own, self._values = Barrier(number), local(), [None] * number

    def of_all(self, value):
        self._values[self._own.rank] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        self.met += 1
        return found

    def own_number(self):
        return self._own.rank

    def highest(self, level, *, stages):
        return max(self.of_all(level))

    def run(self, work):
        """Run a function on each rank; returns their results, exceptions included."""

        def on(rank):
            self._own.rank = rank
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(on, range(self.number)))


@pytest.mark.parametrize("name", ["layers", "group", "group.", "group.x", "rows.0", "group.-1"])
def test_a_group_without_a_number_is_refused(name):
    room = Room(2, 64, caches_prefixes=False)
    with pytest.raises(ConfigError, match=r"expected group\.0, group\.1 and so on, got"):
        Watch({name: attrs.evolve(GROUP, name=name)}, room, 0, "log")


class Rank:
    """A rank's watch and its steps of one request: each writes a row and reads all before it."""

    def __init__(self, world, key, on_violation="log"):
        room = Room(2, 4096, caches_prefixes=False)
        self.watch = Watch({"group.0": GROUP}, room, 0, on_violation, key=key, ranks=world)
        self.first = 0

    def step(self, *, fails=False, loses=False):
        """Tell the watch of a step, and end it.

        Args:
            fails: the audit's own code raises.
            loses: the step's row is written elsewhere, so what is read in its place is wrong.
        """
        watch, first = self.watch, self.first % 12
        if first == 0:
            gone = ["a"] if self.first else []
            watch.change(
                Changes(gone, [Arrival("a", TOKENS[:12], [], {}, 0, [[1, 2, 3]])], [[]], ())
            )
        self.first += 1
        if not watch.stopped:
            try:
                if fails:
                    raise MemoryError("planted")
                slot = 40 if loses else 4 + first
                rows = Rows(
                    *(["a"], torch.tensor([0, 1]), torch.tensor([first])),
                    *(torch.tensor([TOKENS[first]]), None, {"group.0": torch.tensor([slot])}),
                    {"group.0": torch.tensor([[1, 2, 3]], dtype=torch.int32)},
                )
                watch.step(lambda: (rows, None), lambda name: pytest.fail(name))
                watch.sampled(torch.tensor([int(first == 11)]), torch.tensor([[TOKENS[12]]]))
            except Exception as error:
                watch.stop(error)
        return watch.end_step()


def two(on_violation="log"):
    """Two ranks, and their collectives."""
    world, key = World(), Key.new()
    return world, [Rank(world, key, on_violation) for _ in range(2)]


@pytest.mark.parametrize("after", [1, 150, 205])
@pytest.mark.parametrize("on_violation", ["log", "contain", "raise"])
def test_an_audit_that_fails_on_one_rank_ends_on_all(lines, after, on_violation):
    world, both = two(on_violation)

    def work(rank):
        for number in range(1, 420):
            both[rank].step(fails=rank == 1 and number == after)
        return both[rank].watch.counters()["kvtxn_audit_active"]

    assert world.run(work) == [0, 0]
    assert sum("audit_inactive" in line for line in lines) == 2
    assert sum("planted" in line for line in lines) == 2
    assert both[0].watch.report() == []  # nobody meets any more


@pytest.mark.parametrize("part", ["copy_counters", "fingerprints", "compare_ranks"])
def test_a_comparison_that_fails_on_one_rank_ends_the_audit_on_all(monkeypatch, lines, part):
    world, both = two()

    def fail(*args):
        raise MemoryError("planted")

    monkeypatch.setattr(both[1].watch.ledger, part, fail)

    def work(rank):
        for _ in range(420):
            both[rank].step()
        return both[rank].watch.counters()["kvtxn_audit_active"]

    assert world.run(work) == [0, 0]


@pytest.mark.parametrize("part", ["ledger.violations", "found.take_report"])
@pytest.mark.parametrize("on_violation", ["log", "contain", "raise"])
def test_an_error_at_the_end_of_a_step_ends_the_audit_on_all(
    monkeypatch, lines, part, on_violation
):
    """A rank that fails there meets the others all the same."""
    world, both = two(on_violation)
    owner, name = part.split(".")

    def fail(*args, **kwargs):
        raise MemoryError("planted")

    monkeypatch.setattr(getattr(both[1].watch, owner), name, fail)

    def work(rank):
        for _ in range(420):
            both[rank].step()
        return both[rank].watch.counters()["kvtxn_audit_active"]

    assert world.run(work) == [0, 0]


@pytest.mark.parametrize("part", ["ledger.counters", "ledger.violations"])
def test_an_error_while_one_rank_answers_ends_the_audit_on_all(monkeypatch, lines, part):
    """It is asked and answers what it knows; the others hear of it when the ranks meet next."""
    world, both = two()
    owner, name = part.split(".")

    def fail(*args, **kwargs):
        raise MemoryError("planted")

    def work(rank):
        watch = both[rank].watch
        both[rank].step()
        if rank == 1:
            monkeypatch.setattr(getattr(watch, owner), name, fail)
        return watch.report(), watch.counters() and watch.counters()["kvtxn_audit_active"]

    assert world.run(work) == [([], 0), ([], 0)]


def test_an_error_that_one_rank_meets_when_it_is_asked_ends_the_audit_on_all(lines):
    """Counters and reports make the ranks meet, whether there were steps since or not."""
    world, both = two()

    def work(rank):
        both[rank].step(fails=rank == 1)
        first = both[rank].watch.counters()["kvtxn_audit_active"]
        both[rank].watch.report()
        return first, both[rank].watch.counters()["kvtxn_audit_active"]

    assert world.run(work) == [(0, 0), (0, 0)]
    assert world.met == 2  # once, on two ranks


@pytest.mark.parametrize("loser", [0, 1])
def test_all_ranks_raise_in_the_same_step(lines, loser):
    world, both = two("raise")

    def work(rank):
        for number in range(1, 8):
            try:
                both[rank].step(loses=rank == loser and number == 3)
            except AuditError as error:
                return number, str(error)
        return None

    (first, why), (second, also) = world.run(work)
    assert first == second == 3
    assert why == also
    assert "unwritten" in why


@pytest.mark.parametrize("loser", [0, 1])
def test_all_ranks_contain_what_one_of_them_read(lines, loser):
    world, both = two("contain")

    def work(rank):
        return [both[rank].step(loses=rank == loser and number == 3) for number in range(1, 6)]

    first, second = world.run(work)
    assert first == second
    assert [wrong and {*wrong.requests} for wrong in first] == [None, None, {"a"}, None, None]


def test_ranks_that_wrote_other_rows_are_found_out(lines):
    world, both = two()

    def work(rank):
        for number in range(1, 210):
            both[rank].step(loses=rank == 1 and number == 100)
        return [each["kind"] for each in both[rank].watch.report()]

    first, second = world.run(work)
    assert "ranks" in first
    assert "ranks" in second


def test_ranks_that_nobody_asks_together_do_not_wait_for_each_other(lines):
    """Where ranks are launched from outside, one of them alone may be asked."""
    world, both = two()

    def work(rank):
        watch = both[rank].watch
        watch.asks_peers = False
        both[rank].step()
        return watch.counters()["kvtxn_audit_active"] if rank == 0 else None

    assert world.run(work) == [1, None]
    assert world.met == 0


def test_a_rank_that_is_gone_ends_the_audit_of_the_others(monkeypatch, lines):
    world, both = two("contain")

    def gone(*args, **kwargs):
        raise RuntimeError("connection closed by peer")

    def work(rank):
        both[rank].step()
        if rank == 1:
            return None
        monkeypatch.setattr(world, "highest", gone)
        both[rank].step()
        return both[rank].step(), both[rank].watch.counters()["kvtxn_audit_active"]

    assert world.run(work)[0] == (None, 0)
    assert sum("connection closed" in line for line in lines) == 1
