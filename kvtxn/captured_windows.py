"""``CapturedWindows``: windows over a captured forward, one after another over the same tensors.

A captured forward (a CUDA graph) cannot take new arguments, so everything that changes from step
to step lies in fixed tensors: ``position`` marks the draft rows, ``rows`` holds them until commit,
and the engine's own slot mappings are read in place. While no row is marked as a draft, the same
graph writes every row into the cache, as an engine without kvtxn does.

Marks concern paged rows and rings. In a layer with recurrent states the forward leaves all rows of
a step in ``rows``, settled ones too, and writes no state: the commit does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

import torch
from torch import Tensor

from . import recovery
from .captured_launches import CapturedPlaces, LayoutLaunches
from .captured_places import check_position, check_rows, check_slots, rows_for
from .captured_shared import STAGED, SharedPlaces, StepPlan
from .captured_window import CapturedWindow
from .context import WindowContext
from .errors import CapacityError, ConfigError
from .layout import RowLayout
from .log import DEBUG, get_logger, shows
from .row_io import LayerRows
from .turn import Turn
from .window_transitions import Event

log = get_logger()

#: Most plans that are kept, one per layout; the least recently used plan is dropped first.
_MOST_PLANS: Final = 1024


class CapturedWindows:
    """The windows over one captured forward; made by ``TransactionManager.captured_windows``.

    Windows over several graphs may share one ``position``. With ``slots_stay`` the engine leaves
    ``slots`` alone while a window is open. Else it may fill them for its next step before it aborts
    a window: that one is aborted in its own slots.

    Attributes:
        context: as given.
        position: int64 ``[max_rows]``, read by the forward: 0, 1, ... for drafts, -1 for others;
            a view of the tensor that was given.
        marks: says which plan's marks ``position`` has.
        rows: the tensors that hold the drafts, or under ``undo`` the rows that drafts overwrite.
        slots: as given.
        deferred: True if drafts wait for commit.
        nbytes: bytes of the marks and the rows, on the device.
        on_commit: a live view of the callbacks given to ``manager.on_commit``.
        stored: function of a number of rows; returns that many rows of each layer, by layer name,
            as ``StagedLayer``.
    """

    def __init__(
        self,
        context: WindowContext,
        turn: Turn,
        slots: Tensor,
        rows: LayerRows | None = None,
        position: Tensor | None = None,
        *,
        slots_stay: bool = False,
    ) -> None:
        executor, refs = context.executor, context.refs
        max_rows = executor.config.max_rows
        check_slots(slots, len(context.groups), context.device)
        if rows is not None:
            _check_policy(context.policy)
            check_rows(refs, rows, max_rows)
        if position is not None:
            check_position(position, slots, max_rows, context.device)
            turn.check_free()
        self._no_marks = torch.full((max_rows,), -1, dtype=torch.int64, device=context.device)
        position = self._no_marks.clone() if position is None else position
        self.marks, self.position = turn.marks_of(position), position[:max_rows]
        counters = context.metrics.under_policy
        if rows is not None:
            counters = context.metrics.in_spare_slots
            rows = {name: tuple(part[:max_rows] for part in rows[name]) for name in context.layers}
        else:
            rows = {} if context.policy == "direct" else rows_for(refs, max_rows)
        parts = [part for each in rows.values() for part in each]
        self.nbytes = sum(part.nbytes for part in parts) + 2 * self.position.nbytes
        self._undoes = context.policy == "undo"
        filled = slots[:, :max_rows] if self._undoes and not slots_stay else None
        places = CapturedPlaces(
            policy=context.policy, slots=slots, rows=rows, counters=counters, filled=filled,
            saved_slots=None if filled is None else torch.full_like(filled, -1),
        )  # fmt: skip
        # Debug mode compares each commit with the reference, so it makes no prepared launch. Nor
        # does a commit that writes states: to be repaired, it needs copies of them made before.
        reads = context.debug or any(ref.states for ref in refs)
        self._launches = None if reads else executor.captured_launches(places)
        self.deferred = context.policy == "deferred"
        saves = self._undoes and self._launches is not None
        self.context, self.slots, self.rows, self._turn = context, slots, rows, turn
        self._shared = SharedPlaces(context, turn, places, saves=saves)
        self.on_commit, self.stored = self._shared.on_commit, self._shared.stored
        self._room = min(max_rows, slots.shape[1])
        self._plans = lru_cache(maxsize=_MOST_PLANS)(self._plan)
        empty = RowLayout.build((), (), context.device)
        self._no_rows = StepPlan(self, empty, None, self._no_marks, 0)
        #: By number of rows, kept for good: captured forwards read their addresses.
        self._in_forward: dict[int, LayoutLaunches] = {}

    def plan(self, layout: RowLayout) -> StepPlan:
        """Return the plan of windows of a layout, the same one each time.

        Raises:
            CapacityError: more rows than ``max_rows``, or than a group has slots; or a request has
                more rows than its ring, unless the policy is ``direct``.
            ConfigError: not a layout of plain sequences on the caches' device.
        """
        if (
            not isinstance(layout, RowLayout)
            or layout.tree is not None
            or layout.position.device != self.context.device
        ):
            raise ConfigError(
                "plan",
                "there is no window of this layout over a captured forward",
                expected=f"a RowLayout without a draft tree, on {self.context.device}",
                got=_shown(layout),
                hint="draft trees need manager.window(..., tree=...) for each step",
            )
        return self._plans(layout)

    def _plan(self, layout: RowLayout) -> StepPlan:
        """Make the plan of a layout, for ``plan``, which keeps it.

        Raises:
            CapacityError: more rows than there is room for, or than a ring has.
        """
        if layout.num_rows > self._room:
            raise CapacityError(
                "captured_windows",
                "more rows than the windows can hold",
                expected=f"at most {self._room}: max_rows, or the slots of each group",
                got=layout.num_rows,
                hint="raise TxnConfig.max_rows, or run the step without a window",
            )
        if self.context.policy != "direct":
            _check_laps(self.context, layout)
        return self._prepared(layout)

    def _prepared(self, layout: RowLayout) -> StepPlan:
        """Make the plan of a layout without the checks of ``plan``."""
        launches = None
        if self._launches is not None and layout.num_rows > 0:
            launches = self._launches.prepare(layout)
        marks = None
        if self.deferred:
            marks = self._no_marks.clone()
            marks[: layout.num_rows] = layout.position
        waiting = len(self.rows) if self.deferred else 0
        waiting += self._shared.num_supplied
        operations = layout.num_rows * waiting
        return StepPlan(self, layout, launches, marks, operations)

    # -- a step -----------------------------------------------------------------------

    def save_in_forward(self, num_rows: int) -> Callable[[], None] | None:
        """Return a launch that saves old rows, to be captured as the beginning of a forward.

        Under ``undo`` a window copies the rows that its drafts overwrite. A captured forward can do
        that itself, which spares the host a launch in each step: call the function once before the
        capture, so that its kernel is compiled, and once in it, before any layer writes. It copies
        the old rows of the first ``num_rows`` slots, settled ones too, and skips padding; it writes
        no cache, so a replay without a window does no harm. Then begin windows with
        ``forward_saves``.

        Args:
            num_rows: rows of the forward. Those beyond what a window may have are left out.

        Returns:
            The function; None where no launch saves rows.
        """
        if not self._undoes or self._launches is None:
            return None
        count = min(num_rows, self._room)
        found = self._in_forward.get(count)
        if found is None:
            whole = RowLayout.build((count,), (0,), self.context.device)  # all rows are drafts
            found = self._in_forward[count] = self._launches.prepare(whole)

        return partial(self._shared.save, found)

    def begin(self, plan: StepPlan, forward_saves: bool = False) -> CapturedWindow:
        """Begin the window of the next forward; the engine has filled the slots already.

        If marking or saving fails, the window is DIRECT from the start: the forward writes every
        row, and the commit only counts.

        A hook of ``on_commit`` is called if it is registered when the window is committed.

        Args:
            plan: from ``plan`` of this object.
            forward_saves: leave the saving of old rows to ``window.before_forward``, which the
                caller calls right before the forward; see ``save_in_forward``. Without effect where
                no prepared launch saves.

        Raises:
            ConfigError: ``plan`` is no plan of this object; no window was begun.
            WindowStateError: another window is open.
            Exception: what marking or saving raised, under ``on_error="raise"``.
        """
        try:
            known = plan.windows is self
        except AttributeError:
            known = False
        if not known:
            raise ConfigError(
                "begin",
                "these windows have no such plan",
                expected="what plan(layout) of the same object returns",
                got=_shown(plan),
                hint="call plan(layout) once for each layout, and pass its result",
            )
        turn, shared = self._turn, self._shared
        if turn.window is not None:
            turn.check_free()
        shared.quiet = not shows(DEBUG)
        if not shared.quiet:  # before there is a window: the caller could not end it if this raises
            self._log_begin(plan)
        window = turn.window = CapturedWindow(shared, turn.begun, plan)
        turn.begun += 1
        try:
            if self.deferred:
                if plan is not self.marks.shown:
                    self.mark(plan)
            elif self._undoes:
                if forward_saves and plan.launches is not None:
                    window._unsaved = True
                else:
                    window.save()
        except Exception as error:
            if self.deferred:
                # Rows that stayed marked would be in no cache.
                window._life.or_fail(partial(self.mark, None))
            window.save_failed(error)
        except BaseException:
            window._life.finish(Event.FAIL)
            raise
        return window

    def begin_states(self) -> CapturedWindow:
        """Begin, and return, the window of a step without rows of its own, right before its commit.

        Such a step has states to commit, but no draft row, or none that waits: its forward writes
        its rows as without kvtxn. Marks and slots stay as they are.

        Raises:
            WindowStateError: another window is open.
        """
        turn, shared = self._turn, self._shared
        turn.check_free()
        shared.quiet = not shows(DEBUG)
        if not shared.quiet:
            self._log_begin(self._no_rows)
        window = turn.window = CapturedWindow(shared, turn.begun, self._no_rows)
        turn.begun += 1
        window._state = STAGED
        return window

    def _log_begin(self, plan: StepPlan) -> None:
        """Log, at debug level, that the next window begins."""
        rows, policy = plan.layout.num_rows, self.context.policy
        log.debug("window.begin", window=self._turn.begun, rows=rows, policy=policy)

    def count_committed(self, plan: StepPlan, number: int) -> None:
        """Count windows of a plan as committed: the caller has ended them, and opened none."""
        self._turn.begun += number
        metrics = self.context.metrics
        metrics.layer_calls += number * plan.stage_operations
        metrics.windows["committed"] += number

    def mark(self, plan: StepPlan | None) -> None:
        """Mark the draft rows of the next forward; None marks no row, so that all are written.

        Makes no copy if the last step had the same plan, and one copy otherwise.
        """
        marks = self._no_marks if plan is None else plan.marks
        assert marks is not None
        self.marks.show(plan, marks, self.position)

    # -- before the first step ---------------------------------------------------------------

    def warm_up(self, layouts: Sequence[RowLayout]) -> None:
        """Make every launch once, so that no kernel compiles and no plan is made in a later step.

        Writes into no cache, but overwrites the engine's slots with -1: no step may be under way.

        Args:
            layouts: the layouts that steps will most often have. Nothing is launched for a layout
                without rows, or with more rows than a window may have.

        Raises:
            CapacityError: a request of a layout has more rows than its ring.
            Exception: what an executor's launch raised.
        """
        if self.deferred:
            self.mark(None)
        self.slots.fill_(-1)
        for layout in layouts:
            if 0 < layout.num_rows <= self._room:
                self._launch_padding(self.plan(layout))
        for layout in () if self._launches is None else self._launches.variants():
            if layout.num_rows <= self._room:
                self._launch_padding(self._prepared(layout))
        if self.deferred:
            self.mark(None)

    def _launch_padding(self, plan: StepPlan) -> None:
        """Save and commit once while every slot is -1; count nothing, and raise what fails."""
        context, layout = self.context, plan.layout
        counts = torch.ones(layout.num_requests, dtype=torch.int32, device=context.device)
        if plan.launches is not None:
            if self.deferred:
                self.mark(plan)
            plan.launches.warm_up(counts)
        elif self.deferred:
            txn = context.new_txn(layout)
            self._shared.fill(txn, saved=False)
            txn.counters = torch.zeros_like(self._shared.counters)
            txn.staged = dict(self._shared.stored(layout.num_rows))
            failure = recovery.commit(context, txn, counts)
            if failure is not None:
                raise failure.error


def _check_policy(policy: str) -> None:
    """Refuse, with a ConfigError, given rows under a policy that lets no drafts wait in them."""
    if policy != "deferred":
        raise ConfigError(
            "captured_windows",
            f"captured rows do not go with policy {policy!r}",
            expected="policy 'deferred'",
            got=repr(policy),
            hint="leave rows out: the captured forward writes the rows to the caches itself",
        )


def _check_laps(context: WindowContext, layout: RowLayout) -> None:
    """Refuse, with a CapacityError, layouts in which two rows of a request share a ring's slot.

    A forward writes its rows in no order, so either row might be in the slot afterwards. And where
    no draft could be marked it writes them all: then a rejected row would have evicted a kept one.
    """
    longest = max(map(sum, zip(layout.settled, layout.draft_len, strict=True)), default=0)
    smallest = min((k.reuse for k in context.kinds.values() if k.name == "ring"), default=longest)
    if longest > smallest:
        raise CapacityError(
            "captured_windows",
            "a request has more rows than its ring",
            expected=f"at most {smallest} rows: a captured forward writes them in no order",
            got=longest,
            hint="draft fewer tokens, make larger rings, or run the step by manager.window()",
        )


def _shown(given: object) -> str:
    """Describe an argument in place of a layout or a plan."""
    if isinstance(given, RowLayout):
        tree = "" if given.tree is None else ", with a draft tree"
        return f"a RowLayout on {given.position.device}{tree}"
    if isinstance(given, StepPlan):
        return "a plan of other windows"
    return type(given).__name__
