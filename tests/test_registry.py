"""Backends by name: found lazily, never replaced silently, refused with a reason."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor

from kvtxn import BackendUnavailableError, TransactionManager, TxnConfig, registry

CPU = torch.device("cpu")


class Nowhere(TorchExecutor):
    """An executor that cannot run."""

    name = "nowhere"

    @classmethod
    def unavailable(cls, device):
        return f"it needs a quantum computer, not {device}"


@pytest.fixture
def nowhere():
    registry.register("nowhere", Nowhere)
    yield
    registry.unregister("nowhere")


def test_installed_backends_are_found_by_entry_point():
    """The torch executor is one plug-in among others."""
    assert "torch" in registry.names()
    assert registry.load("torch") is TorchExecutor


@pytest.mark.usefixtures("nowhere")
def test_a_backend_that_cannot_run_says_why(layers):
    """Asking for it by name raises; "auto" passes it over."""
    assert "quantum" in registry.why_not("nowhere", CPU)
    config = TxnConfig(backend="nowhere")
    with pytest.raises(BackendUnavailableError, match="quantum computer, not cpu"):
        TransactionManager(layers, config)
    assert TransactionManager(layers).executor.name != "nowhere"


@pytest.mark.usefixtures("nowhere")
def test_names_are_not_taken_over():
    """The same pair again is harmless, another class is refused."""
    registry.register("nowhere", Nowhere)
    for name in ("nowhere", "torch", "auto"):
        with pytest.raises(ValueError, match="taken"):
            registry.register(name, type("Other", (TorchExecutor,), {}))


def test_unregister_forgets():
    """And does not mind a name it never knew."""
    registry.unregister("nowhere")
    assert "nowhere" not in registry.names()
    with pytest.raises(BackendUnavailableError, match="nowhere"):
        registry.load("nowhere")
