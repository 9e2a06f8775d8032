"""An error names the call that the caller made, and a next step that the window still allows."""

from __future__ import annotations

import pytest
import torch
from small_caches import make_layers, rows

from kvtxn import (
    CapacityError,
    IncompleteWindowError,
    SlotMappingError,
    TransactionManager,
    TxnConfig,
    WindowStateError,
)
from kvtxn.layout import RowLayout


def captured_window(policy="deferred"):
    """A window of two requests with a draft each over a captured forward, and the layers."""
    layers = make_layers(2)
    manager = TransactionManager(layers, TxnConfig(policy=policy, backend="torch", max_rows=8))
    windows = manager.captured_windows(torch.arange(8).view(1, 8))
    layout = RowLayout.build((1, 1), 1, torch.device("cpu"))
    return windows.begin(windows.plan(layout)), layers


@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_commit_sampled_of_a_window_that_is_over(policy):
    window, _ = captured_window(policy)
    window.abort()
    with pytest.raises(WindowStateError, match=r"^commit_sampled: is not allowed in state ABORTED"):
        window.commit_sampled(torch.tensor([1, 1]))
    with pytest.raises(WindowStateError, match=r"^commit: is not allowed in state ABORTED"):
        window.commit(1)


@pytest.mark.parametrize("call", ["commit", "commit_sampled"])
def test_a_captured_window_with_some_layers_noted(call):
    """Nothing is staged by hand in such a window: the next step is to note the layer."""
    window, layers = captured_window()
    window.note_staged(layers[0])
    with pytest.raises(IncompleteWindowError, match=rf"^{call}: .*call note_staged") as caught:
        getattr(window, call)(torch.tensor([1, 1]))
    assert "stage every layer" not in str(caught.value)
    window.note_staged(layers[1])
    window.commit(1)


def test_stage_of_a_captured_window_that_is_over():
    """While it is open its layers are noted; afterwards nothing can be done with it."""
    window, layers = captured_window()
    with pytest.raises(WindowStateError, match=r"call note_staged\(ref\)"):
        window.stage(layers[0], *rows(4))
    window.abort()
    with pytest.raises(WindowStateError, match=r"not allowed in state ABORTED.*open a new one"):
        window.stage(layers[0], *rows(4))


@pytest.mark.parametrize("policy", ["undo", "direct"])
def test_rows_of_the_caller_without_slots(layers, policy):
    """No layer is staged in such a window, so ``stage`` cannot bring the slots."""
    manager = TransactionManager(layers, TxnConfig(policy=policy, backend="torch"))
    with pytest.raises(
        SlotMappingError, match=r"^window: group 'default' has no slot mapping"
    ) as e:
        manager.window(3, None, written_by="caller")
    assert "stage()" not in str(e.value)
    assert manager.current is None


@pytest.mark.parametrize(
    ("slots", "error", "problem"),
    [
        ("x", SlotMappingError, "malformed"),
        ([0.5, 1.5, 2.5], SlotMappingError, "malformed"),
        ([0, 1], SlotMappingError, "whole number of requests"),
        ([0, 1, 10**6], SlotMappingError, "outside its cache"),
        ([0, 1, 1], SlotMappingError, "two rows to one slot"),
        (range(12), CapacityError, "more rows"),
    ],
)
def test_slots_that_stage_brings(layers, slots, error, problem):
    """The call that brought them is named."""
    manager = TransactionManager(layers, TxnConfig(policy="deferred", backend="torch", max_rows=9))
    window = manager.window(2)
    count = len(slots) if not isinstance(slots, str) else 3
    with pytest.raises(error, match=f"^stage: .*{problem}"):
        window.stage(layers[0], *rows(count), slots=slots)
    with pytest.raises(WindowStateError):
        manager.window(2)
    window.abort()
    with pytest.raises(error, match=f"^window: .*{problem}"):
        manager.window(2, slots)
