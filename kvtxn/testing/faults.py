"""Executors that fail on command: before, in the middle of, or after their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, TypeVar

import attrs
from torch import Tensor

from ..captured_launches import CapturedLaunches, CapturedPlaces, LayoutLaunches
from ..executor import Executor, Txn
from ..layout import RowLayout

#: The methods that can fail.
OPERATIONS: Final = ("own_slots", "save", "stage", "commit", "restore", "attend")

#: One more method that can fail; only windows with replayed layers call it.
ADVANCE: Final = "advance"

#: The moments of a call at which it can fail.
MOMENTS: Final = ("before", "middle", "after")

T = TypeVar("T")


class InjectedFault(RuntimeError):
    """The error that an armed fault makes an executor raise."""


@attrs.define
class Faults:
    """The faults that are armed, and the faults that were raised.

    Attributes:
        error: makes the exception to raise.
        fired: the faults that were raised, as ``(operation, moment)``.
        calls: the number of calls of each method.
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
            at: one of ``OPERATIONS``, or ``ADVANCE``.
            when: one of ``MOMENTS``. In the middle means: half of the words that the method
                changed are put back, and its return value and its counts are lost.
            nth: 1 is the next call.

        Raises:
            ValueError: the operation or the moment is unknown.
        """
        if at not in (*OPERATIONS, ADVANCE) or when not in MOMENTS or nth < 1:
            raise ValueError(f"arm: {at!r}, {when!r}, {nth} is not a fault; see OPERATIONS/MOMENTS")
        self._armed[at] = (when, nth)

    def disarm(self) -> None:
        """Remove all armed faults, so that every method works again."""
        self._armed.clear()

    def due(self, operation: str) -> str | None:
        """Count a call of an operation, and return the moment at which it has to fail, or None.

        A fault that is due is disarmed, and added to ``fired``.
        """
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


def _failing(operation: str) -> Any:
    """Make a method that does what the executor's own does, or fails if a fault is armed."""

    def method(self: FaultyExecutor, *given: Any) -> Any:
        """Call the executor's own method of this name through ``_inject``."""
        inner = getattr(super(FaultyExecutor, self), operation)
        txn = given[0] if isinstance(given[0], Txn) else None
        return self._inject(operation, txn, lambda: inner(*given))

    return method


class FaultyExecutor(Executor):
    """A mixin that ``faulty`` puts before an executor class; its methods fail if a fault is armed.

    Attributes:
        faults: shared by all instances of one class that ``faulty`` made.
    """

    faults: ClassVar[Faults]

    own_slots: Any = _failing("own_slots")
    save: Any = _failing("save")
    stage: Any = _failing("stage")
    commit: Any = _failing("commit")
    advance: Any = _failing(ADVANCE)
    restore: Any = _failing("restore")
    attend: Any = _failing("attend")

    def captured_launches(self, places: CapturedPlaces) -> CapturedLaunches | None:
        """Return launches that raise at "save" or "commit" before they launch anything.

        None if the executor under test has none.
        """
        inner = super().captured_launches(places)
        return None if inner is None else FaultyLaunches(inner, self.faults)

    def _inject(self, operation: str, txn: Txn | None, work: Callable[[], T]) -> T:
        """Do an operation's work and return its result, or raise if a fault of it is due.

        After a fault in the middle, every other element of the caches and all counts are as before.
        """
        moment = self.faults.due(operation)
        if moment == "before":
            raise self.faults.error()
        if moment is None:
            return work()
        planes = [plane.cells for ref in self.layers for plane in ref.planes]
        before = [cells.clone() for cells in planes] if moment == "middle" else []
        counters = None if txn is None else txn.counters.clone()
        result = work()
        if moment == "middle":
            for cells, old in zip(planes, before, strict=True):
                cells[..., ::2] = old[..., ::2]
            if txn is not None and counters is not None:
                txn.counters.copy_(counters)  # counting comes last
        del result
        raise self.faults.error()


class FaultyLaunches(CapturedLaunches):
    """Prepared launches that fail on command. They are atomic, so they fail before their work."""

    def __init__(self, inner: CapturedLaunches, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def prepare(self, layout: RowLayout) -> LayoutLaunches:
        """Prepare launches of a layout that fail on command."""
        return _FaultyLayout(self._inner.prepare(layout), self._faults)

    def variants(self) -> Iterator[RowLayout]:
        """Yield the layouts of the launches inside."""
        return self._inner.variants()


class _FaultyLayout(LayoutLaunches):
    """The launches of one layout, which raise before they launch if a fault is due."""

    def __init__(self, inner: LayoutLaunches, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def save(self) -> None:
        """Save the drafts' rows, unless a fault at "save" is due: then raise."""
        if self._faults.due("save"):
            raise self._faults.error()
        self._inner.save()

    def commit(self, sampled: Tensor) -> None:
        """Commit, unless a fault at "commit" is due: then raise."""
        if self._faults.due("commit"):
            raise self._faults.error()
        self._inner.commit(sampled)

    def warm_up(self, sampled: Tensor) -> None:
        """Warm up the launches inside; no fault is due here, and no call is counted."""
        self._inner.warm_up(sampled)


def faulty(executor: type[Executor]) -> Any:
    """Make a subclass of an executor class that fails on command.

    Args:
        executor: the class to break.

    Returns:
        The class, with a ``faults`` attribute: ``.faults.arm`` arms one. It does not declare
        ``atomic``: after a fault in the middle some words were written.
    """
    capabilities = attrs.evolve(executor.capabilities, atomic=False)
    members = {"faults": Faults(), "capabilities": capabilities}
    return type(f"Faulty{executor.__name__}", (FaultyExecutor, executor), members)
