"""Every error kvtxn raises, one class per cause.

A message is one sentence: the operation, the problem, the value expected, the value given, and
the next step. The same facts are attributes, so that callers never parse text.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar, Final

#: The least likeness, by ``difflib``'s measure, at which a name is taken for another misspelled.
_ALIKE: Final = 0.76


class KVTxnError(Exception):
    """Base of every error raised by kvtxn.

    Attributes:
        operation: the call that was refused, such as ``"commit"``.
        problem: the problem, in a few words.
        expected: the value or shape that the call expects; None if there is no single one.
        got: the value or shape that it was given.
        state: the window's state, if the error is about a window.
        hint: the next step for the caller; every class has a default.
    """

    default_hint: ClassVar[str] = ""

    def __init__(
        self,
        operation: str,
        problem: str,
        *,
        expected: object = None,
        got: object = None,
        hint: str = "",
        state: str | None = None,
    ) -> None:
        self.operation = operation
        self.problem = problem
        self.expected = expected
        self.got = got
        self.state = state
        self.hint = hint or self.default_hint
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        """Return the message: operation, problem, expected, got and hint, as far as given."""
        text = f"{self.operation}: {self.problem}"
        if self.expected is not None:
            text += f"; expected {self.expected}, got {self.got}"
        elif self.got is not None:
            text += f"; got {self.got}"
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (tensor-parallel workers): rebuild from fields.
        fields = {
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
            "state": self.state,
        }
        return (_rebuild, (type(self), self.operation, self.problem, fields))


def _rebuild(
    cls: type[KVTxnError], operation: str, problem: str, fields: dict[str, object]
) -> KVTxnError:
    """Make an error from its fields again, after pickling, without calling the class's own init."""
    error = cls.__new__(cls)
    KVTxnError.__init__(error, operation, problem, **fields)  # type: ignore[arg-type]
    return error


class ConfigError(KVTxnError, ValueError):
    """A ``TxnConfig`` value is not one of the values it may take."""

    default_hint = "see TxnConfig for the values each setting may take"


class UnknownSettingError(ConfigError, TypeError):
    """``TxnConfig`` has no setting of that name."""


class ManagerCopyError(KVTxnError, TypeError):
    """A ``TransactionManager``, a ``Window`` or a ``Ledger`` cannot be copied or pickled."""


class WindowStateError(KVTxnError, RuntimeError):
    """The call is not allowed in the window's (or the manager's) present state."""

    default_hint = "open a new window"


class IncompleteWindowError(WindowStateError):
    """Commit was asked for while layers are still missing; nothing was written."""


class UnresolvedWindowError(WindowStateError):
    """The ``with`` block ended without commit or abort; the window was aborted."""


class SlotMappingError(KVTxnError, ValueError):
    """A slot mapping is missing, malformed, out of range, or a second, different one."""

    default_hint = "pass one int slot per row, request by request, -1 for padding"


class TreeError(KVTxnError, ValueError):
    """A draft tree is malformed, or does not fit the drafts of the window."""

    default_hint = "pass the parent of each draft row, parents first; -1 continues the settled rows"


class LayerError(KVTxnError, ValueError):
    """A layer is unknown, staged twice, or its tensors do not fit its cache."""

    default_hint = "see LayerRef for the shapes, dtypes and scales that go together"


class StagedTwiceError(LayerError, WindowStateError):
    """A layer was staged a second time; the first rows stand."""

    default_hint = "stage each layer once"


class CapacityError(KVTxnError, ValueError):
    """The window has more rows than ``TxnConfig.max_rows``."""

    default_hint = "raise TxnConfig.max_rows, or split the batch"


class AcceptanceError(KVTxnError, ValueError):
    """Accepted counts, masks or token ids do not fit the window."""

    default_hint = "pass accepted draft rows per request, or one bool per row"


class BackendUnavailableError(KVTxnError, RuntimeError):
    """A backend was asked for by name and cannot run here; the message says why."""

    default_hint = "run `kvtxn doctor` to see what can run here"


def meant(value: object, known: Iterable[str]) -> str | None:
    """Return a hint with the name that a misspelled name is probably meant to be.

    Args:
        value: the name that the caller wrote.
        known: the names that exist.

    Returns:
        A question that names the one spelled most alike, capitals aside; None if none is.
    """
    near = get_close_matches(str(value).lower(), list(known), n=1, cutoff=_ALIKE)
    return f"did you mean {near[0]!r}?" if near else None


def shown(error: Exception) -> str:
    """Return ``repr(error)``, or the error's class name if its repr raises."""
    try:
        return repr(error)
    except Exception:  # an error that cannot be shown must not stop the recovery
        return type(error).__name__
