"""The windows of a model runner whose forward may be a replayed CUDA graph.

Knows no engine. Here stands what concerns *steps*: which batch gets a window, the pause after a
failure, the layers whose drafts wait. The windows are the library's, ``CapturedWindows``.

Whatever fails, the step ends as stock would end it, is counted by reason, and the next steps have
no window for a while; unless ``on_error="raise"``, under which the caches are restored and the
error surfaces.

Recurrent states that the engine's own kernels advance are in each window. A step that has none for
its rows commits its states by a window without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from ...captured_shared import StepPlan
from ...captured_window import CapturedWindow
from ...errors import IncompleteWindowError
from ...layers import LayerRef
from ...layout import RowLayout, to_device
from ...log import DEBUG, shows
from ...manager import TransactionManager
from ...row_io import LayerRows
from ...state_supplier import StateSupplier
from ...window_transitions import WindowState
from .step import Array
from .window_rows import check_settings, rows_of_window

#: Steps without a window after a first failure; doubled at each further one, up to the limit.
_REST: Final = 8
_LONGEST_REST: Final = 4096

#: Numbers of requests for which everything is prepared at the start.
_READY: Final = 256

#: Batches whose plan, or reason to have none, is remembered; the oldest is forgotten first.
_MOST_BATCHES: Final = 1024

_COMMITTED: Final = WindowState.COMMITTED
_DIRECT: Final = WindowState.DIRECT


class GraphSteps:
    """The windows of one model runner.

    Args:
        manager: over the target's layers, in the order of ``slots``' groups.
        slots: the runner's slot mappings, int64 ``[num_groups, n]``, filled before each forward.
        query_len: most rows that a request with drafts has.
        rows: where draft rows wait, see ``CapturedWindows``.
        states: commits the engine's recurrent states with the rows, see ``captured_windows``. It is
            told of a step after ``begin``, and before ``commit``.
        beside: let these windows be open beside others of the manager, see ``captured_windows``.

    Attributes:
        manager: as given.
        windows: the windows over the runner's forward, and their fixed tensors.
        query_len: as given.
        states: as given.
        layers: the target's, in the order of the forward.
        deferred: the policy is ``deferred``, so draft rows wait outside their slots.
        layout: the rows of requests with drafts, by drafts and settled rows of each.
        among_others: a window may have requests without drafts before its last one that has some.

    Raises:
        ConfigError: a setting has no effect, see ``check_settings``.
    """

    among_others: ClassVar[bool] = False

    def __init__(
        self,
        manager: TransactionManager,
        slots: Tensor,
        query_len: int,
        rows: LayerRows | None = None,
        *,
        states: StateSupplier | None = None,
        beside: bool = False,
    ) -> None:
        check_settings(manager.config)
        self.manager = manager
        self.layers = tuple(manager.layers.values())
        self.query_len = query_len
        self._window: CapturedWindow | None = None
        self.deferred = manager.policy == "deferred"
        self._undoes = manager.policy == "undo"
        self._slots = slots
        with torch.inference_mode(False):  # its tensors outlive the mode they are made in
            self.windows = manager.captured_windows(slots, rows, states=states, beside=beside)
        self._plans: dict[Hashable, StepPlan | str | None] = {}
        self._pause = _REST
        self._rest = 0
        self._alike = 0  # as ``begin`` was told of the last step that had a window
        #: Requests of steps that recur, see ``begin``, with what their commits need; 0: the next
        #: step is none of them.
        self._recurring = 0
        self._recurs: StepPlan
        self.states = states
        self._launches: Mapping[int, Callable[[], None]] = {}
        self._listeners, self._marks = self.windows.on_commit, self.windows.marks
        self._unopened = False  # a step that recurs is under way
        self._unopened_ends = 0  # of such steps; no metric counts them yet
        manager.metrics.put_off.append(self._count)
        self.layout = lru_cache(maxsize=_MOST_BATCHES)(
            lambda drafts, settled: RowLayout.build(drafts, settled, manager.device)
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device that the windows hold."""
        return self.windows.nbytes

    def warm_up(self) -> None:
        """Launch every kernel that a step may launch, and plan the usual steps.

        These have up to 256 requests with all of their drafts each, as far as windows have rows.
        Caches stay as they are. The runner's slots are overwritten, so no step may be under way.
        """
        most = min(_READY, self.manager.config.max_rows // self.query_len)
        drafts = self.query_len - 1
        with torch.inference_mode():
            usual = [self.layout((drafts,) * n, (1,) * n) for n in range(1, most + 1) if drafts]
            self.windows.warm_up(usual)

    # -- a step ---------------------------------------------------------------------

    def begin(
        self,
        drafts: Array | None,
        lengths: Array,
        prefilling: Array,
        replayed: bool = False,
        alike: int = 0,
    ) -> None:
        """Begin the step whose forward comes next; its slots are in place.

        A window of the step before that was not committed is aborted first. No window is opened
        without drafts, or where the step is bypassed, which is counted.

        A step *recurs* if its batch has the same layout as the last one, whose rows and states can
        be committed by one captured launch, and its drafts are marked already. Its window is opened
        when somebody asks for it; the usual commit does not: it makes the launch, and the step is
        counted as a committed window.

        Args:
            drafts: numpy int32 ``[num_requests]``, draft rows of each request; None without drafts.
            lengths: numpy int32 ``[num_requests]``, rows of each request, drafts included.
            prefilling: numpy bool ``[num_requests]``, True for requests still at their prompt.
            replayed: the forward is one captured graph, and ``before_replay`` will be called.
            alike: the number of requests, if each of them has ``query_len`` rows, all but one of
                them drafts, and none is at its prompt. By it a plan is found sooner than by the
                arrays, which have to say the same. 0: not known.
        """
        recurs = alike and alike == self._recurring and not self._unopened
        if recurs and self._marks.shown is self._recurs:  # nobody has marked other rows
            self._unopened = True
            return
        if self._window is not None or self._unopened:
            # Its slots are gone, unless they were saved with its rows: hooks are told of none.
            self.abandon(replayed=None if self._undoes else False)
        elif self.states is not None:
            self.states.abandon()  # of a step that was dropped
        self._recurring, self._alike = 0, alike
        plan: StepPlan | str | None = None
        if drafts is not None:
            key: Hashable = alike
            if not alike:
                key = (drafts.tobytes(), lengths.tobytes(), prefilling.tobytes())
            plan = self._plans.get(key, "")
            if plan.__class__ is not StepPlan or self._rest:
                plan = self._without(plan, key, drafts, lengths, prefilling)
        if plan is not None:
            self._window = self.windows.begin(plan, replayed)  # type: ignore[arg-type]
        elif self.deferred:
            self._unmark()

    def _without(self, plan: StepPlan | str | None, key: Hashable, *batch: Any) -> StepPlan | None:
        """Return the plan for a step's window; None if the step gets none.

        The reason is counted, but for a batch without drafts. Planning that fails counts as a
        fallback, or raises under ``on_error="raise"``. A step after a failure is counted as
        "resting".

        Args:
            plan: the plan or the reason that is known for such a batch; "" if none is: then the
                batch is planned, and the result remembered.
            key: what such batches have in common.
            *batch: as for ``_classify``.
        """
        if plan == "":
            try:
                plan = self._classify(*batch)
            except Exception as error:
                self._failed("begin", error)
                return None
            if len(self._plans) >= _MOST_BATCHES:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan
        if isinstance(plan, str):
            self.manager.bypass(plan)
            return None
        if plan is not None and self._rest > 0:
            self._rest -= 1
            self.manager.bypass("resting")
            return None
        return plan

    def _unmark(self) -> None:
        """Clear the marks of draft rows, so that the forward writes every row to its own slot.

        A first failure counts as a fallback and is tried again, or raises under
        ``on_error="raise"``.

        Raises:
            Exception: they cannot be cleared: the rows would be lost.
        """
        try:
            self.windows.mark(None)
        except Exception as error:
            self._failed("begin", error)
            self.windows.mark(None)  # if this fails too, rows would be lost: let it out

    def _classify(self, drafts: Array, lengths: Array, prefilling: Array) -> StepPlan | str | None:
        """Return a batch's plan, or the reason why the batch has no window; None without drafts.

        Raises:
            SlotMappingError: a request has more drafts than rows, or less than none.
        """
        most = self.query_len, self.manager.config.max_rows
        found = rows_of_window(drafts, lengths, prefilling, *most, among_others=self.among_others)
        return self.windows.plan(self.layout(*found)) if isinstance(found, tuple) else found

    def save_in_forward(self, num_rows: int) -> Callable[[], None] | None:
        """Return a launch that a captured forward begins with, so that it saves old rows itself.

        Launches it once, which compiles its kernel; no row is saved for a window by that. A failure
        counts as a fallback, or raises under ``on_error="raise"``.

        Args:
            num_rows: rows of the forward.

        Returns:
            The launch; None if these windows save no rows, or if launching it fails.
        """
        try:
            save = self.windows.save_in_forward(num_rows)
            if save is not None:
                save()
        except Exception as error:
            self.miss(error)
            return None
        return save

    def before_replay(self, *, saves: bool) -> None:
        """Tell the step's window that a captured forward is replayed now; nothing without a window.

        Args:
            saves: the forward begins with ``save_in_forward``'s launch.
        """
        window = self._window  # unopened ones save nothing
        if window is not None:
            window.before_forward(saves=saves)

    @property
    def window(self) -> CapturedWindow | None:
        """The window of the step under way; None if it has none.

        That of a step that recurs is opened by this.
        """
        if self._unopened:
            self._count()
            self._unopened, self._recurring = False, 0  # should its end not come, the next sees it
            self._window = self.windows.begin(self._recurs)
        return self._window

    @property
    def waits(self) -> bool:
        """True while drafts wait outside their slots: a window is open and has not fallen back."""
        window = self._window
        return self._unopened or (window is not None and window.state is not _DIRECT)

    def note_staged(self, ref: LayerRef) -> None:
        """Tell the open window that one more layer's drafts wait; outside of graphs alone."""
        assert self.window is not None
        self.window.note_staged(ref)

    def commit(self, sampled: Tensor, batch: Tensor | None = None) -> None:
        """Make the accepted rows durable, and advance the states by them. Does not wait.

        Without a window only states that wait are committed; without these nothing is done. A
        commit that fails is finished as ``on_error`` says.

        Args:
            sampled: int ``[num_requests]`` of the batch, on the device: the number of tokens
                sampled for each.
            batch: as for ``CapturedWindow.commit_sampled``.
        """
        quiet = self._unopened and not self._listeners and not shows(DEBUG)
        launch = self._launches.get(sampled.data_ptr()) if quiet else None
        states = self.states
        if (
            launch is None
            or batch is not None
            or states is None
            or states.replays != self._recurring
            or sampled.dtype is not torch.int32  # all of the window's checks would take long here
        ):
            self._commit(sampled, batch)
            return
        try:
            launch()
        except BaseException as error:
            self._commit(sampled, batch, error)
            return
        self._unopened = False
        states.abandon()  # they are in
        self._unopened_ends += 1

    def _count(self) -> None:
        """Count windows that ended without being opened as committed, since the last call."""
        count, self._unopened_ends = self._unopened_ends, 0
        if count:
            self.windows.count_committed(self._recurs, count)

    def _commit(
        self, sampled: Tensor, batch: Tensor | None, failed: BaseException | None = None
    ) -> None:
        """Commit the step's window; without one only states that wait, else nothing.

        A window over rows that does not end as committed starts a rest without windows. One that
        does ends the growth of rests, and its layout may recur.

        Args:
            sampled: as for ``commit``.
            batch: as for ``commit``.
            failed: what the captured launch of the whole commit raised; None if it was not made.
        """
        window, states = self.window, self.states
        if window is None:
            if states is None or not states.waits:
                return
            window = self._window = self.windows.begin_states()
        try:
            if failed is not None:
                state = window.commit_failed(sampled, failed)
            else:
                state = self._commit_window(window, sampled, batch)
        except BaseException:
            if window.state.is_final:
                self._window = None  # else ``sampled`` was refused, and the next step aborts it
            raise
        self._window = None
        if not window.plan.layout.num_rows:
            return  # it says nothing about windows over rows
        if state is not _COMMITTED:
            self._start_rest()
            return
        self._pause = _REST
        launches = window.plan.launches
        if launches is not None and launches.with_states and self.deferred:
            self._count()
            self._recurring, self._recurs = self._alike, window.plan
            self._launches = launches.with_states

    def _commit_window(
        self, window: CapturedWindow, sampled: Tensor, batch: Tensor | None
    ) -> WindowState:
        """Commit a window, after a fallback if it lacks layers' drafts, and return its state."""
        try:
            return window.commit_sampled(sampled, batch)
        except IncompleteWindowError as error:  # something else wrote the rows of other layers
            self.fall_back(error)
            return window.commit_sampled(sampled, batch)

    def abandon(self, *, replayed: bool | None = None) -> None:
        """Abort the step's window, so that no draft row stays in a cache; or drop its states alone.

        Args:
            replayed: see ``CapturedWindow.abort``.
        """
        window, self._recurring = self.window, 0
        if window is not None and not window.state.is_final:
            window.abort(replayed=replayed)
        elif self.states is not None:
            self.states.abandon()
        self._window = None  # kept until here: the next step aborts what an interrupt left open

    # -- failures -------------------------------------------------------------------

    def fall_back(self, error: Exception) -> None:
        """Give up the open window after its attention failed, and write the waiting drafts.

        The caller writes the rows of the layers that follow, as stock does. Under
        ``on_error="raise"`` the error is raised.
        """
        assert self.window is not None
        self.window.fall_back("attend", error, replayed=False)

    def miss(self, error: Exception) -> None:
        """Count and log the failure of preparations for a step, and begin a rest without windows.

        Raises:
            Exception: ``error``, under ``on_error="raise"``.
        """
        self._failed("begin", error)

    def _failed(self, operation: str, error: Exception) -> None:
        """Count and log the failure of a step that has no window yet, and begin a rest.

        Under ``on_error="raise"`` raise the error instead.
        """
        if self.manager.config.on_error == "raise":
            raise error
        self.manager.note_fallback(operation, error)
        self._start_rest()

    def _start_rest(self) -> None:
        """Let the next 8 steps have no window, twice as many each time until a commit, up to 4096.

        No step recurs until a commit.
        """
        self._recurring = 0
        self._rest, self._pause = self._pause, min(2 * self._pause, _LONGEST_REST)


class PackedGraphSteps(GraphSteps):
    """The windows of a model runner whose requests with drafts may lie anywhere in a batch.

    The V1 model runner keeps requests where they were when others leave, so requests with drafts do
    not lead the batch, and its slots lie in one buffer per KV-cache group. Before each forward the
    slots of the rows that matter are copied together; from there on it is a step like any other.
    Under ``deferred`` the fixed tensors mark drafts among the batch's first rows. So a window
    begins with the batch's first request and ends with the last one that has drafts, and requests
    between them that have none take part with all their rows settled. A step is bypassed if one of
    those has more rows than a request with drafts may have: as many as a part of its prompt.

    Args:
        manager: over the target's layers, in the order of the groups.
        query_len: most rows that a request with drafts has.
        vocab_size: sampled ids at or above it do not count as tokens.
        rows: where draft rows wait, see ``CapturedWindows``.
        states: as for ``GraphSteps``.
    """

    among_others = True

    def __init__(
        self,
        manager: TransactionManager,
        query_len: int,
        vocab_size: int,
        rows: LayerRows | None = None,
        *,
        states: StateSupplier | None = None,
    ) -> None:
        shape = (len(manager.groups), manager.config.max_rows)
        slots = torch.full(shape, -1, dtype=torch.int64, device=manager.device)
        super().__init__(manager, slots, query_len, rows, states=states)
        self._vocab_size = vocab_size
        self._requests: Tensor | None = None
        self._index = lru_cache(maxsize=512)(
            lambda places: to_device(places, manager.device, torch.int64)
        )

    def begin_among(
        self, drafts: Array | None, lengths: Array, prefilling: Array, slots: Sequence[Tensor]
    ) -> None:
        """Copy the slots, and begin the step whose forward comes next; abort an open window first.

        Under ``deferred``, or if requests with drafts lead the batch, the first rows are copied;
        else only those of requests with drafts, which the window has alone. Without drafts, or if
        the copy fails, which counts as a fallback, the step has no window.

        Args:
            drafts: numpy int ``[num_requests]``, draft rows of each request; None without drafts.
            lengths: numpy int ``[num_requests]``, rows of each request, drafts included.
            prefilling: numpy bool ``[num_requests]``, True for requests still at their prompt.
            slots: int64 ``[num_tokens or more]`` for each group, on the device, filled.
        """
        if self.window is not None:
            self.abandon()  # in its own slots, which are filled anew below
        self._requests = None
        if drafts is None or not (which := drafts.nonzero()[0].tolist()):
            self.begin(None, lengths, prefilling)
            return
        try:
            if self.deferred or which[-1] == len(which) - 1:
                self._copy(slots, int(lengths[: which[-1] + 1].sum()))
            else:
                self._gather(slots, which, lengths)
                drafts, lengths, prefilling = (
                    part[which] for part in (drafts, lengths, prefilling)
                )
        except Exception as error:
            self._failed("begin", error)
            drafts = None
        self.begin(drafts, lengths, prefilling)

    def _copy(self, slots: Sequence[Tensor], count: int) -> None:
        """Copy the slots of the batch's first ``count`` rows; nothing if a window takes fewer."""
        if count <= self._slots.shape[1]:  # else the step has no window
            for line, source in zip(self._slots, slots, strict=True):
                line[:count].copy_(source[:count])

    def _gather(self, slots: Sequence[Tensor], which: list[int], lengths: Array) -> None:
        """Copy the slots of all rows of the requests ``which``, and note these for ``commit_ids``.

        Nothing is done if they have more rows than a window takes.
        """
        ends = lengths.cumsum().tolist()
        rows = tuple(row for r in which for row in range(ends[r] - int(lengths[r]), ends[r]))
        if len(rows) > self._slots.shape[1]:
            return
        index = self._index(rows)
        for line, source in zip(self._slots, slots, strict=True):
            torch.index_select(source, 0, index, out=line[: len(rows)])
        self._requests = self._index(tuple(which))

    def commit_ids(self, ids: Tensor) -> None:
        """Make the rows durable that the ids accept, and advance the states; does not wait.

        Without a window only states are advanced, if there are any.

        Args:
            ids: int ``[num_requests, n]`` of the batch, on the device: sampled token ids, -1
                where there is none. Ids beyond the vocabulary are no accepted drafts.
        """
        batch = None
        if self.states is not None:
            # As the engine counts them, which finds the past of a convolution by this count.
            batch = (ids != -1).sum(1, dtype=torch.int32)
        if self.window is None:
            if batch is not None:
                self.commit(batch)
            return
        if self._requests is not None:
            ids = ids.index_select(0, self._requests)
        sampled = ((ids >= 0) & (ids < self._vocab_size)).sum(1, dtype=torch.int32)
        self.commit(sampled, batch)
