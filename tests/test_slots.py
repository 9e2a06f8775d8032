"""Slot mappings: shapes, ranges, padding, groups, and when they may come."""

from __future__ import annotations

import pytest
import torch
from small_caches import changed_slots, copies, make_layers, rows

from kvtxn import CapacityError, SlotMappingError, TransactionManager, TxnConfig


@pytest.fixture
def manager(layers):
    return TransactionManager(layers, TxnConfig(policy="deferred", max_rows=12))


@pytest.mark.parametrize(
    ("draft_len", "slots", "settled", "message"),
    [
        (2, [0, 1, 2, 3], 1, "whole number of requests"),
        ([2, 2], [0, 1, 2, 3, 4], 1, "do not fit the rows"),
        ([2], [0, 1, 2], [1, 1], "settled.*1 ints, one per request, got 2"),
        (-1, [0], 1, "at least 0"),
        ([1, -2], [0, 1], 1, "at least 0"),
        (1.5, [0, 1], 1, "draft_len"),
        ([1.5], [0, 1], 1, "draft_len"),
        ("2", [0, 1, 2], 1, "draft_len"),
        (True, [0, 1], 1, "draft_len"),
        (1, [0, 24], 1, "outside its cache.*23.*got 24"),
        (1, [0, -2], 1, "outside its cache"),
        (2, [5, 3, 5], 1, "two rows to one slot.*slot 5 2 times"),
        (0, [1], 0, "whole number"),
        (torch.tensor([1.0]), [0, 1], 1, "draft_len"),
        (
            torch.tensor([[1, 1]]),
            [0, 1],
            1,
            r"one int per request, got \[\[1, 1\]\]; pass draft_len as",
        ),
        (1, [0, 1], -1, "settled is not valid.*pass settled as"),
    ],
)
def test_misfits_are_refused(manager, draft_len, slots, settled, message):
    """Before any layer is staged, and the manager is free for the next window."""
    with pytest.raises(SlotMappingError, match=message):
        manager.window(draft_len, torch.tensor(slots), settled=settled)
    assert manager.current is None
    manager.window(1, torch.tensor([0, 1])).abort()


@pytest.mark.parametrize(
    "slots",
    [torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), torch.tensor([0, 1]).to(torch.int16)],
)
def test_malformed_slots_are_refused(manager, slots):
    """int32 or int64, one dimension."""
    with pytest.raises(SlotMappingError, match="malformed"):
        manager.window(1, slots)


def test_capacity(manager):
    """max_rows sizes every buffer, so it is a limit and not a hint."""
    with pytest.raises(CapacityError, match=r"max_rows=12, got 13"):
        manager.window([12], torch.arange(13))
    manager.window([11], torch.arange(12)).abort()


@pytest.mark.parametrize("spelling", [torch.int64, torch.int32, list, torch.Size])
def test_spellings_of_draft_len_and_slots(manager, layers, stage_all, spelling):
    """Tensors of ints, lists and tuples mean the same."""
    before = copies(layers)
    make = (lambda v: torch.tensor(v, dtype=spelling)) if "torch.int" in str(spelling) else spelling
    with manager.window(make([1, 2]), make([4, 5, 8, 9, 10])) as w:
        stage_all(w, layers)
        w.commit(make([1, 1]))
    assert changed_slots(layers, before) == [{4, 5, 8, 9}] * 6


def test_slots_may_come_with_the_first_stage(manager, layers, stage_all):
    """The number of rows is then known from there."""
    before = copies(layers)
    with manager.window(1) as w:
        assert w.num_rows is None
        with pytest.raises(SlotMappingError, match="no slot mapping"):
            w.stage(layers[0], *rows(2))
        w.stage(layers[0], *rows(2), torch.tensor([3, 4]))
        assert w.num_rows == 2
        stage_all(w, layers[1:])
        w.commit(1)
    assert changed_slots(layers, before) == [{3, 4}] * 6


def test_a_window_knows_its_rows_as_soon_as_they_follow(manager):
    """From one int per request, or from the slots; not from one int for all."""
    for draft_len, slots, known in (([2, 1], None, 5), (2, None, None), (2, [0, 1, 2], 3)):
        w = manager.window(draft_len, slots)
        assert w.num_rows == known
        w.abort()


def test_one_tensor_for_two_groups_is_refused():
    """The group that it would be for is not a thing to guess."""
    manager = TransactionManager(make_layers(2, groups=("a", "b")))
    with pytest.raises(SlotMappingError, match="several groups"):
        manager.window(1, torch.tensor([1, 2]))
    with pytest.raises(SlotMappingError, match="no layer is in group 'c'"):
        manager.window(1, {"c": torch.tensor([1, 2])})
    with pytest.raises(SlotMappingError, match="do not fit the rows"):
        manager.window(1, {"a": torch.tensor([1, 2]), "b": torch.tensor([1, 2, 3, 4])})


def test_the_caller_who_writes_must_name_every_group():
    """There is no staging at which slots could still come."""
    layers = make_layers(2, groups=("a", "b"))
    manager = TransactionManager(layers, TxnConfig(policy="undo"))
    with pytest.raises(SlotMappingError, match="group 'b' has no slot mapping"):
        manager.window(1, {"a": torch.tensor([1, 2])}, written_by="caller")
    assert manager.current is None
