"""Backends by name: found lazily, never replaced silently, refused with a reason."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor

from kvtxn import (
    BackendUnavailableError,
    ConfigError,
    TransactionManager,
    TxnConfig,
    doctor,
    registry,
)
from kvtxn.executor import Capabilities, Executor

CPU = torch.device("cpu")


class Nowhere(TorchExecutor):
    """An executor that cannot run."""

    name = "nowhere"

    @classmethod
    def unavailable(cls, device):
        return f"it needs a quantum computer, not {device}"


class Undecided(TorchExecutor):
    """An executor that cannot even say whether it can run."""

    name = "undecided"

    @classmethod
    def unavailable(cls, device):
        raise OSError("no driver")


class Unbuilt(TorchExecutor):
    """An executor that fails when a manager wants one."""

    name = "unbuilt"

    def __init__(self, layers, config):
        raise MemoryError("no room for buffers")


class Unfinished(Executor):
    """An executor with methods left out."""

    name = "unfinished"
    capabilities = Capabilities()

    @classmethod
    def unavailable(cls, device):
        return None


class Installed:
    """An entry point of somebody else's."""

    def __init__(self, loaded):
        self.loaded = loaded

    def load(self):
        return self.loaded


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


NO_EXECUTORS = [
    (object(), "is no Executor subclass"),
    (type("Other", (), {}), "is no Executor subclass"),
    (Unfinished, "lacks commit, restore, save, stage"),
    (type("Mute", (TorchExecutor,), {"capabilities": None}), "declares no Capabilities"),
]


@pytest.mark.parametrize(("loaded", "problem"), NO_EXECUTORS)
def test_what_is_no_executor_is_refused_when_registered(loaded, problem):
    with pytest.raises(ConfigError, match=problem):
        registry.register("mine", loaded)
    assert "mine" not in registry.names()


@pytest.mark.parametrize(("loaded", "problem"), NO_EXECUTORS)
def test_what_is_no_executor_is_refused_when_loaded(monkeypatch, layers, loaded, problem):
    """An entry point says nothing until it is loaded; the doctor goes on."""
    real = registry._installed()
    monkeypatch.setattr(registry, "_installed", lambda: real | {"mine": Installed(loaded)})
    with pytest.raises(BackendUnavailableError, match=problem):
        TransactionManager(layers, TxnConfig(backend="mine"))
    (row,) = (row for row in doctor.examine()["backends"] if row["name"] == "mine")
    assert problem in row["why_not"]


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_name_is_a_word(name):
    before = registry.names()
    with pytest.raises(ConfigError, match="name"):
        registry.register(name, Nowhere)
    assert registry.names() == before


@pytest.mark.parametrize(
    ("executor", "why"),
    [(Undecided, "no driver"), (Unbuilt, "no room for buffers")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_executor_that_fails_at_the_start_is_unavailable(layers, executor, why):
    """Whatever it raises: one error says whose it is, and the cause is kept."""
    registry.register(executor.name, executor)
    try:
        with pytest.raises(BackendUnavailableError, match=f"'{executor.name}'.*{why}"):
            TransactionManager(layers, TxnConfig(backend=executor.name))
    finally:
        registry.unregister(executor.name)
