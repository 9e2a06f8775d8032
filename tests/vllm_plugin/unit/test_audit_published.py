"""Blocks that are checked when they fill, in groups whose requests give blocks back."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.ledger.step_forms import PublishedBlocks, not_left
from kvtxn.integrations.serving.step import Arrival

from kvtxn.audit import Ledger, RowGroup, Step

TOKENS = list(range(20, 33))


class Blocks:
    """A request "a" of chunks of 8 positions, or of a window, in blocks of 4."""

    def __init__(self, way, **reach):
        self.group = RowGroup("group.0", 4, 12, pool="blocks", **reach)
        self.ledger = Ledger([self.group], max_requests=4, max_length=32)
        self.ledger.admit("a", TOKENS[:7])
        self.line = self.ledger.line("a")
        self.way = PublishedBlocks(self.ledger, [self.group], None if way == "cpu" else 1)
        self.way.begin([self.line], [Arrival("a", TOKENS[:7], [], {}, 0, [[]])])

    def step(self, first, end, table, drafts=0, kept=0):
        """Write positions, the last ones of which are drafts; so many are accepted."""
        positions = torch.arange(first, end)
        slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
        step = Step(
            lines=torch.tensor([self.line]), starts=torch.tensor([0, end - first]),
            first=torch.tensor([first]), tokens=torch.tensor(TOKENS[first:end]),
            drafts=torch.tensor([drafts]), slots={"group.0": slots},
            tables={"group.0": torch.tensor([table])},
        )  # fmt: skip
        self.ledger.write_and_check(step)
        self.way.publish(step)
        ids = torch.tensor([TOKENS[end - drafts : end - drafts + kept + 1]])
        self.ledger.resolve(torch.tensor([kept + 1]), ids, besides=1)

    def found(self):
        return [(v.kind, v.found, v.position) for v in self.ledger.violations()]


@pytest.mark.parametrize("way", ["cpu", "gpu"])
@pytest.mark.parametrize("reach", [{"chunk": 8}, {"window": 1}])
def test_a_block_that_left_with_its_chunk_is_nobody_s_any_more(way, reach):
    """Its last row was an accepted draft's; the request's next block is the same one."""
    blocks = Blocks(way, **reach)
    blocks.ledger.hand_out("group.0", [1, 2])
    blocks.step(0, 8, [1, 2], drafts=1, kept=1)
    blocks.ledger.hand_out("group.0", [2])
    blocks.step(8, 9, [1, 2, 2])
    assert blocks.found() == []


@pytest.mark.parametrize("way", ["cpu", "gpu"])
@pytest.mark.parametrize("reach", [{"chunk": 8}, {"window": 1}])
def test_a_block_that_stays_is_checked(way, reach):
    """Its first three rows are gone when the fourth one fills it."""
    blocks = Blocks(way, **reach)
    blocks.ledger.hand_out("group.0", [1, 2])
    blocks.step(0, 3, [1, 2])
    blocks.ledger.hand_out("group.0", [1])
    blocks.step(3, 4, [1, 2])
    assert ("published", "unwritten", 0) in blocks.found()
    assert blocks.ledger.counters()["kvtxn_audit_violations_total_published"] == 1


def test_where_a_request_still_has_blocks():
    begin, first = torch.tensor([0, 4, 12]), torch.tensor([7, 8, 17])
    at = RowGroup("group.0", 4, 12)
    assert not_left(at, first, begin).tolist() == [0, 4, 12]
    assert not_left(RowGroup("g", 4, 12, chunk=8), first, begin).tolist() == [0, 8, 16]
    assert not_left(RowGroup("g", 4, 12, window=6), first, begin).tolist() == [0, 4, 12]
    assert not_left(RowGroup("g", 4, 12, window=2), first, begin).tolist() == [4, 4, 16]
