"""What bytes of blocks are: noted behind a step, taken over when the device has got there."""

from __future__ import annotations

import attrs
import pytest
import torch
from kvtxn.integrations.serving.ledger import block_identities
from kvtxn.integrations.serving.ledger.block_identities import BlockIdentities, Span

from kvtxn.audit import Ledger, RowGroup

GROUP = RowGroup("group.0", 4, 12)
TOKENS = list(range(20, 32))


@attrs.define(eq=False)
class LateCopy:
    """A ``HostCopy`` that arrives when it is said to, or is waited for."""

    values: torch.Tensor
    ready: bool = False

    def wait(self):
        self.ready = True
        return self.values


class Rig:
    """A ledger with a request that wrote 12 rows into blocks 1, 2 and 3, and late copies."""

    def __init__(self, *others):
        groups = [GROUP, *others]
        self.ledger = Ledger(groups, max_requests=4, max_length=32)
        self.ledger.admit("a", TOKENS)
        self.ledger.hand_out("group.0", [1, 2, 3])
        self.ledger.import_rows("a", "group.0", [1, 2, 3], 0, 12)
        self.copies, self.told = [], []
        self.blocks = BlockIdentities(
            self.ledger, {each.name: 4 for each in groups}, self.checksums, copied=self.copied
        )

    def checksums(self, group, blocks):
        return torch.tensor([[100 * block, 5] for block in blocks])

    def copied(self, tensor):
        self.copies.append(LateCopy(tensor.clone()))
        return self.copies[-1]

    def remember(self, blocks, begin, describe=True, **more):
        self.blocks.remember([Span("a", "group.0", blocks, begin)], **more)
        if describe:
            self.blocks.describe()

    def then(self, span, known):
        """Note the blocks that are remembered."""
        self.told.append(
            {block for block, is_known in zip(span.blocks, known, strict=True) if is_known}
        )

    def lookup(self, block, group="group.0"):
        ((content),) = self.blocks.contents([(group, block)]).values()
        return self.blocks.lookup([content])[0]


@pytest.fixture
def rig():
    return Rig()


def test_a_step_does_not_wait(rig):
    """Not even the next one, as long as nobody asks what some bytes are."""
    rig.remember([1], 0, then=rig.then)
    rig.remember([2], 1, then=rig.then)
    assert rig.told == []
    rig.copies[1].ready = True
    rig.blocks.look()
    assert rig.told == []  # the first step is not there yet
    rig.copies[0].ready = True
    rig.blocks.look()
    assert rig.told == [{1}, {2}]


def test_who_asks_waits(rig):
    rig.remember([1, 2], 0)
    (known,) = rig.lookup(2)
    assert known.last == rig.ledger.expected("a", "group.0", 7, 8).item()
    assert rig.lookup(3) == []


def test_what_is_doubtful_is_so_from_the_beginning(rig):
    """Whatever is known of the block by the time it is taken over."""
    doubtful = {("group.0", 1)}
    rig.remember([1, 2], 0, doubtful=doubtful, then=rig.then)
    doubtful.clear()
    rig.blocks.settle()
    assert rig.told == [{2}]


def test_words_are_those_of_the_step(rig):
    """Rows that others write into the block later do not count, once it is described."""
    rig.remember([1], 0)
    rig.ledger.hand_out("group.0", [1])
    assert len(rig.lookup(1)) == 1
    rig.remember([1], 0, then=rig.then)
    rig.blocks.settle()
    assert rig.told == [set()]


def test_what_is_filled_beside_the_device_is_read_before(rig):
    """Also if it is described already: the device may not have got there. Others are not read."""
    rig.remember([1], 0, then=rig.then)
    rig.remember([2], 1, then=rig.then)
    rig.remember([3], 2, then=rig.then, describe=False)
    rig.blocks.finish({4})
    assert rig.told == []
    rig.blocks.finish({1})
    assert rig.told == [{1}]
    rig.blocks.finish({3})
    assert rig.told == [{1}, {2}, {3}]


def test_few_descriptions_are_under_way(rig, monkeypatch):
    """They take pinned memory; the oldest one is waited for."""
    monkeypatch.setattr(block_identities, "_UNDER_WAY", 3)
    for _ in range(5):
        rig.remember([1], 0)
    assert [copy.ready for copy in rig.copies] == [True, True, False, False, False]


def test_what_is_forgotten_is_not_taken_over(rig):
    rig.remember([1], 0, then=rig.then)
    rig.blocks.clear()
    assert (rig.lookup(1), rig.told) == ([], [])


def test_nothing_is_launched_for_nothing(rig):
    rig.remember([], 0, then=rig.then)
    rig.blocks.remember([])
    rig.blocks.end_step()
    assert (rig.copies, rig.told) == ([], [])


def test_blocks_of_several_steps_are_described_together(rig, monkeypatch):
    """Within a few steps, or as soon as they are many."""
    monkeypatch.setattr(block_identities, "_TOGETHER", 3)
    for block in (1, 2):
        rig.remember([block], block - 1, describe=False, then=rig.then)
        rig.blocks.end_step()
        assert rig.copies == []
        assert rig.blocks.will_describe([block, 9])
    rig.blocks.end_step()
    [copy] = rig.copies
    assert len(copy.values) == 2
    assert not rig.blocks.will_describe([1])
    copy.ready = True
    rig.blocks.end_step()
    assert rig.told == [{1}, {2}]
    rig.remember([3], 2, describe=False)
    rig.blocks.end_step()
    assert len(rig.copies) == 1  # the steps are counted anew
    monkeypatch.setattr(block_identities, "_AT_ONCE", 2)
    rig.remember([1], 0, describe=False)
    assert len(rig.copies[1].values) == 2


def test_groups_are_told_apart():
    """Blocks of several groups that wait in any order."""
    rig = Rig(RowGroup("group.1", 4, 12))
    rig.ledger.import_rows("a", "group.1", [5, 6], 0, 8)
    rig.blocks.remember([Span("a", "group.1", [5], 0)], then=rig.then)
    rig.blocks.remember(
        [Span("a", "group.0", [1], 0), Span("a", "group.1", [6, 9], 1)], then=rig.then
    )
    rig.blocks.settle()
    assert rig.told == [{1}, {5}, {6}]
    for group, block, at in (("group.0", 1, 3), ("group.1", 5, 3), ("group.1", 6, 7)):
        (known,) = rig.lookup(block, group)
        assert known.last == rig.ledger.expected("a", group, at, at + 1).item()
