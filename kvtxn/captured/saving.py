"""``SavingWindow``: the part of a captured window that copies the rows which drafts overwrite."""

from __future__ import annotations

from .. import recovery
from ..context import WindowContext
from ..errors import WindowStateError
from ..states import Event, WindowState, allowed
from ..window import Window
from .shared import SharedPlaces, StepPlan


class SavingWindow(Window):
    """A window that can save rows when it begins, or leave that to its captured forward."""

    _context: WindowContext
    plan: StepPlan
    _shared: SharedPlaces
    _state: WindowState | None
    _unsaved = False  # True while the old rows are still to be saved, see ``before_forward``

    def save(self) -> None:
        """Save the rows that the drafts overwrite; a failure comes out, see ``save_failed``."""
        self._shared.save_slots()
        if self.plan.launches is not None:
            self.plan.launches.save()
            return
        txn = self._life.txn
        assert txn is not None
        for group in self._context.groups:
            self._context.save(txn, group)

    def save_failed(self, error: Exception) -> None:
        """Go DIRECT, since no old row is there to be put back, or abort and raise ``error``."""
        self._unsaved = self.plan.launches is not None  # one launch saves them all, or none
        life, self._unsaved = self._life, False
        life.go_direct("begin", error)
        life.missing.clear()  # the forward writes every row, and no state
        txn = life.txn
        assert txn is not None
        if self._context.policy == "deferred":
            stored = self._shared.stored(txn.layout.num_rows)
            txn.staged.update({name: row for name, row in stored.items() if row.ref.states})
        life.or_fail(lambda: recovery.save_rings(self._context, txn))

    def before_forward(self, *, saves: bool) -> None:
        """Say that the forward comes now, if ``begin`` left the saving of old rows to it.

        Until then an abort puts nothing back, as nothing was overwritten. Does nothing to a window
        whose rows were saved when it began.

        Args:
            saves: the forward begins with ``CapturedWindows.save_in_forward``, for as many rows as
                the window has. Else the rows are saved now; if that fails, the window is DIRECT.

        Raises:
            Exception: what saving raised, under ``on_error="raise"``.
        """
        if not self._unsaved or self._state is None:
            return
        self._unsaved = False
        if saves:
            return
        try:
            self.save()
        except Exception as error:
            self.save_failed(error)
        except BaseException:
            self._life.finish(Event.FAIL)
            raise

    def _miss_saving(self, operation: str) -> None:
        """Treat a commit before ``before_forward`` as a failed save: nothing can be put back."""
        life, self._unsaved = self._life, False
        if allowed(life.state, Event.FALL_BACK):
            why = "the forward was to save the rows that drafts overwrite, and did not come"
            hint = "call before_forward right before the forward"
            self.save_failed(WindowStateError(operation, why, state=life.state.name, hint=hint))
