"""Errors are sentences with a next step, and their facts are attributes."""

from __future__ import annotations

import pickle

import pytest

import kvtxn
from kvtxn import KVTxnError, SlotMappingError
from kvtxn.errors import ConfigError

CLASSES = [
    value
    for value in vars(kvtxn).values()
    if isinstance(value, type) and issubclass(value, KVTxnError)
]


def test_message_names_operation_problem_expected_got_and_hint():
    """One sentence says it all."""
    error = SlotMappingError("window", "slots do not fit", expected=4, got=5, hint="pass four")
    assert str(error) == "window: slots do not fit; expected 4, got 5; pass four"
    assert (error.operation, error.expected, error.got, error.hint) == ("window", 4, 5, "pass four")


def test_message_without_comparison():
    """Nothing is said where there is nothing to compare."""
    assert str(KVTxnError("commit", "no")) == "commit: no"
    assert str(KVTxnError("commit", "no", got=3)) == "commit: no; got 3"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls):
    """Tensor-parallel workers send errors to their parent."""
    error = cls("commit", "no", expected=1, got=2, hint="try again")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.hint == "try again"


def test_causes_are_builtin_errors_too():
    """Callers that know nothing of kvtxn can still catch by kind."""
    assert issubclass(ConfigError, ValueError)
    assert issubclass(kvtxn.WindowStateError, RuntimeError)
    assert issubclass(kvtxn.IncompleteWindowError, kvtxn.WindowStateError)
