"""TxnConfig is checked when it is built."""

from __future__ import annotations

import copy
import pickle

import attrs
import pytest

from kvtxn import BackendUnavailableError, TxnConfig
from kvtxn.errors import ConfigError, KVTxnError


def test_defaults_choose_everything():
    """The contract's defaults."""
    config = TxnConfig()
    assert (config.policy, config.backend, config.max_rows) == ("auto", "auto", 512)
    assert (config.acceptance, config.on_error, config.debug) == ("auto", "fallback", False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "optimistic"),
        ("policy", None),
        ("max_rows", 0),
        ("max_rows", True),
        ("max_rows", 1.5),
        ("acceptance", "fast"),
        ("on_error", "ignore"),
        ("staging", "borrow"),
        ("debug", 1),
    ],
)
def test_bad_values_are_refused_by_name(field, value):
    """The message names the field and what came."""
    with pytest.raises(ConfigError, match=field) as caught:
        TxnConfig(**{field: value})
    assert caught.value.got == repr(value)


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("policy", "Defered", "did you mean 'deferred'?"),
        ("policy", "optimistic", "choose one of them, or leave policy out"),
        ("backend", "Triton", "did you mean 'triton'?"),
        ("backend", "AUTO", "did you mean 'auto'?"),
        ("backend", "quantum", "install the package that provides it, or call "
         "kvtxn.registry.register"),
    ],
)  # fmt: skip
def test_a_misspelled_name_comes_with_the_nearest_one(field, value, hint):
    with pytest.raises(KVTxnError) as caught:
        TxnConfig(**{field: value})
    assert caught.value.hint == hint


def test_unknown_backend_is_unavailable():
    """Only "auto" chooses; a name that does not exist is refused."""
    with pytest.raises(BackendUnavailableError, match="'quantum'"):
        TxnConfig(backend="quantum")


def test_unknown_setting_is_refused():
    """No setting is silently ignored."""
    with pytest.raises(ConfigError, match=r"no setting 'polciy'.*did you mean 'policy'\?"):
        TxnConfig(polciy="undo")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no setting 'colour'.*settings among policy, backend"):
        TxnConfig(colour="undo")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        attrs.evolve(TxnConfig(), maxrows=3)
    config = TxnConfig(policy="undo", max_rows=3)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config


def test_frozen():
    """A manager's settings cannot change under it."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        TxnConfig().policy = "undo"  # type: ignore[misc]
