"""``Window``: one transaction, from begin to commit or abort.

Every call here has the same three steps: validate, let the executor act, then change the state.
If the executor fails, ``kvtxn.recovery`` finishes its work or takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import ClassVar, Literal, NoReturn, Self

import torch
from torch import Tensor

from . import attention, recovery
from .accepted_forms import Accepted, as_accepted, as_counts
from .compile_guard import never_compiled, outside_graphs
from .context import WindowContext
from .errors import (
    KVTxnError,
    LayerError,
    ManagerCopyError,
    UnresolvedWindowError,
    WindowStateError,
)
from .executor import StagedLayer, Txn
from .layers import LayerRef
from .lifecycle import Lifecycle
from .row_io import from_cache
from .slots import OneMapping, SlotMappings, Slots
from .stage_checks import check_parts, check_ref
from .window_transitions import TRANSITIONS, Event, WindowState, allowed

#: The code that writes rows under ``undo`` and ``direct``: ``stage``, or the caller's own code.
WrittenBy = Literal["window", "caller"]


class Window:
    """A transaction; made by ``TransactionManager.window``, used once.

    Attributes:
        number: the window's number, counted from 0 for each manager.
    """

    #: The next step if a layer is missing at the commit.
    _to_stage: ClassVar[str] = "stage every layer"

    def __init__(
        self, context: WindowContext, number: int, mappings: SlotMappings, written_by: WrittenBy
    ) -> None:
        self.number = number
        self._context = context
        self._life = Lifecycle(context, number)
        self._mappings = mappings
        self._written_by = written_by
        self._only_holds = False  # all groups have slots, and staging has nothing to write

    @property
    def state(self) -> WindowState:
        """The state of the window."""
        return self._life.state

    @property
    def fallback_reason(self) -> str | None:
        """The operation whose failure made the window DIRECT, or None."""
        return self._life.fallback_reason

    @property
    def num_rows(self) -> int | None:
        """Rows of the window; None until the first slot mapping, if ``draft_len`` is an int."""
        return self._mappings.num_rows

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers that are not staged yet."""
        return tuple(self._life.missing)

    @property
    def has_ended(self) -> bool:
        """True if the window is over and calls no hooks any more."""
        return self._life.has_ended

    def __repr__(self) -> str:
        return f"<Window {self.number} {self.state.name}, {len(self.missing)} layers missing>"

    def __reduce__(self) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``.

        Raises:
            ManagerCopyError: always.
        """
        raise ManagerCopyError(
            "Window",
            "a window can be neither copied nor pickled: it commits its rows once, into the caches "
            "of its manager",
            hint="end this window, and begin one of another manager for the copies of the caches",
        )

    # -- begin --------------------------------------------------------------------

    def _begin(self, slots: Slots) -> None:
        """Take the slot mappings that are known; the manager calls this, once.

        A window whose rows the caller writes is STAGED then.

        Raises:
            SlotMappingError: a mapping does not fit, or one is missing and the caller writes rows.
        """
        for group, tensor in self._mappings.by_group(slots).items():
            self._map(group, tensor)
        life = self._life
        if self._written_by == "caller":
            unmapped = [g for g in self._context.groups if g not in self._mappings]
            if unmapped:
                raise self._mappings.missing(unmapped[0], staged=False)
            life.missing.clear()
            if life.state is WindowState.OPEN:
                life.go(Event.STAGE_LAST)
        self._mappings.operation = "stage"

    def _map(self, group: str, slots: OneMapping) -> None:
        """Set a group's slots; under ``undo`` save the rows that they hold.

        If that is interrupted, the group has no slots: rows written to slots that are not saved
        could not be taken back.
        """
        try:
            self._set_slots(group, slots)
        except BaseException:
            if not self._life.state.is_final:
                self._mappings.forget(group)
                self._only_holds = False
                if self._life.txn is not None:
                    self._life.txn.slots.pop(group, None)
            raise

    def _set_slots(self, group: str, slots: OneMapping) -> None:
        """Check and copy a group's slots; under ``undo`` save the rows that they hold.

        If the executor fails in that, the window goes DIRECT, or ends and the error is raised.
        """
        context, life = self._context, self._life
        tensor = self._mappings.add(group, slots)
        if life.txn is None:
            life.txn = context.new_txn(self._mappings.layout, self.number)
        txn = life.txn
        txn.slots[group], txn.crossings = tensor, self._mappings.crossings
        every_group = len(txn.slots) == len(context.groups)
        self._only_holds = txn.waits and every_group and not txn.layout.has_settled
        txn.in_range = self._mappings.in_range
        failure = self._mappings.failure
        if failure is not None and life.state is not WindowState.DIRECT:
            life.go_direct("begin", failure)
        if txn.policy == "undo":
            try:
                context.save(txn, group)
            except Exception as error:
                life.go_direct("begin", error)
        life.or_fail(lambda: recovery.save_evicted(context, txn, group))

    # -- stage --------------------------------------------------------------------

    def stage(
        self,
        ref: LayerRef,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor] | None = None,
        slots: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Stage one layer's rows; layers in any order, each once. The last makes the window STAGED.

        If the executor fails, the window goes DIRECT, or ends and the error is raised: see
        ``TxnConfig.on_error``.

        Args:
            ref: the layer, as the manager knows it.
            key: ``[num_rows, num_kv_heads, head_size]``; for a latent layer
                ``[num_rows, latent_size]``. A floating dtype, or the cache's own. For a
                recurrent layer the states after each row, or, if rows are replayed, the parts
                of ``ref.given``: one tensor ``[num_rows, *shape]``, or several. If scales lie
                beside rows, numbers, or a pair: codes, and float32 ``[num_rows, num_kv_heads]``.
                No view of a cache that this window writes: clone it.
            value: as ``key``; for a latent layer None, or the latent's second half.
            slots: int ``[num_rows]``, where the group's mapping was not given yet; for
                recurrent layers ``[num_requests]``.

        Raises:
            WindowStateError: the window is over.
            LayerError: unknown layer, staged before, or tensors that do not fit.
            SlotMappingError: no mapping, a malformed one, or a second, different one.
        """
        if torch.compiler.is_compiling():
            outside_graphs(Window.stage)(self, ref, key, value, slots)
            return
        context, life = self._context, self._life
        txn = life.txn
        if (
            txn is not None
            and self._only_holds
            and slots is None
            and life.state is WindowState.OPEN
            and context.stager.take_if_unchanged(ref, key, value, life.missing, txn.staged)
        ):
            self._taken(txn)
            return
        if life.state is not WindowState.STAGED and not allowed(life.state, Event.STAGE):
            life.refuse("stage", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        try:
            check_ref(ref, context.layers, life.missing, self._written_by)
            if slots is None and ref.group not in self._mappings:
                raise self._mappings.missing(ref.group)
            rows = self.num_rows if txn is not None else self._mappings.rows_in(ref.group, slots)
            parts = check_parts(ref, rows, key, value)
            if slots is not None and ref.group in self._mappings:
                self._mappings.check_same(ref.group, slots)
            elif slots is not None:
                self._map(ref.group, slots)
        except KVTxnError as error:
            error.state = life.state.name
            raise
        txn = life.txn
        assert txn is not None  # a group has its slots from here on
        layer = self._take_in(txn, ref, parts)
        if life.state is not WindowState.DIRECT:
            txn.staged[ref.name] = layer if txn.holds_rows else StagedLayer(ref, ())
        del life.missing[ref.name]
        self._taken(txn)

    def _taken(self, txn: Txn) -> None:
        """Count one more staged layer; the last one makes the window STAGED."""
        self._context.metrics.layer_calls += txn.layout.num_rows
        if not self._life.missing:
            self._life.go(Event.STAGE_LAST)

    def _take_in(self, txn: Txn, ref: LayerRef, parts: tuple[Tensor | None, ...]) -> StagedLayer:
        """Take one layer's rows, and write those that are written at staging.

        If the stager fails, copies are taken, and the window goes DIRECT, or ends and the error is
        raised.
        """
        stager, life = self._context.stager, self._life
        try:
            layer, failure = stager.take(ref, parts), None
        except KVTxnError:
            raise
        except Exception as error:  # such as no memory for a buffer of ``max_rows``
            layer, failure = stager.take_alone(ref, parts), error
        if failure is None or life.state is WindowState.DIRECT:
            self._write_staged(txn, layer)
        else:
            life.go_direct("stage", failure, layer)
        return layer

    def _write_staged(self, txn: Txn, layer: StagedLayer) -> None:
        """Write the rows that are written at staging, in state DIRECT by the reference.

        If the executor fails, the window goes DIRECT, or ends and the error is raised.
        """
        if self._life.state is WindowState.DIRECT:
            self._life.or_fail(lambda: recovery.stage_direct(self._context, txn, [layer]))
            return
        try:
            if not txn.waits or (txn.layout.has_settled and not layer.ref.states):
                self._context.executor.stage(txn, layer)
        except Exception as error:
            self._life.go_direct("stage", error, layer)

    # -- attention ----------------------------------------------------------------

    @never_compiled
    def attend(
        self,
        ref: LayerRef,
        query: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Compute causal attention of the window's rows, which reads the window's own writes.

        Equal to attention over a cache with all rows of the window written; whether a query sees
        a row without a slot (-1) is left open. In a tree a draft row sees the tokens before the
        drafts, its ancestors and itself; for a sliding window its position follows its depth.

        If the executor fails, the window goes DIRECT and the reference attends, or the window ends
        and the error is raised: see ``TxnConfig.on_error``.

        Args:
            ref: a staged layer with key and value planes.
            query: ``[num_rows, num_q_heads, head_size]``, any floating dtype, with a multiple of
                the KV heads.
            block_table: int ``[num_requests, max_blocks]``, blocks of the layer's group. Under
                ``deferred``, and in a tree, the blocks of the tokens before this window are enough.
            seq_lens: int ``[num_requests]``, tokens per request, this window's included; every
                node of a tree counts. All three may have any strides.
            scale: factor of the scores; None is 1 / sqrt(head_size).
            sliding_window: tokens that a query sees, itself included; None is all.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None caps nothing.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.

        Raises:
            WindowStateError: the window is over.
            LayerError: the layer is not staged, or the query does not fit it.
        """
        context, life = self._context, self._life
        txn = life.txn
        name = str(getattr(ref, "name", ref))
        if life.state.is_final:
            life.refuse("attend", Event.ABORT, f"layer={name!r}")
        if txn is None or name in life.missing or context.layers.get(name, txn) is not ref:
            raise LayerError(
                "attend",
                f"layer {name!r} is not staged",
                state=life.state.name,
                hint="call stage for the layer first",
            )
        evicting = None if ref.ring_size is None else self._evicting(ref.group, txn)
        scores = (scale, sliding_window, soft_cap)
        tensors = (query, block_table, seq_lens)
        waiting = context.policy == "deferred"
        args = attention.arguments(
            ref, txn.layout, *tensors, *scores, waiting=waiting, evicting=evicting
        )
        layer = self._attended(txn, ref)
        try:
            if life.state is not WindowState.DIRECT:
                return context.executor.attend(txn, layer, query, args)
        except Exception as error:
            life.go_direct("attend", error)
            layer = self._attended(txn, ref)
        return attention.attend(txn.layout, ref.planes, layer.rows or None, query, args)

    def _attended(self, txn: Txn, ref: LayerRef) -> StagedLayer:
        """Return the layer with the rows that attention reads in place of the cache's.

        A captured forward writes its settled rows to the cache alone: they are read there.
        """
        layer = txn.staged.get(ref.name) or StagedLayer(ref, ())
        if not (txn.drafts_alone and layer.rows):
            return layer
        return StagedLayer(ref, from_cache(ref, layer.rows, txn.slots, ~txn.layout.is_draft))

    def _evicting(self, group: str, txn: Txn) -> Sequence[int]:
        """Count the rows of each request whose writes evict others from its ring.

        Without a tree attention reads drafts that are written from the ring, those without slots
        included, so that all rows count.
        """
        layout = txn.layout
        if self._context.policy == "deferred":
            return layout.settled
        if layout.tree is not None:
            return self._mappings.reach(group)
        return [last - first for first, last in pairwise(layout.starts)]

    # -- commit and abort ---------------------------------------------------------

    def commit(self, accepted: Accepted) -> None:
        """Make exactly the accepted draft rows durable, in all layers, or change nothing.

        In a tree window accepted rows move to the request's first draft slots, in path order.

        Args:
            accepted: draft rows accepted per request, as an int for all, a sequence, an int
                tensor ``[num_requests]``, or bool ``[num_rows]`` (settled rows ignored). A
                device tensor is not read by the host; its counts clamp to the draft lengths.
                Or ``SampledIds``: the ids that the sampler returned, counted by the executor.
                For a tree: draft rows along the accepted path from the root on, as int
                ``[num_requests, depth]`` padded with -1, or one sequence or array per request; on a
                device, a path is cut at its first row whose parent is not the row before it.

        If a slot on the device lies outside its cache, the commit writes no row. The host does
        not learn of it without waiting, so the state still becomes COMMITTED.
        ``manager.snapshot()["kvtxn_windows_refused_total"]`` counts such commits.

        Raises:
            IncompleteWindowError: a layer is missing; the window stays open.
            WindowStateError: the window is over, or staged rows were modified.
            AcceptanceError: ``accepted`` does not fit; the window stays as it is.
            Exception: under ``on_error="raise"``, the executor's error, after the caches were
                restored; or the error of an ``on_commit`` hook: the window is committed all the
                same. Under ``"fallback"`` the reference finishes the commit: FELL_BACK.
        """
        if torch.compiler.is_compiling():
            outside_graphs(Window.commit)(self, accepted)
            return
        context, life, txn = self._context, self._life, self._life.txn
        if life.missing or (life.state, Event.COMMIT) not in TRANSITIONS:
            life.refuse_commit("commit", self._to_stage)
        assert txn is not None  # every layer is staged, so some group has slots
        direct = life.state is WindowState.DIRECT
        try:
            given = as_accepted(accepted, txn.layout, context.device)
            context.stager.check_unchanged(recovery.held_layers(context, txn) if direct else None)
        except KVTxnError as error:
            error.state = life.state.name
            raise
        try:
            if direct:
                recovery.finish_direct(context, txn, as_counts(given))
            else:
                life.follow(recovery.commit(context, txn, given))
            life.finish(Event.COMMIT, given)
        except BaseException:  # interrupted before the label moved: nothing can be promised
            life.fail()
            raise
        life.surface()

    @never_compiled
    def abort(self) -> None:
        """Take every draft row back, and leave every recurrent state as it was before the window.

        Settled rows stay in rows and rings; no state takes them in, whether its layer was staged or
        not. So the caller repeats the whole step: to write settled rows again changes nothing, but
        in a ring of less than its ``LayerRef.window + settled - 1`` slots, where they evicted rows
        that the step reads. A request with such a ring begins again from its first token. A
        window that fell back to direct writes keeps its rows, as stock would; except in rings,
        where a draft row would have evicted a live one, and in states.

        Raises:
            WindowStateError: the window is over.
            Exception: the error of an ``on_abort`` hook, under ``on_error="raise"``; the
                window is aborted.
        """
        context, life, txn = self._context, self._life, self._life.txn
        if not allowed(life.state, Event.ABORT):
            life.refuse("abort", Event.ABORT)
        if txn is not None:
            if txn.saved and life.state is not WindowState.DIRECT:
                life.or_fail(lambda: life.follow(recovery.restore(context, txn)))
            if life.state is WindowState.DIRECT:
                life.or_fail(lambda: recovery.finish_direct(context, txn, None))
            else:
                nothing = torch.zeros_like(txn.layout.is_draft)
                life.or_fail(lambda: txn.count(nothing, aborted=True))
        life.finish(Event.ABORT)
        life.surface()

    def __enter__(self) -> Self:
        if self.state.is_final:
            self._life.refuse("with", Event.ABORT)
        return self

    @never_compiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state.is_final:
            return
        if error is not None:
            try:
                self.abort()
            except Exception as failure:  # the body's exception always wins
                error.add_note(f"kvtxn: abort raised as well: {failure!r}")
            return
        state = self.state.name
        ended = UnresolvedWindowError(
            "with",
            f"the block ended in state {state} without commit or abort",
            expected="commit(accepted) or abort() in the block",
            got="neither",
            state=state,
            hint="call one of them; the window was aborted",
        )
        try:
            self.abort()
        except Exception as failure:
            ended.add_note(f"kvtxn: abort raised as well: {failure!r}")
            ended.__cause__ = failure
        try:
            raise ended
        finally:  # its traceback has this frame, which would keep the step's tensors
            del ended

    # -- failures and the end ------------------------------------------------------

    def fall_back(self, operation: str, error: Exception) -> None:
        """Make the window DIRECT because the caller's own code failed; write staged rows now.

        From here on the caller writes the rows of layers that are not staged, and commit only
        counts; of rings it also puts back what rejected drafts evicted, so call this before you
        write. Not for windows with a draft tree, whose commit has to move staged rows.

        Args:
            operation: the operation that failed: ``fallback_reason`` and a label of the metrics.
            error: the error that it raised; logged, or raised again under ``on_error="raise"``.

        Raises:
            WindowStateError: the window is over or fell back already, has no slots yet, or has a
                draft tree.
        """
        life = self._life
        if not allowed(life.state, Event.FALL_BACK):
            life.refuse("fall_back", Event.FALL_BACK)
        txn = life.txn
        if txn is None or txn.layout.tree is not None:
            why = "no slots yet" if txn is None else "a draft tree"
            raise WindowStateError(
                "fall_back",
                f"the window has {why}, in state {life.state.name}",
                state=life.state.name,
                hint="abort it, and write the rows yourself",
            )
        life.go_direct(operation, error)
        life.missing.clear()
        self._written_by = "caller"
        life.or_fail(lambda: recovery.save_rings(self._context, txn))
