"""What is told of blocks that leave or come together: each by itself, and of no other one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.serving.ledger.handed_blocks import Handed
from transfer_rig import ROWS, TOKENS, come, kinds, load, rig, scheduled, slots, state_of

from kvtxn.audit import Step

__all__ = ["rig"]

OTHERS = list(range(40, 52))


def step_of(rig, name, first, tokens, table):
    """Rows of a request that a step computes, in the blocks of its table."""
    at = torch.arange(first, first + len(tokens))
    return Step(
        lines=torch.tensor([rig.ledger.line(name)]), starts=torch.tensor([0, len(tokens)]),
        first=torch.tensor([first]), tokens=torch.tensor(tokens),
        slots={"group.0": slots(table)[at]}, tables={"group.0": torch.tensor([table])},
    )  # fmt: skip


@pytest.fixture
def strange(rig):
    """The rig, with a request "z" that has other rows in blocks 8 and 9."""
    rig.ledger.admit("z", OTHERS)
    rig.ledger.hand_out("group.0", [8, 9])
    rig.ledger.write(step_of(rig, "z", 0, OTHERS[:8], [8, 9]))
    return rig


def told(rig):
    return [(each.kind, each.position, each.block) for each in rig.ledger.violations()]


def test_a_wrong_block_that_comes_hides_none_after_it(strange):
    """The next step compares them, as if they had come one by one."""
    spans = Handed("group.0", [1, 2], 0, "a"), Handed("group.0", [8, 9], 0, "z")
    strange.watch._export(spans)
    strange.ledger.hand_out("group.0", [7])
    come(strange, "b", [5, 6], TOKENS[:9], load(strange, 5, 6))
    strange.cache[5], strange.cache[6] = strange.cache[8], strange.cache[2]
    strange.watch.forward(ROWS)
    assert told(strange) == [("imported", 0, 5)]
    strange.ledger.write_and_check(step_of(strange, "b", 8, [TOKENS[8]], [5, 9, 7]))
    assert told(strange) == [("foreign", 4, 9)]
    assert kinds(strange) == []


def test_a_wrong_block_that_leaves_hides_none_after_it(strange):
    strange.ledger.copy("group.0", [8], [1])
    strange.watch._export([Handed("group.0", [1, 2], 0, "a")])
    assert told(strange) == [("exported", 0, 1)]
    strange.ledger.write_and_check(step_of(strange, "a", 8, [TOKENS[8]], [1, 9, 3]))
    assert told(strange) == [("foreign", 0, 1), ("foreign", 4, 9)]


def test_each_wrong_block_is_told_of(strange):
    """In the order of their positions; of several requests at once, too."""
    strange.ledger.copy("group.0", [8, 1], [2, 9])
    strange.watch._export([Handed("group.0", [1, 2], 0, "a"), Handed("group.0", [8, 9], 0, "z")])
    assert told(strange) == [("exported", 4, 2), ("exported", 4, 9)]


def test_several_spans_of_a_request_leave_at_once(strange):
    """As blocks beside a gap do, and blocks that two connectors store."""
    strange.runner.kvtxn_requests.hear(scheduled(new=[("z", state_of([8, 9], OTHERS))]))
    strange.ledger.copy("group.0", [8], [2])
    spans = [Handed("group.0", [block], at, "a") for at, block in enumerate([1, 2])]
    strange.watch._export([*spans, Handed("group.0", [9], 1, "z"), spans[1]])
    assert told(strange) == [("exported", 4, 2)] * 2


def test_tensors_of_stretches_begin_where_triton_compiles_nothing_anew(rig, monkeypatch):
    """However many blocks there are: at whole 16 bytes, as the tensors of steps do."""
    looked, inspect = [], rig.ledger.passes.inspect
    monkeypatch.setattr(
        rig.ledger.passes, "inspect", lambda each: (looked.append(each), inspect(each))
    )
    for blocks in ([1], [1, 2]):
        rig.watch._export([Handed("group.0", blocks, 0, "a")])
        rig.ledger.import_rows("a", "group.0", [1, 2, 3], 0, 4 * len(blocks))
    assert [each.kind for each in looked] == ["exported", "imported"] * 2
    for each in looked:
        tensors = each.lines, each.first, each.end, each.table_lines
        assert not any(tensor.data_ptr() % 16 for tensor in tensors)
    assert kinds(rig) == []


@pytest.mark.parametrize("again", [False, True], ids=["waits", "has come again"])
def test_blocks_that_a_request_had_before_it_was_put_back_are_others(strange, again):
    """If it finds one in the prefix cache when it comes again, that one has other rows."""
    requests = strange.runner.kvtxn_requests
    strange.ledger.copy("group.0", [8], [1])
    others = state_of([1, 9], OTHERS)
    requests.hear(scheduled(preempted={"a"}, new=[("z", others)]))
    if again:
        requests.hear(scheduled(resumed=[("a", ([1, 5, 6],))]))
    strange.watch.begin(SimpleNamespace(store_gpu_blocks=[1], load_gpu_blocks=[]))
    strange.watch.end()
    assert told(strange) == [("exported", 0, 1)] * again


@pytest.mark.parametrize("wrong", [False, True])
def test_blocks_of_a_request_that_ended_are_compared_when_they_leave(strange, wrong):
    """A connector stores them while they wait to be evicted, or once the request is over."""
    strange.runner.kvtxn_requests.hear(scheduled(gone=["a"]))
    strange.ledger.copy("group.0", [8], [1] if wrong else [3])
    strange.watch.begin(SimpleNamespace(store_gpu_blocks=[1, 2], load_gpu_blocks=[]))
    strange.watch.end()
    assert told(strange) == [("exported", 0, 1)] * wrong
