"""``WindowsPart``: opens a window for each step with drafts, of any engine, and commits it.

It drives ``EagerSteps``. A step's plan says which rows are drafts, a window is open while the model
computes them, and it is committed before the drafter or a connector sees the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from torch import Tensor

from ...manager import TransactionManager
from .eager_steps import EagerSteps
from .parts import Part
from .step import PlannedStep, drafts_and_ends, known


class WindowsReader(Protocol):
    """The side of an engine's adapter that windows need: it makes steps and finds their slots.

    Attributes:
        steps: the steps over the present caches; None while there are no windows. Whoever runs
            steps of no request may take them away for a while.
    """

    steps: EagerSteps | None

    def open(self) -> EagerSteps | None:
        """Make steps over new caches; if that is impossible, log why and return None."""

    def slots(self, steps: EagerSteps, inputs: Mapping[str, object]) -> Mapping[str, Tensor] | str:
        """Return the slots of the step that is about to run.

        Args:
            steps: the steps.
            inputs: as for ``Part.forward_begins``.

        Returns:
            By group of ``steps.manager``, int64, one slot per row of the batch, or per request for
            layers with a state; or why the step cannot have a window.
        """


class WindowsPart(Part):
    """Opens a window for each step with drafts, and commits the accepted ones.

    Args:
        reader: makes the steps, and keeps them.
        followed: a ledger behind it in a list of parts follows its windows. False: it hears what
            the engine sampled, and does not compare that with what windows commit.
    """

    def __init__(self, reader: WindowsReader, *, followed: bool = True) -> None:
        self._reader: Final = reader
        self._followed: Final = followed

    def windows_manager(self) -> TransactionManager | None:
        """Return the manager of the present steps; None without any, or if it is not followed."""
        steps = self._reader.steps
        return steps.manager if steps is not None and self._followed else None

    def caches_dropped(self) -> None:
        """Set the reader's steps, which are over the caches that go, to None."""
        self._reader.steps = None

    def caches_made(self) -> None:
        """Let the reader make steps over new caches; None if it cannot."""
        self._reader.steps = self._reader.open()

    def step_begins(self) -> None:
        """Abort a window that an abandoned step left open."""
        self._abandon()

    def planned(self, step: PlannedStep) -> None:
        """Note which rows of the step are drafts, for ``forward_begins``; nothing without steps."""
        if self._reader.steps is not None:
            self._reader.steps.plan(lambda: drafts_and_ends(step.rows()))

    def forward_begins(self, step: PlannedStep | None, inputs: Mapping[str, object]) -> None:
        """Open the step's window, if it was planned with drafts and can have one."""
        steps = self._reader.steps
        if steps is not None:
            steps.begin(lambda: self._reader.slots(steps, inputs))

    def failed(self, error: BaseException) -> None:
        """Forget the step, and abort its window if it is open; the error is not looked at."""
        self._abandon()

    def sampled(self, ids: Tensor | None, counts: Tensor | None) -> None:
        """Commit the drafts that the sampled ids accept, and end the step, if it has a window.

        Raises:
            KVTxnError: there are no ids, under ``on_error="raise"``; else the step falls back.
        """
        if self._reader.steps is not None:
            self._reader.steps.commit(lambda: known(ids))

    def released(self) -> None:
        """Forget the step, and abort its window if it is still open."""
        self._abandon()

    def _abandon(self) -> None:
        """Forget the step, and abort its window if it is open; nothing without steps."""
        if self._reader.steps is not None:
            self._reader.steps.abandon()
