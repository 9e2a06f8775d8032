"""``CapturedWindow``: one transaction over a captured forward, cheap on the host.

It is a ``Window``. The usual course of a step is written a second time here, because its host
time is counted in tenths of microseconds: ``commit_sampled`` makes one prepared launch and takes
the label from the state table. In every other case (a failure, an abort, hooks, debug events, no
prepared launches) the window first makes its ``Lifecycle``, then calls the code of all windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Final

import torch
from torch import Tensor

from . import recovery
from .accepted_forms import SIGNED, Accepted, as_accepted
from .captured_launches import LayoutLaunches
from .captured_shared import OPEN, STAGED, SharedPlaces, StepPlan
from .compile_guard import never_compiled
from .context import WindowContext
from .errors import AcceptanceError, WindowStateError, shown
from .executor import Txn
from .host_values import described, is_plain
from .layers import LayerRef
from .layout import RowLayout
from .lifecycle import Lifecycle
from .log import get_logger
from .stage_checks import check_ref
from .state_supplier import StateSupplier
from .window import Window
from .window_transitions import TRANSITIONS, Event, WindowState, allowed

log = get_logger()

_INT32: Final = torch.int32
_COMMITTED: Final = TRANSITIONS[STAGED, Event.COMMIT]


def _nothing() -> None:
    """Do nothing, in place of the launch of a window without rows."""


def _launches(
    supplier: StateSupplier, launches: LayoutLaunches, sampled: Tensor, num_requests: int
) -> Callable[[], None] | None:
    """Return the launches of states that recur, to be captured together with those of the rows.

    None where they are not to be captured, or after an error, which is logged at debug level.
    """
    try:
        if launches.recurs_with_states(sampled):
            return supplier.launches(sampled, num_requests)
    except Exception as error:  # both commits still work, one after the other
        log.debug("window.not_captured", error=shown(error))
    return None


def _capture(
    supplier: StateSupplier, launches: LayoutLaunches, sampled: Tensor, states: Callable[[], None]
) -> None:
    """Capture a commit of rows with that of the states, which are in; rows are still to come.

    An error is logged at debug level, and then nothing is captured.
    """
    try:
        launches.capture_with(sampled, states, supplier.capture)
    except Exception as error:
        log.debug("window.not_captured", error=shown(error))


class CapturedWindow(Window):
    """A transaction over a captured forward; made by ``CapturedWindows.begin``, used once.

    Under ``deferred`` the window is OPEN until ``note_staged`` has noted every layer, or until its
    commit: a commit without any noted layer means that a graph was replayed. Under ``undo`` and
    ``direct`` the forward writes the rows by itself, and the window is STAGED from the start.

    Args:
        shared: the tensors that all windows over this forward share.
        number: the window's number, counted from 0 for each manager.
        plan: the facts about the window's layout.
    """

    # The class attributes below replace ``Window.__init__``, so that a usual step sets no more.
    _written_by = "caller"
    _to_stage = "call note_staged for every layer, or fall_back"
    _only_holds = False
    _noted: dict[str, LayerRef] | None = None
    _states_in = False  # True once the states of a supplier are committed
    _unsaved = False  # True while the old rows are still to be saved, see ``before_forward``

    def __init__(self, shared: SharedPlaces, number: int, plan: StepPlan) -> None:
        self.number = number
        self._shared = shared
        self.plan = plan
        #: None as soon as the window has a lifecycle, which then has the state.
        self._state: WindowState | None = shared.first_state

    @property
    def _context(self) -> WindowContext:  # type: ignore[override]  # one store less in each step
        return self._shared.context

    @property
    def state(self) -> WindowState:
        """The state of the window."""
        state = self._state
        return self._life.state if state is None else state

    @property
    def fallback_reason(self) -> str | None:
        """The operation whose failure made the window DIRECT, or None."""
        return self._life.fallback_reason if self._state is None else None

    @property
    def layout(self) -> RowLayout:
        """The layout; the window's rows are the first rows of the batch."""
        return self.plan.layout

    @property
    def num_rows(self) -> int:
        """Rows of the window."""
        return self.plan.layout.num_rows

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers that the window still waits for; none if it waits for no layer."""
        waits = self.state is OPEN
        noted = self._noted or {}
        return tuple(name for name in self._context.layers if waits and name not in noted)

    @property
    def has_ended(self) -> bool:
        """True if the window is over and calls no hooks any more."""
        state = self._state
        return self._life.has_ended if state is None else state.is_final

    def __repr__(self) -> str:
        return f"<CapturedWindow {self.number} {self.state.name}, {self.num_rows} rows>"

    def note_staged(self, ref: LayerRef) -> None:
        """Note that one more layer's drafts wait for commit; for a forward that is not replayed.

        With the last layer an OPEN window is STAGED.

        Args:
            ref: the layer. Noting a layer again changes nothing: its rows wait at one place.

        Raises:
            WindowStateError: the window is over.
            LayerError: not the manager's layer.
        """
        state = self._state
        if state is not OPEN and self.state.is_final:
            self._life.refuse("note_staged", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        layers = self._shared.context.layers
        if ref is None or layers.get(getattr(ref, "name", "")) is not ref:
            check_ref(ref, layers, layers, "window")
        noted = self._noted
        if noted is None:
            noted = self._noted = {}
        if ref.name in noted:
            return
        noted[ref.name] = ref
        if self._state is None:
            self._take([ref])
        elif len(noted) == self._shared.num_layers:
            self._state = STAGED

    def stage(self, ref: LayerRef, *rows: object, **slots: object) -> None:
        """Refuse the rows: the captured forward stages them.

        Raises:
            WindowStateError: always.
        """
        if self.state.is_final:
            self._life.refuse("stage", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        raise WindowStateError(
            "stage",
            f"the captured forward stages the rows of {getattr(ref, 'name', ref)!r}",
            state=self.state.name,
            hint="call note_staged(ref) where the host sees the forward",
        )

    # -- old rows, which an abort puts back ---------------------------------------------------

    def save(self) -> None:
        """Copy the rows that the drafts overwrite; a failure comes out, see ``save_failed``."""
        self._shared.save(self.plan.launches)
        if self.plan.launches is None:
            for group in self._context.groups:
                self._context.save(self._txn, group)

    def save_failed(self, error: Exception) -> None:
        """Go DIRECT, since no old row is there to be put back; or abort and raise ``error``.

        ``TxnConfig.on_error`` says which of the two.
        """
        self._unsaved = self.plan.launches is not None  # one launch saves them all, or none
        life, self._unsaved = self._life, False
        life.go_direct("begin", error)
        life.missing.clear()  # the forward writes every row, and no state
        txn = self._txn
        if self._context.policy == "deferred":
            stored = self._shared.stored(txn.layout.num_rows)
            txn.staged.update({name: row for name, row in stored.items() if row.ref.states})
        life.or_fail(lambda: recovery.save_rings(self._context, txn))

    def before_forward(self, *, saves: bool) -> None:
        """Say that the forward comes now, if ``begin`` left the saving of old rows to it.

        Until then an abort puts nothing back, as nothing was overwritten. Does nothing to a window
        whose rows were saved when it began, that fell back, or that is over.

        Args:
            saves: the forward begins with ``CapturedWindows.save_in_forward``, for as many rows as
                the window has. Else the rows are saved now; if that fails, the window is DIRECT.

        Raises:
            Exception: what saving raised, under ``on_error="raise"``.
        """
        if not self._unsaved or self.state is not STAGED:
            return
        self._unsaved = False
        try:
            if not saves:
                self.save()
            if self._state is None:  # the lifecycle was made before, without old rows
                self._shared.fill(self._txn, saved=True)
        except Exception as error:
            self.save_failed(error)
        except BaseException:
            self._life.finish(Event.FAIL)
            raise

    def _miss_saving(self, operation: str) -> None:
        """Treat a commit before ``before_forward`` as a failed save: nothing can be put back.

        A window that cannot fall back any more stays as it is.
        """
        life, self._unsaved = self._life, False
        if allowed(life.state, Event.FALL_BACK):
            why = "the forward was to save the rows that drafts overwrite, and did not come"
            hint = "call before_forward right before the forward"
            self.save_failed(WindowStateError(operation, why, state=life.state.name, hint=hint))

    # -- the end of a step ----------------------------------------------------------

    def commit_sampled(self, sampled: Tensor, batch: Tensor | None = None) -> WindowState:
        """Commit the drafts that were sampled: for each request, its sampled tokens less one.

        One prepared launch; nothing waits for the device. ``commit`` takes accepted drafts in any
        form, and takes longer. States of a ``StateSupplier`` are committed before the rows; where
        both commits were captured together, by one launch.

        Args:
            sampled: int ``[num_requests]`` or longer, on the caches' device: the number of tokens
                sampled for each request. Counts clamp to the draft lengths.
            batch: the same for the requests of the step's batch, which states take in, if the
                window's are not the first of them. None: ``sampled`` has all of them.

        Returns:
            The window's final state: COMMITTED, or FELL_BACK after a failure.

        Raises:
            AcceptanceError: ``sampled`` is not such a tensor; the window stays as it is.
            IncompleteWindowError: some layers were noted as staged and some were not; nothing was
                written, and the window stays open.
            WindowStateError: the window is over.
            KVTxnError: a state of a ``StateSupplier`` could not be committed; the window FAILED.
            Exception: under ``on_error="raise"``, the launch's own error, after the caches were
                restored, or, once states were in, after all accepted rows were; or a hook's error.
        """
        if self._unsaved:
            self._check(sampled, batch)
            self._miss_saving("commit_sampled")
        try:
            if self._shared.supplier is not None:
                ended = self._commit_states(self._shared.supplier, sampled, batch)
                if ended is not None:
                    return ended
            state, plan = self._state, self.plan
            launches, replay = plan.launches, None
            if state is not STAGED and (state is not OPEN or self._noted is not None):
                launches = None  # the window is over, or waits for layers: no launch can end it
            if launches is not None and sampled.__class__ is Tensor and sampled.dtype is _INT32:
                try:  # a captured commit reads its counts at one address, which no other device has
                    replay = launches.replays.get(sampled.data_ptr())
                except RuntimeError:
                    replay = None  # a sparse tensor has no address; ``_check`` refuses it
            if (
                replay is None
                or sampled.dim() != 1
                or sampled.numel() < plan.num_requests
                or not sampled.is_contiguous()
            ):
                if self._shared.supplier is None:  # else it was checked before the states
                    self._check(sampled)
                if launches is None:
                    return self._commit_any(sampled)
                replay = partial(launches.commit, sampled)
            return self._commit_by(replay, sampled)
        except BaseException:
            if self._states_in:  # no abort could take them back
                self._life.fail()
            raise

    def _commit_states(
        self, supplier: StateSupplier, sampled: Tensor, batch: Tensor | None
    ) -> WindowState | None:
        """Commit the states, and with them the rows, if one launch commits both or there are none.

        Everything that can refuse the commit comes first. Returns the final state of the window;
        None if its rows are still to be committed.
        """
        plan, launches, state = self.plan, self.plan.launches, self._state
        ends = state is STAGED or (state is OPEN and not self._noted)  # as after a replay
        self._check(sampled, batch)
        if not ends:
            self._check_staged()
        states = None
        if (
            launches is not None
            and ends
            and batch is None
            and supplier.replays == plan.num_requests
            and sampled.dtype is _INT32
            and sampled.is_contiguous()
        ):
            launch = launches.with_states.get(sampled.data_ptr())
            if launch is not None:
                return self._commit_by(launch, sampled, joint=True)
            states = _launches(supplier, launches, sampled, plan.num_requests)
        error = None
        try:
            if supplier.waits:
                error = recovery.commit_states(
                    self._shared.context, self.number, sampled if batch is None else batch
                )
                self._states_in = True
        except BaseException:
            self._life.fail()
            raise
        if self._state is None:
            self._txn.states_in = self._states_in
        if error is not None and self.state is not WindowState.DIRECT:
            counts = self._counts(sampled)
            self._end_by(
                lambda txn: recovery.finish_rows(self._context, txn, counts, error), counts
            )
            return self.state
        if launches is not None and states is not None:
            _capture(supplier, launches, sampled, states)
        return self._commit_by(_nothing, sampled) if ends and not plan.layout.num_rows else None

    def _commit_by(
        self, launch: Callable[[], None], sampled: Tensor, *, joint: bool = False
    ) -> WindowState:
        """Commit by a launch that has its counts already, and return the final state.

        Args:
            launch: commits all rows. If it raises, ``commit_failed`` commits in its place.
            sampled: the counts as ``commit_sampled`` takes them, for ``commit_failed`` and hooks.
            joint: the launch commits all states of a supplier, too.
        """
        shared = self._shared
        in_short = shared.quiet and not shared.on_commit  # nobody is to be told
        try:
            launch()
        except BaseException as error:
            return self.commit_failed(sampled, error)
        if in_short:  # as in ``Lifecycle.finish``
            self._state = _COMMITTED
            shared.metrics.layer_calls += self.plan.stage_operations
            shared.outcomes["committed"] += 1
            shared.turn.window = None
            if shared.supplier is not None:
                shared.supplier.abandon()
            return _COMMITTED
        self._states_in |= joint
        try:
            self._take_the_rest()
            self._life.finish(Event.COMMIT, self._counts(sampled))
        except BaseException:  # the caches have the rows, but no label says so
            self._life.fail()
            raise
        self._life.surface()
        return self.state

    def commit_failed(self, sampled: Tensor, error: BaseException) -> WindowState:
        """Commit after a launch that was to commit the whole window raised, and wrote nothing.

        For callers that make a launch of ``LayoutLaunches.with_states`` by themselves.

        Args:
            sampled: as for ``commit_sampled``.
            error: what the launch raised.

        Returns:
            FELL_BACK: the reference committed the rows, and the supplier its states.

        Raises:
            KVTxnError: as ``commit_sampled`` does.
            BaseException: ``error``, after an interrupt, or under ``on_error="raise"``.
        """
        if not isinstance(error, Exception):  # interrupted half-way: nothing can be promised
            self._life.fail()
            raise error
        self._check_staged()
        counts, context = self._counts(sampled), self._context
        waiting = None if context.supplier is None or self._states_in else sampled
        self._end_by(
            lambda txn: recovery.commit_failed(context, txn, counts, txn.saved, error, waiting),
            counts,
        )
        return self.state

    def _end_by(self, repair: Callable[[Txn], recovery.Failure], counts: Tensor) -> None:
        """End the window by a repair of its commit, or restore the caches and raise."""
        self._take_the_rest()
        life = self._life

        def finish() -> None:
            """Repair the commit, and end the window as the repair says."""
            life.follow(repair(self._txn))
            life.finish(Event.COMMIT, counts)

        life.or_fail(finish)
        life.surface()

    def commit(self, accepted: Accepted) -> None:
        """Make exactly the accepted draft rows durable; see ``Window.commit``.

        Raises:
            AcceptanceError: the windows have a ``StateSupplier``, whose states need
                ``commit_sampled``; the window stays as it is. Else as ``Window.commit`` does.
        """
        if self._shared.supplier is not None:
            raise AcceptanceError(
                "commit",
                "states take in what the whole batch sampled",
                expected="the tokens sampled for each request of the batch",
                got="the accepted drafts of the window's requests",
                hint="call commit_sampled",
            )
        opens = self._noted is None and self.state is OPEN
        if self._unsaved or opens:
            accepted = as_accepted(accepted, self.layout, self._context.device)
        if self._unsaved:
            self._miss_saving("commit")
        if opens:
            self._take_the_rest()
        super().commit(accepted)

    def _commit_any(self, sampled: Tensor) -> WindowState:
        """Commit as any window does, without prepared launches, and return the final state.

        Raises:
            IncompleteWindowError: the window waits for some of its layers.
            WindowStateError: the window is over.
        """
        self._check_staged()
        super().commit(self._counts(sampled))
        return self.state

    def _check_staged(self) -> None:
        """Refuse a commit of a window that is over, or still waits for some of its layers.

        If no layer was noted, every layer counts as staged from now on.

        Raises:
            IncompleteWindowError: the window waits for some of its layers.
            WindowStateError: the window is over.
        """
        if self._noted is None and self.state is OPEN:
            self._take_the_rest()
        life = self._life
        if life.missing or (life.state, Event.COMMIT) not in TRANSITIONS:
            life.refuse_commit("commit_sampled", self._to_stage)

    def _check(self, sampled: object, batch: object = None) -> None:
        """Refuse, with an AcceptanceError, what ``commit_sampled`` does not take."""
        if batch is not None:
            self._check(batch)
        if (
            isinstance(sampled, Tensor)
            and sampled.dtype in SIGNED
            and is_plain(sampled)  # asked first: a nested tensor has no shape
            and sampled.ndim == 1
            and sampled.shape[0] >= self.plan.num_requests
            and sampled.get_device() == self._shared.device
            and sampled.is_cpu == self._shared.on_host
        ):
            return
        raise AcceptanceError(
            "commit_sampled",
            "sampled does not fit the window",
            expected=f"signed int [{self.plan.num_requests}] or longer on {self._context.device}",
            got=described(sampled, where=True),
            hint="pass the number of tokens sampled for each request: its accepted drafts and one "
            "more; commit() takes accepted drafts in other forms",
        )

    def fall_back(self, operation: str, error: Exception, *, replayed: bool | None = None) -> None:
        """Give the window up because the caller's own code failed; see ``Window.fall_back``.

        Args:
            operation: see ``Window.fall_back``.
            error: see ``Window.fall_back``.
            replayed: says how far the forward had come. Pass True after a replay of the graph: all
                layers have made their drafts, and kvtxn writes these now. Pass False if the forward
                ran without a graph and failed half-way: kvtxn writes the drafts of the layers that
                ``note_staged`` was called for, and the caller writes those of all others itself;
                it goes on to note layers with states, whose rows still wait for the commit.
                None takes False if any layer was noted, and True otherwise; a commit decides alike.
        """
        whole = not self._noted if replayed is None else replayed
        if whole and self.state is OPEN:
            self._take_the_rest()
        super().fall_back(operation, error)

    @never_compiled
    def abort(self, *, replayed: bool | None = None) -> None:
        """Take every draft row back; see ``Window.abort``.

        Args:
            replayed: says whether the forward wrote its settled rows, which ``on_abort`` hooks are
                told of. Pass False if the forward did not come to its end: the hooks are told of no
                row. None takes False if some layers were noted and some were not, and True
                otherwise; a commit decides alike. It is False if ``before_forward`` was to come.
        """
        if not self.state.is_final:
            if self._unsaved:
                replayed = False
            if replayed is not False and not self._noted:
                self._take_the_rest()
            elif replayed is False and self.state is STAGED and not self._noted:
                self._life.missing.update(self._context.unstaged)  # no layer's rows are there
        super().abort()

    def _counts(self, sampled: Tensor) -> Tensor:
        """Return the accepted drafts of each request, int64 ``[num_requests]``: tokens less one.

        On the host the counts are clamped to the draft lengths; on the device, whoever reads them
        clamps them.
        """
        counts = sampled[: self.plan.layout.num_requests].long() - 1
        if not counts.is_cpu:
            return counts  # clamped where they are compared with row positions
        return counts.clamp(min=0).minimum(torch.tensor(self.plan.layout.draft_len))

    # -- a window like any other -------------------------------------------------------

    @cached_property
    def _life(self) -> Lifecycle:  # type: ignore[override]  # made when it is first needed
        """The window's lifecycle, with its slots and the rows that wait or were saved."""
        assert self._state is not None
        life = Lifecycle(self._context, self.number)
        ended = self._state.is_final
        life.txn = self._context.new_txn(self.plan.layout, self.number, ended=ended)
        life.txn.drafts_alone, life.txn.states_in = True, self._states_in
        life.state = self._state
        if self._state is not OPEN:
            life.missing.clear()
        if not ended:
            self._shared.fill(life.txn, saved=not self._unsaved)
            self._context.metrics.layer_calls += self.num_rows * self._shared.num_supplied
        self.__dict__["_life"], self._state = life, None
        if not ended:
            self._take(self._context.refs if life.state is STAGED else (self._noted or {}).values())
        return life

    @property
    def _txn(self) -> Txn:
        """The lifecycle's ``Txn``: such a window has slots from the start."""
        assert self._life.txn is not None
        return self._life.txn

    def _take(self, refs: Iterable[LayerRef]) -> None:
        """Move layers whose drafts wait from ``missing`` to the lifecycle's ``Txn``; count them.

        With the last missing layer an OPEN window is STAGED.
        """
        life, txn, shared = self._life, self._txn, self._shared
        for ref in refs:
            if txn.waits or (ref.states and shared.context.policy == "deferred"):
                stored = shared.stored(self.num_rows)
                txn.staged[ref.name] = stored[ref.name]
                self._context.metrics.layer_calls += self.num_rows
            life.missing.pop(ref.name, None)
        if not life.missing and life.state is OPEN:
            life.go(Event.STAGE_LAST)

    def _take_the_rest(self) -> None:
        """Stage every layer of an OPEN window: a graph was replayed, so no layer was noted."""
        life = self._life
        if life.state is OPEN:
            self._take(self._context.refs)
