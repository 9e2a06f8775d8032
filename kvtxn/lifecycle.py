"""``Lifecycle``: the state of one window, the effect of a failure on it, and its end.

Every kind of window has one: a ``Window``, and a window over a captured forward. State changes,
recovery, counters, hooks and log events at the end of a window exist only here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from . import recovery
from .accepted_forms import SampledIds, as_counts
from .context import WindowContext
from .errors import IncompleteWindowError, WindowStateError, shown
from .executor import StagedLayer, Txn
from .hooks import Moment, ended
from .log import DEBUG, get_logger, shows
from .window_transitions import Event, WindowState, after, allowed

log = get_logger()

_Result = TypeVar("_Result")


class Lifecycle:
    """The way of one window through the state table.

    Args:
        context: the manager's context.
        number: the window's number.

    Attributes:
        state: the state of the window.
        missing: names of the layers that are not staged yet, in order.
        txn: the executor's side of the window; None until a group has slots.
        fallback_reason: the operation whose failure made the window DIRECT, or None.
    """

    __slots__ = (
        "_calls_hooks", "_late_error", "context", "fallback_reason", "missing", "number", "state",
        "txn",
    )  # fmt: skip

    def __init__(self, context: WindowContext, number: int) -> None:
        self.context = context
        self.number = number
        self.state = WindowState.OPEN
        self.missing: dict[str, None] = context.unstaged.copy()
        self.txn: Txn | None = None
        self.fallback_reason: str | None = None
        self._late_error: BaseException | None = None  # raised once the window has ended
        self._calls_hooks = False

    @property
    def has_ended(self) -> bool:
        """True if the state is final and no hook is being called."""
        return self.state.is_final and not self._calls_hooks

    def go(self, event: Event) -> None:
        """Move to the state that follows ``event``; KeyError if the table does not allow it."""
        self.state = after(self.state, event)

    def refuse(self, operation: str, event: Event, detail: str = "") -> NoReturn:
        """Raise the WindowStateError for an event that the state table does not allow.

        Args:
            operation: the caller's name for the call.
            event: its event, from which the error lists the states that allow it.
            detail: the subject of the error's sentence, such as a layer; empty: none.
        """
        state = self.state
        raise WindowStateError(
            operation,
            f"{detail + ' ' if detail else ''}is not allowed in state {state.name}",
            expected=" or ".join(each.name for each in WindowState if allowed(each, event)),
            got=state.name,
            state=state.name,
            hint="a window is single-use: open a new one"
            if state.is_final
            else "commit or abort this one",
        )

    def refuse_commit(self, operation: str, to_stage: str) -> NoReturn:
        """Raise the error for a commit now; ``to_stage``: the next step if a layer is missing.

        Raises:
            IncompleteWindowError: a layer is missing, and the window is not over.
            WindowStateError: otherwise.
        """
        if self.missing and not self.state.is_final:
            missing, total = list(self.missing), len(self.context.layers)
            raise IncompleteWindowError(
                operation,
                f"{len(missing)} of {total} layers are missing in state {self.state.name}, "
                f"first {missing[0]!r}",
                expected=f"{total} layers",
                got=total - len(missing),
                state=self.state.name,
                hint=f"{to_stage}, or abort; nothing was written",
            )
        self.refuse(operation, Event.COMMIT)

    # -- failures ------------------------------------------------------------------

    def go_direct(self, operation: str, error: Exception, *layers: StagedLayer) -> None:
        """Go to state DIRECT after a failure before commit, or end the window and raise.

        Rows of staged layers that wait are written now, since an accepted row may be among them;
        ``layers`` are not among ``txn.staged`` yet.
        """
        context, txn = self.context, self.txn
        assert txn is not None  # the executor acts on windows with slots only
        layers = (*txn.staged.values(), *layers)

        def repair() -> None:
            """Write on, or restore the caches and raise ``error``."""
            self.follow(recovery.go_direct(context, txn, operation, error, layers))  # noqa: F821

        try:
            self.or_fail(repair)
        finally:  # as in ``follow``
            del error

    def follow(self, failure: recovery.Failure | None) -> None:
        """Take the state that a failure leads to; None changes nothing.

        After a fallback the window goes on, and the error is kept. After any other failure the
        window has ended.

        Raises:
            BaseException: the failure's error, unless it is a fallback.
        """
        if failure is None:
            return
        if failure.event is not Event.FALL_BACK:
            self.finish(failure.event)
            try:
                raise failure.error
            finally:  # the error's traceback has this frame, which would keep the step's tensors
                del failure
        self.go(Event.FALL_BACK)
        self.fallback_reason, self._late_error = failure.operation, failure.error

    def or_fail(self, repair: Callable[[], _Result]) -> _Result:
        """Run a repair; if it raises, end in FAILED, unless it ended the window by itself."""
        try:
            return repair()
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """End in FAILED, since the bytes are unknown; a window that has ended stays as it is."""
        if not self.state.is_final:
            self.finish(Event.FAIL)

    # -- the end -------------------------------------------------------------------

    def finish(self, event: Event, accepted: Tensor | SampledIds | None = None) -> None:
        """Set the final state, call the hooks, count the window, and let go of its rows.

        ``COMMIT`` calls the hooks of ``on_commit``, any other event those of ``on_abort``; no hook
        is called for ``FAIL``, nor without slots. States that wait in a supplier are abandoned.

        Raises:
            KeyError: the state table does not allow the event.
        """
        self.go(event)
        try:
            if event is not Event.FAIL and self.txn is not None:
                moment: Moment = "on_commit" if event is Event.COMMIT else "on_abort"
                self._tell(moment, self.txn, accepted)
        finally:
            try:
                self._end(accepted)
            finally:
                if self.context.supplier is not None:
                    self.context.supplier.abandon()

    def surface(self) -> None:
        """Under ``on_error="raise"``, raise the first error that nothing was taken back for.

        It is a hook's, or that of a commit which could only be finished, since states were in.
        Called last.
        """
        if self._late_error is not None and self.context.on_error == "raise":
            raise self._late_error

    def _tell(self, moment: Moment, txn: Txn, accepted: Tensor | SampledIds | None) -> None:
        """Call the hooks; an error in a hook changes neither caches nor state.

        It is counted and logged, and the first one is kept for ``surface``.
        """
        callbacks = self.context.hooks[moment]
        if not callbacks:
            return
        counts = None if accepted is None else as_counts(accepted)
        supplier = self.context.supplier
        window = ended(
            *(self.number, self.state, txn, counts),
            complete=not self.missing,
            supplied=() if supplier is None else supplier.names,
        )
        self._calls_hooks = True
        try:
            for callback in callbacks:
                try:
                    callback(window)
                except Exception as error:
                    self._hook_failed(moment, error)
        finally:
            self._calls_hooks = False

    def _hook_failed(self, moment: Moment, error: Exception) -> None:
        """Count and log the error of a hook; the first one is kept."""
        error.add_note(f"kvtxn: from an {moment} hook; the window is {self.state.name}")
        errors = self.context.metrics.hook_errors
        errors[moment] += 1
        say = log.warning if errors[moment] == 1 else log.debug
        say("hook.failed", window=self.number, hook=moment, error=shown(error))
        self._late_error = self._late_error or error

    def _end(self, accepted: Tensor | SampledIds | None) -> None:
        """Count the final state, let go of the rows, end the manager's turn, and log the end.

        Rows that a captured commit reads again are kept.
        """
        self.context.metrics.windows[self.state.value] += 1
        self.context.stager.reset()
        self.context.on_end()
        if shows(DEBUG):
            log.debug(
                "window.end",
                window=self.number,
                state=self.state.value,
                accepted=None if accepted is None else as_counts(accepted).tolist(),
                never_written=self._never_written(accepted),
            )
        if self.txn is not None:
            if self._is_captured():
                self.context.captured.append(self.txn)
            else:
                self.txn.staged = {}

    def _is_captured(self) -> bool:
        """Tell whether a CUDA graph is capturing this window's commit, and so reads its rows."""
        on_gpu = self.context.device.type == "cuda"
        return on_gpu and torch.cuda.is_current_stream_capturing()

    def _never_written(self, accepted: Tensor | SampledIds | None) -> int:
        """Count the draft rows that were never written. Waits for the device: for debug events.

        They are all drafts after an abort, and the rejected ones after a commit; none if the window
        wrote its drafts through.
        """
        txn = self.txn
        if txn is None or not txn.waits:
            return 0
        drafts = sum(txn.layout.draft_len)
        if self.state is not WindowState.COMMITTED or accepted is None:
            return drafts if self.state is WindowState.ABORTED else 0
        return drafts - int(txn.layout.kept(as_counts(accepted)).sum())
