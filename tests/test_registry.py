"""Backends by name: found lazily, never replaced silently, refused with a reason."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor

from kvtxn import (
    BackendUnavailableError,
    ConfigError,
    KVTxnError,
    TransactionManager,
    TxnConfig,
    backend_names,
    doctor,
    registry,
)
from kvtxn.executor import Capabilities, Executor
from kvtxn.testing import registered
from kvtxn.testing.kit import Kit

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


def test_installed_backends_are_found_by_entry_point():
    """The torch executor is one plug-in among others."""
    assert "torch" in registry.names()
    assert registry.load("torch") is TorchExecutor


def test_a_backend_that_cannot_run_says_why(layers):
    """Asking for it by name raises; "auto" passes it over."""
    with registered(Nowhere) as name:
        assert "quantum" in registry.why_not(name, CPU)
        with pytest.raises(BackendUnavailableError, match="quantum computer, not cpu"):
            TransactionManager(layers, TxnConfig(backend=name))
        assert TransactionManager(layers).executor.name != "nowhere"


def test_names_are_not_taken_over():
    """The same pair again is harmless, another class is refused."""
    with registered(Nowhere) as known:
        registry.register(known, Nowhere)
        for name in (known, "torch", "auto"):
            with pytest.raises(ValueError, match="taken"):
                registry.register(name, type("Other", (TorchExecutor,), {}))


def test_unregister_forgets():
    """And does not mind a name it never knew."""
    registry.unregister("nowhere")
    assert "nowhere" not in registry.names()
    with pytest.raises(BackendUnavailableError, match="nowhere"):
        registry.load("nowhere")


class OfAnInstance(TorchExecutor):
    def unavailable(self, device):
        return None


class TakesNoGroup(TorchExecutor):
    def save(self, txn):
        return {}


class WantsMore(TorchExecutor):
    def commit(self, txn, accepted, *, stream):
        pass


class TakesNoLayers(TorchExecutor):
    def __init__(self, **options):
        pass


class TakesAnything(TorchExecutor):
    def __init__(self, *given, **options):
        super().__init__(*given, **options)

    def stage(self, *given):
        super().stage(*given)

    @staticmethod
    def unavailable(device):
        return None


def test_an_executor_may_take_more_than_it_is_given(layers):
    with registered(TakesAnything) as name:
        assert TransactionManager(layers, TxnConfig(backend=name)).executor.name == "torch"


NO_EXECUTORS = [
    (OfAnInstance, "unavailable is no classmethod: it is called as OfAnInstance.unavailable("),
    (TakesNoGroup, "save(self, txn) cannot be called as save(txn, group)"),
    (WantsMore, "commit(self, txn, accepted, *, stream) cannot be called as commit(txn, accepted)"),
    (
        TakesNoLayers,
        "__init__(self, **options) cannot be called as __init__(layers, config)",
    ),
    (object(), "is not an Executor subclass"),
    (type("Other", (), {}), "is not an Executor subclass"),
    (Unfinished, "lacks commit, restore, save, stage"),
    (type("Mute", (TorchExecutor,), {"capabilities": None}), "declares no Capabilities"),
    (type("Nobody", (TorchExecutor,), {"name": None}), "has no name: give its class `name`"),
    (type("Blank", (TorchExecutor,), {"name": ""}), "has no name"),
]


@pytest.mark.parametrize(("loaded", "problem"), NO_EXECUTORS)
def test_what_is_no_executor_is_refused(monkeypatch, layers, loaded, problem):
    """When it is registered, or when its entry point is loaded; the doctor goes on."""
    with pytest.raises(ConfigError, match=re.escape(problem)):
        registry.register("mine", loaded)
    assert "mine" not in registry.names()
    real = backend_names.installed()
    monkeypatch.setattr(backend_names, "installed", lambda: real | {"mine": Installed(loaded)})
    with pytest.raises(BackendUnavailableError, match=re.escape(problem)):
        TransactionManager(layers, TxnConfig(backend="mine"))
    (row,) = (row for row in doctor.examine()["backends"] if row["name"] == "mine")
    assert problem in row["why_not"]


@pytest.mark.parametrize(
    ("module", "end"),
    [("triton", "; pip install 'kvtxn[triton]' brings it"), ("abacus", "")],
)
def test_a_missing_module_comes_with_the_extra_that_brings_it(monkeypatch, module, end):
    """The message names an extra of kvtxn if one brings it; the doctor says the same."""
    missing = f"No module named {module!r}"

    class Absent:
        def load(self):
            raise ModuleNotFoundError(missing, name=module)

    real = backend_names.installed()
    monkeypatch.setattr(backend_names, "installed", lambda: real | {"mine": Absent()})
    says = f"'mine' cannot be imported: {missing}{end}"
    with pytest.raises(BackendUnavailableError) as caught:
        registry.load("mine")
    assert caught.value.problem == says
    (row,) = (row for row in doctor.examine()["backends"] if row["name"] == "mine")
    assert row["why_not"] == says


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
    says = f"'{executor.name}.*{why}"
    with registered(executor) as name, pytest.raises(BackendUnavailableError, match=says):
        TransactionManager(layers, TxnConfig(backend=name))


@pytest.mark.parametrize("answer", [False, True, "", 3])
def test_an_answer_that_is_no_sentence_is_refused(layers, answer):
    """False is not None: neither the registry nor the kit takes it for either."""
    vague = type("Vague", (TorchExecutor,), {"unavailable": classmethod(lambda cls, _: answer)})
    with registered(vague) as name:
        words = rf"unavailable\(\) of '{name}' returned {answer!r}, neither None nor a sentence"
        with pytest.raises(BackendUnavailableError, match=words):
            TransactionManager(layers, TxnConfig(backend=name))
        with ExitStack() as stack, pytest.raises(BackendUnavailableError, match=words):
            Kit(name, CPU, stack)


@pytest.mark.parametrize(
    ("field", "names", "words"),
    [
        ("policies", {"defered"}, "got 'defered'; did you mean 'deferred'"),
        ("policies", {"undo", "auto"}, "among 'deferred', 'undo', 'direct', got 'auto'"),
        ("kinds", {"pagd"}, "got 'pagd'; did you mean 'paged'"),
        ("kinds", {3}, "got 3"),
    ],
)
def test_capabilities_know_their_names(field, names, words):
    """A typo would make the kit skip; it is refused when the class is written."""
    with pytest.raises(ConfigError, match=f"Capabilities: {field} is not valid.*{words}"):
        Capabilities(**{field: frozenset(names)})
    with pytest.raises(ConfigError, match="a frozenset of names"):
        Capabilities(**{field: "paged"})


def test_layers_that_an_executor_cannot_hold_are_named(layers):
    """The message expects what the layers need."""
    able = Capabilities(kinds=frozenset({"ring"}))
    words = "expected an executor for layers of kind paged, got one for ring"
    rings = type("Rings", (TorchExecutor,), {"capabilities": able})
    with registered(rings) as name, pytest.raises(BackendUnavailableError, match=words):
        TransactionManager(layers, TxnConfig(backend=name))


def first(saved):
    return next(iter(saved))


WRONG_SAVES = {
    "nothing": (lambda saved: None, "by layer name the rows of ['layer.0',", "got a NoneType"),
    "a list": (lambda saved: list(saved.values()), "by layer name the rows", "got a list"),
    "a layer less": (
        lambda saved: {k: v for k, v in saved.items() if k != first(saved)},
        "rows of ['layer.0',", "got rows of ['layer.1'",
    ),
    "a layer of nobody": (lambda saved: {**saved, "x": ()}, "rows of [", "'x']"),
    "one plane": (
        lambda saved: {**saved, first(saved): saved[first(saved)][:1]},
        "for layer 'layer.0', per plane, ['[3, 2, 8] of 4 bytes', '[3, 2, 8] of 4 bytes']",
        "got ['[3, 2, 8] of 4 bytes']",
    ),
    "one tensor": (
        lambda saved: {**saved, first(saved): saved[first(saved)][0]},
        "for layer 'layer.0'", "got a Tensor",
    ),
    "a row less": (
        lambda saved: {k: tuple(p[1:] for p in parts) for k, parts in saved.items()},
        "[3, 2, 8] of 4 bytes", "got ['[2, 2, 8] of 4 bytes', '[2, 2, 8] of 4 bytes']",
    ),
    "other bytes": (
        lambda saved: {k: tuple(p.to(torch.int8) for p in v) for k, v in saved.items()},
        "[3, 2, 8] of 4 bytes", "[3, 2, 8] of 1 bytes",
    ),
    "arrays": (
        lambda saved: {k: tuple(p.numpy() for p in v) for k, v in saved.items()},
        "[3, 2, 8] of 4 bytes", "got ['a ndarray', 'a ndarray']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG_SAVES)
def test_a_wrong_save_is_named_when_the_window_begins(layers, how):
    """And not at the commit that would put the rows back."""
    change, expected, got = WRONG_SAVES[how]

    class SavesWrongly(TorchExecutor):
        def save(self, txn, group):
            return change(super().save(txn, group))

    with registered(SavesWrongly) as name:
        manager = TransactionManager(
            layers, TxnConfig(policy="undo", backend=name, on_error="raise")
        )
    before = [ref.key_cache.clone() for ref in layers]
    with pytest.raises(KVTxnError) as caught:
        manager.window(2, torch.tensor([4, 5, 6]))
    said = str(caught.value)
    assert said.startswith("save: the executor 'torch' did not return the rows that its save has")
    assert expected in said
    assert got in said
    assert all(torch.equal(ref.key_cache, old) for ref, old in zip(layers, before, strict=True))
