"""Every error kvtxn raises, one class per cause.

A message is one sentence: the operation, the state or layer it met, what was
expected, what came, and the next step. The same facts are attributes, so
that callers never parse text.
"""

from __future__ import annotations


class KVTxnError(Exception):
    """Base of every error raised by kvtxn.

    Attributes:
        operation: the call that was refused, such as ``"commit"``.
        problem: what is wrong, in a few words.
        expected: what the call wanted; None where nothing can be compared.
        got: what it was given.
        hint: the next step for the caller.
    """

    def __init__(
        self,
        operation: str,
        problem: str,
        *,
        expected: object = None,
        got: object = None,
        hint: str = "",
    ) -> None:
        self.operation = operation
        self.problem = problem
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        text = f"{self.operation}: {self.problem}"
        if self.expected is not None:
            text += f"; expected {self.expected}, got {self.got}"
        elif self.got is not None:
            text += f"; got {self.got}"
        return f"{text}; {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (tensor-parallel workers): rebuild from fields.
        fields = {"expected": self.expected, "got": self.got, "hint": self.hint}
        return (_rebuild, (type(self), self.operation, self.problem, fields))


def _rebuild(
    cls: type[KVTxnError], operation: str, problem: str, fields: dict[str, object]
) -> KVTxnError:
    error = cls.__new__(cls)
    KVTxnError.__init__(error, operation, problem, **fields)  # type: ignore[arg-type]
    return error


class ConfigError(KVTxnError, ValueError):
    """A ``TxnConfig`` value is not one of the values it may take."""


class WindowStateError(KVTxnError, RuntimeError):
    """The call is not allowed in the window's (or the manager's) present state."""


def not_allowed(operation: str, state: str, final: bool, detail: str = "") -> WindowStateError:
    """The error for an event that the state table does not have."""
    return WindowStateError(
        operation,
        f"{detail + ' ' if detail else ''}is not allowed in state {state}",
        hint="a window is single-use: open a new one"
        if final
        else "every layer is staged: commit or abort",
    )


class IncompleteWindowError(WindowStateError):
    """Commit was asked for while layers are still missing; nothing was written."""


class UnresolvedWindowError(WindowStateError):
    """The ``with`` block ended without commit or abort; the window was aborted."""


class SlotMappingError(KVTxnError, ValueError):
    """A slot mapping is missing, malformed, out of range, or a second, different one."""


class LayerError(KVTxnError, ValueError):
    """A layer is unknown, staged twice, or its tensors do not fit its cache."""


class CapacityError(KVTxnError, ValueError):
    """The window has more rows than ``TxnConfig.max_rows``."""


class AcceptanceError(KVTxnError, ValueError):
    """Accepted counts, masks or token ids do not fit the window."""


class BackendUnavailableError(KVTxnError, RuntimeError):
    """A backend was asked for by name and cannot run here; the message says why."""
