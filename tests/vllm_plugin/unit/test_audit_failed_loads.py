"""Loads that fail: vLLM drops what their step computed, so it counts as never read."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.ledger.violation_log import AuditError
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import Arrival, Changes, Room, Rows
from watched_rows import GROUP, TOKENS, forward, rows_in_blocks


class Loads:
    """The transfers of a connector that loads blocks for request "a", of which it says later."""

    dropped = 0

    def __init__(self, ledger):
        self.ledger, self.failed, self.names = ledger, [], []
        self.loads, self.unsettled = False, False

    def before_change(self, others, handed_out):
        """Read nothing: no block waits for it."""

    def change(self, arrivals, handed_out, copies=()):
        self.loads = any(each.name == "a" for each in arrivals)

    def forward(self, rows):
        if self.loads:
            nothing = torch.zeros(8, dtype=torch.int64)  # what was stored had no row
            self.ledger.import_rows("a", "group.0", [1, 2, 3], 0, 8, nothing)
            self.loads, self.unsettled = False, True

    def end_step(self):
        """Remember nothing."""

    settle = take_back = end_step

    def take_failed(self):
        found, self.failed, self.unsettled = (self.names, self.failed), [], False
        return found


def arrival(name, table, computed):
    return Arrival(name, TOKENS[:9], [], {}, computed, [table])


def loaded(failed, on_violation="log"):
    """A watch after the step in which "a" reads two blocks; these could not be loaded."""
    watch = Watch({"group.0": GROUP}, Room(2, 32, caches_prefixes=True), 0, on_violation)
    watch.transfers = Loads(watch.ledger)
    watch.change(Changes((), [arrival("a", [1, 2, 3], 8)], [[]], ()))
    forward(watch, rows_in_blocks("a", 8, 9, [1, 2, 3]))
    watch.transfers.names, watch.transfers.failed = ["a"] if failed else [], failed
    watch.sampled(torch.tensor([1]), torch.tensor([[77]]))
    watch.end_step()
    return watch


def violations(watch):
    counters = watch.counters()
    found = [(v["kind"], v["request"], v["slot"]) for v in watch.report()]
    assert counters["kvtxn_audit_violations_total"] == len(found)
    return found


def test_a_load_that_is_said_to_have_failed_is_no_violation(lines):
    """The request returns with the tokens that it has, and computes the rows itself."""
    watch = loaded([1, 2])
    asked = []

    def returning(name):
        asked.append(name)
        return arrival(name, [1, 2, 3], 0)

    watch.change(Changes((), (), [[]], ()))
    forward(watch, rows_in_blocks("a", 0, 9, [1, 2, 3]), returning)
    watch.sampled(torch.tensor([1]), torch.tensor([[TOKENS[9]]]))
    watch.change(Changes((), (), [[]], ()))
    forward(watch, rows_in_blocks("a", 9, 10, [1, 2, 3]))
    assert asked == ["a"]
    assert violations(watch) == []
    assert lines == []


def test_a_load_that_nobody_calls_failed(lines):
    """What it brought is wrong, and said once, when the connector could have told of it."""
    watch = loaded([])
    assert len(lines) == 2
    assert violations(watch) == [("imported", "a", 4), ("imported", "a", 8)]


def test_one_block_of_two(lines):
    assert violations(loaded([2])) == [("imported", "a", 4)]


def test_others_that_read_the_blocks_are_told_of(lines):
    """They stay in the prefix cache, and their request was to compute them."""
    watch = loaded([1, 2])
    watch.change(Changes(["a"], [arrival("b", [1, 2, 4], 8)], [[]], ()))
    forward(watch, rows_in_blocks("b", 8, 9, [1, 2, 4]))
    assert violations(watch) == [("unwritten", "b", 4), ("unwritten", "b", 8)]


def test_raise_waits_until_it_is_known(lines):
    with pytest.raises(AuditError, match="imported"):
        loaded([], "raise")
    loaded([1, 2], "raise")


@pytest.mark.parametrize("record", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("wrong", [0, 1], ids=["right", "wrong"])
def test_positions_before_the_first_are_left_out(lines, wrong, record):
    """A connector brings fewer than no tokens for "b"; of "c" all is compared."""
    watch = Watch({"group.0": GROUP}, Room(2, 32, caches_prefixes=True), 0, "log", record=record)
    watch.transfers = Loads(watch.ledger)
    watch.change(Changes((), [arrival("b", [1, 2, 4], 0), arrival("c", [5, 6, 7], 0)], [[]], ()))
    both = Rows(
        ["b", "c"], torch.tensor([0, 6, 11]), torch.tensor([-5, 0]),
        torch.tensor([0] * 6 + TOKENS[wrong : 5 + wrong]), None,
        {"group.0": torch.tensor([0] * 6 + [20, 21, 22, 23, 24])},
        {"group.0": torch.tensor([[1, 2, 4], [5, 6, 7]], dtype=torch.int32)},
    )  # fmt: skip
    forward(watch, both)
    watch.sampled(torch.tensor([1, 0]), torch.tensor([[77], [-1]]))
    watch.change(Changes(["b"], (), [[]], ()))
    forward(watch, rows_in_blocks("c", 5, 9, [5, 6, 7]))
    watch.sampled(torch.tensor([1]), torch.tensor([[TOKENS[9]]]))
    assert watch.counters()["kvtxn_audit_unjudged_total_malformed"] == 1
    blocks = [("c", 20), ("c", 24)] if wrong else []
    read, published = ([(kind, *each) for each in blocks] for kind in ("foreign", "published"))
    assert violations(watch) == [*read, *published]
    assert len(lines) == len([*read, *published])
