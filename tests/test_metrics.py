"""Counters: draft rows once per window, bytes by policy, everything adds up."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from small_caches import HEAD_SIZE, HEADS, rows

from kvtxn import TransactionManager, TxnConfig
from kvtxn.layout import RowLayout
from kvtxn.metrics import FAMILIES

ROW_BYTES = 2 * HEADS * HEAD_SIZE * 4


def run(manager, layers, accepted):
    with manager.window(2, torch.tensor([0, 1, 2, 10, 11, -1])) as w:
        for ref in layers:
            w.stage(ref, *rows(6))
        w.abort() if accepted is None else w.commit(accepted)


def captured_windows(manager, layers, *, spare):
    """Windows whose drafts wait in tensors of their own, or in spare slots of an engine's."""

    def given():
        return torch.zeros(manager.config.max_rows, HEADS, HEAD_SIZE)

    rows = {ref.name: (given(), given()) for ref in layers} if spare else None
    return manager.captured_windows(torch.tensor([[0, 1, 2, 10, 11, -1]]), rows)


def run_captured(windows, accepted):
    """One window, of the same shape as ``run``'s."""
    window = windows.begin(windows.plan(RowLayout.build((2, 2), (1, 1), torch.device("cpu"))))
    window.abort() if accepted is None else window.commit(accepted)


@pytest.mark.parametrize(
    ("accepted", "deferred"), [([1, 0], 1 * 2 + 2 * 1), ([2, 1], 3 * 2), (None, 3)], ids=str
)
def test_drafts_in_spare_slots_are_written_there(layers, accepted, deferred):
    """Each draft once, each kept one a second time; nothing is avoided, an abort included."""
    counts = []
    for spare in (False, True):
        manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=6))
        run_captured(captured_windows(manager, layers, spare=spare), accepted)
        counts.append(manager.snapshot())
    without, with_spare = counts
    assert with_spare["kvtxn_bytes_written_total"] == deferred * 3 * ROW_BYTES
    assert with_spare["kvtxn_bytes_avoided_total"] == 0
    bytes_of = ("kvtxn_bytes_written_total", "kvtxn_bytes_avoided_total")
    assert all(with_spare[name] == without[name] for name in without if name not in bytes_of)


def test_windows_of_both_kinds_count_by_themselves(layers):
    """One manager's windows, in spare slots and not: each window's bytes are its own."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=6))
    both = [captured_windows(manager, layers, spare=spare) for spare in (True, False)]
    for windows in (*both, both[0]):
        run_captured(windows, [1, 0])
    run(manager, layers, [1, 0])
    counts = manager.snapshot()
    assert counts["kvtxn_rows_committed_total"] == 4
    assert counts["kvtxn_rows_rejected_total"] == 8
    assert counts["kvtxn_acceptance_rate"] == pytest.approx(1 / 3)
    assert counts["kvtxn_bytes_written_total"] == (2 * (1 * 2 + 2 * 1) + 2 * 1) * 3 * ROW_BYTES
    assert counts["kvtxn_bytes_avoided_total"] == 2 * 2 * 3 * ROW_BYTES


@pytest.mark.parametrize("spare", [False, True])
def test_a_window_that_fell_back_writes_each_draft_once(layers, spare):
    """Spare slots or not: it was written through."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred", max_rows=6))
    windows = captured_windows(manager, layers, spare=spare)
    window = windows.begin(windows.plan(RowLayout.build((2,), (1,), torch.device("cpu"))))
    window.fall_back("attend", RuntimeError())
    window.commit(1)
    counts = manager.snapshot()
    assert counts["kvtxn_bytes_written_total"] == 2 * 3 * ROW_BYTES
    assert counts["kvtxn_bytes_avoided_total"] == 0


class Unreadable(torch.Tensor):
    """Counters that no host may ask: on a GPU each of these calls waits for it."""

    WAITS = frozenset({"cpu", "item", "tolist", "numpy", "to", "nonzero", "equal",
                       "__int__", "__bool__", "__float__", "__index__", "__repr__"})  # fmt: skip

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in cls.WAITS:
            raise AssertionError(f"{func.__name__} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
@pytest.mark.parametrize("accepted", [[1, 0], torch.tensor([1, 0]), None], ids=str)
def test_counting_never_waits_for_the_device_and_a_reading_does(
    layers, monkeypatch, policy, accepted
):
    """Between two readings nothing but the device sees its counters."""
    manager = TransactionManager(layers, TxnConfig(policy=policy, on_error="raise"))
    plain = manager.metrics.rows
    guarded = plain.as_subclass(Unreadable)
    monkeypatch.setattr(manager.metrics, "rows", guarded)
    monkeypatch.setattr(manager.metrics, "under_policy", guarded[0])
    run(manager, layers, accepted)
    with pytest.raises(AssertionError, match="waits"):
        manager.snapshot()
    monkeypatch.setattr(manager.metrics, "rows", plain)
    assert manager.snapshot()["kvtxn_rows_staged_total"] == 3


def test_a_reason_to_have_no_window_is_said_once(layers, caplog):
    """At info: whoever set max_rows too small finds out."""
    manager = TransactionManager(layers)
    with caplog.at_level(logging.INFO, logger="kvtxn"):
        for reason in ("max_rows", "cascade", "max_rows"):
            manager.bypass(reason)
    said = [line for line in caplog.messages if "window.bypassed" in line]
    assert ["max_rows" in line for line in said] == [True, False]


def test_outcomes_and_bypasses_have_labels(layers):
    """Labels are folded into the name, beside the sum."""
    manager = TransactionManager(layers)
    run(manager, layers, [1, 1])
    run(manager, layers, None)
    manager.bypass("cascade")
    manager.bypass("")
    with manager.window(2, torch.tensor([0, 1, 2])) as w:
        w.fall_back("my own: step/é", RuntimeError())
        w.abort()
    counts = manager.snapshot()
    assert counts["kvtxn_windows_total"] == 3
    assert counts["kvtxn_windows_total_committed"] == 1
    assert counts["kvtxn_windows_total_aborted"] == 1
    assert counts["kvtxn_bypassed_windows_total"] == 2
    assert counts["kvtxn_bypassed_windows_total_cascade"] == 1
    assert counts["kvtxn_rows_staged_total"] == 8
    assert counts["kvtxn_rows_rejected_total"] == 6
    assert counts["kvtxn_fallbacks_total_my_own_step_"] == 1
    assert all(re.fullmatch(r"[a-zA-Z0-9_]+[a-zA-Z0-9]_?", name) for name in counts)


def test_nothing_yet(layers):
    """A fresh manager divides by nothing."""
    counts = TransactionManager(layers).snapshot()
    assert set(counts.values()) == {0}


def test_every_count_belongs_to_a_family(layers):
    """All that a snapshot counts is on the page of a server, and nothing else is."""
    manager = TransactionManager(layers)
    manager.bypass("cascade")
    counts = manager.snapshot()
    sums = {family.name for family in FAMILIES}
    parts = {
        f"{family.name}_{label}"
        for family in FAMILIES
        for label, _ in family.values(counts)
        if label is not None
    }
    assert counts.keys() == sums | parts
    for family in FAMILIES:
        values = [value for _, value in family.values(counts)]
        assert sum(values) == counts[family.name]


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
def test_counting_starts_again(layers, policy):
    """From zero, in the same place; a fault stays to be seen."""
    manager = TransactionManager(layers, TxnConfig(policy=policy))
    run(manager, layers, [1, 0])
    manager.bypass("cascade")
    manager.note_fallback("commit", RuntimeError("once"))
    where = manager.metrics.rows.data_ptr()
    manager.metrics.restart()
    again = manager.snapshot()
    assert {name for name, value in again.items() if value} == {
        "kvtxn_fallbacks_total",
        "kvtxn_fallbacks_total_commit",
    }
    run(manager, layers, [1, 0])
    assert manager.snapshot()["kvtxn_rows_staged_total"] == 3
    assert manager.metrics.rows.data_ptr() == where
