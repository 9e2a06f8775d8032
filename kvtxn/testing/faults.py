"""Executors that fail on command: before, in the middle of, or after their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

import attrs
from torch import Tensor

from ..executor import AttentionArgs, Executor, StagedLayer, Txn
from ..rows import LayerRows

#: The methods that can fail.
OPERATIONS: Final = ("save", "stage", "commit", "restore", "attend")

#: Where in a method it fails.
MOMENTS: Final = ("before", "middle", "after")

T = TypeVar("T")


class InjectedFault(RuntimeError):
    """Raised by an executor that was told to fail."""


@attrs.define
class Faults:
    """What fails next, and what failed so far.

    Attributes:
        error: what to raise.
        fired: the faults that went off, as ``(operation, moment)``.
        calls: how often each method was called.
    """

    error: Callable[[], BaseException] = attrs.field(
        default=lambda: InjectedFault("injected by the conformance kit")
    )
    fired: list[tuple[str, str]] = attrs.Factory(list)
    calls: Counter[str] = attrs.Factory(Counter)
    _armed: dict[str, tuple[str, int]] = attrs.Factory(dict)

    def arm(self, at: str, when: str = "before", nth: int = 1) -> None:
        """Make the ``nth`` call of a method from now on fail, once.

        Args:
            at: one of ``OPERATIONS``.
            when: one of ``MOMENTS``. In the middle means: half of the words it changed are
                as they were, and what it had to return or to count is lost.
            nth: 1 is the next call.

        Raises:
            ValueError: no such operation or moment.
        """
        if at not in OPERATIONS or when not in MOMENTS or nth < 1:
            raise ValueError(f"arm: {at!r}, {when!r}, {nth} is no fault; see OPERATIONS, MOMENTS")
        self._armed[at] = (when, nth)

    def disarm(self) -> None:
        """Let everything work again."""
        self._armed.clear()

    def due(self, operation: str) -> str | None:
        """Count a call; the moment at which this one has to fail, or None."""
        self.calls[operation] += 1
        if operation not in self._armed:
            return None
        when, nth = self._armed[operation]
        if nth > 1:
            self._armed[operation] = (when, nth - 1)
            return None
        del self._armed[operation]
        self.fired.append((operation, when))
        return when


class FaultyExecutor(Executor):
    """Mixed in before an executor class by ``faulty``; fails as ``faults`` says.

    Attributes:
        faults: shared by all instances of one class that ``faulty`` made.
    """

    faults: ClassVar[Faults]

    def save(self, txn: Txn, group: str) -> LayerRows:
        """Fails at ``"save"``."""
        inner = super().save  # type: ignore[safe-super]  # the class it is mixed into
        return self._inject("save", txn, lambda: inner(txn, group))

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Fails at ``"stage"``."""
        inner = super().stage  # type: ignore[safe-super]
        self._inject("stage", txn, lambda: inner(txn, layer))

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Fails at ``"commit"``."""
        inner = super().commit  # type: ignore[safe-super]
        self._inject("commit", txn, lambda: inner(txn, accepted))

    def restore(self, txn: Txn) -> None:
        """Fails at ``"restore"``."""
        inner = super().restore  # type: ignore[safe-super]
        self._inject("restore", txn, lambda: inner(txn))

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """Fails at ``"attend"``."""
        inner = super().attend
        return self._inject("attend", txn, lambda: inner(txn, layer, query, attention))

    def _inject(self, operation: str, txn: Txn, work: Callable[[], T]) -> T:
        moment = self.faults.due(operation)
        if moment == "before":
            raise self.faults.error()
        if moment is None:
            return work()
        planes = [plane.cells for ref in self.layers for plane in ref.planes]
        before = [cells.clone() for cells in planes] if moment == "middle" else []
        counters = txn.counters.clone()
        result = work()
        if moment == "middle":
            for cells, old in zip(planes, before, strict=True):
                cells[..., ::2] = old[..., ::2]
            txn.counters.copy_(counters)  # counting comes last
        del result
        raise self.faults.error()


def faulty(
    executor: type[Executor],
    *,
    at: str | None = None,
    when: str = "before",
    nth: int = 1,
    error: Callable[[], BaseException] | None = None,
) -> Any:
    """A subclass of an executor class that fails on command.

    Args:
        executor: the class to break.
        at: arm this fault at once; None to arm later, by ``.faults.arm``.
        when: see ``Faults.arm``.
        nth: see ``Faults.arm``.
        error: makes what is raised; an ``InjectedFault`` where None.

    Returns:
        The class, with a ``faults`` attribute. It does not claim to be atomic: after a
        fault in the middle something was written.
    """
    faults = Faults() if error is None else Faults(error)
    if at is not None:
        faults.arm(at, when, nth)
    capabilities = attrs.evolve(executor.capabilities, atomic=False)
    members = {"faults": faults, "capabilities": capabilities}
    return type(f"Faulty{executor.__name__}", (FaultyExecutor, executor), members)
