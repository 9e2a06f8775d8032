"""Hooks: registered with a handle, told once per window, harmless when they raise."""

from __future__ import annotations

import logging

import pytest
import torch
from small_caches import changed_slots, copies, make_layers, rows

from kvtxn import (
    ConfigError,
    SlotMappingError,
    TransactionManager,
    TxnConfig,
    WindowState,
    WindowStateError,
)

SLOTS = torch.tensor([0, 1, 2, 10, 11, -1])


def run(manager, layers, accepted=(1, 1)):
    with manager.window(2, SLOTS) as w:
        for ref in layers:
            w.stage(ref, *rows(6))
        w.abort() if accepted is None else w.commit(list(accepted))
    return w


@pytest.fixture(params=["fallback", "raise"])
def manager(layers, request):
    return TransactionManager(layers, TxnConfig(policy="deferred", on_error=request.param))


def test_what_a_hook_is_told(manager, layers):
    """The window, its shape, its slots by group, and which of them hold accepted rows."""
    told = []
    manager.on_commit(told.append)
    run(manager, layers, [1, 2])
    (window,) = told
    assert (window.number, window.state) == (0, WindowState.COMMITTED)
    assert window.layout.draft_len == (2, 2)
    assert window.slots["default"].tolist() == SLOTS.tolist()
    assert window.kept.tolist() == [False, True, False, False, True, True]
    assert window.settled.tolist() == [True, False, False, True, False, False]
    assert window.stored().tolist() == [0, 1, -1, 10, 11, -1]


def test_every_way_to_abort_is_told(manager, layers):
    """By an exception of the body, or by leaving the block without a verdict."""
    told = []
    manager.on_abort(told.append)
    with pytest.raises(KeyError), manager.window(2, SLOTS):
        raise KeyError
    with pytest.raises(WindowStateError), manager.window(2, SLOTS):
        pass
    with pytest.raises(KeyError), manager.window(2):  # no slots: nothing to tell
        raise KeyError
    assert [window.number for window in told] == [0, 1]


def test_a_handle_removes_its_hook(manager, layers):
    """Once, and for that moment only."""
    told = []
    handle = manager.on_commit(told.append)
    manager.on_abort(told.append)
    run(manager, layers)
    handle.remove()
    handle.remove()
    run(manager, layers)
    run(manager, layers, None)
    assert [window.number for window in told] == [0, 2]
    manager.on_commit(told.append)
    run(manager, layers)
    assert told[-1].number == 3


@pytest.mark.parametrize("callback", [None, "text", 3])
def test_what_cannot_be_called_is_refused(manager, callback):
    """At once, not at the first commit."""
    with pytest.raises(ConfigError, match="cannot be called"):
        manager.on_commit(callback)
    told = []
    manager.on_commit(told.append)
    with pytest.raises(ConfigError, match="registered already"):
        manager.on_commit(told.append)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_hook_that_raises_loses_nothing(manager, layers, end, caplog):
    """Bytes, label and the other hooks are untouched; on_error says whether it surfaces."""
    told, before = [], copies(layers)
    add = manager.on_commit if end == "commit" else manager.on_abort
    add(lambda window: 1 / 0)
    add(told.append)
    accepted = [2, 1] if end == "commit" else None
    w = manager.window(2, SLOTS)
    for ref in layers:
        w.stage(ref, *rows(6))
    with caplog.at_level(logging.WARNING, logger="kvtxn"):
        if manager.config.on_error == "raise":
            with pytest.raises(ZeroDivisionError) as caught:
                w.commit(accepted) if accepted else w.abort()
            assert f"on_{end} hook" in caught.value.__notes__[0]
        else:
            w.commit(accepted) if accepted else w.abort()
    expected = {0, 1, 2, 10, 11} if accepted else {0, 10}
    assert changed_slots(layers, before) == [expected] * 6
    assert w.state is (WindowState.COMMITTED if accepted else WindowState.ABORTED)
    assert len(told) == 1
    assert manager.current is None
    assert "hook.failed" in caplog.text
    counts = manager.snapshot()
    assert counts[f"kvtxn_hook_errors_total_on_{end}"] == 1
    assert counts["kvtxn_fallbacks_total"] == 0
    assert counts["kvtxn_rows_staged_total"] == 3


def test_an_interrupt_in_a_hook_comes_through(manager, layers):
    """The window is committed by then, and the manager is free."""

    def interrupt(window):
        raise KeyboardInterrupt

    manager.on_commit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(manager, layers)
    assert manager.current is None
    assert manager.snapshot()["kvtxn_windows_total_committed"] == 1


def test_groups_have_slots_of_their_own():
    """Each with its own padding; one that was never mapped is not there."""
    layers = make_layers(2, groups=("a", "b"))
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    told = []
    manager.on_commit(told.append)
    manager.on_abort(told.append)
    slots = {"a": torch.tensor([0, 1, 2]), "b": torch.tensor([4, -1, 6])}
    with manager.window(2, slots) as w:
        for ref in layers:
            w.stage(ref, *rows(3))
        w.commit(1)
    assert told[0].stored("a").tolist() == [0, 1, -1]
    assert told[0].stored("b").tolist() == [4, -1, -1]
    with manager.window(2) as w:
        w.stage(layers[0], *rows(3), slots["a"])
        w.abort()
    assert list(told[1].slots) == ["a"]
    with pytest.raises(SlotMappingError, match="no slots in group 'b'; expected one of 'a'"):
        told[1].stored("b")


def test_failed_windows_tell_nobody(layers, monkeypatch):
    """Nothing can be promised about their bytes."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred"))
    told = []
    manager.on_commit(told.append)
    manager.on_abort(told.append)

    def broken(txn, accepted):
        raise KeyboardInterrupt

    monkeypatch.setattr(manager.executor, "commit", broken)
    with pytest.raises(KeyboardInterrupt):
        run(manager, layers)
    assert told == []
    assert manager.snapshot()["kvtxn_windows_total_failed"] == 1
