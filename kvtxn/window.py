"""``Window``: one transaction, from begin to commit or abort.

Every call here goes the same way: validate, let the executor act, then change
the label. A window that cannot keep its promise any more goes DIRECT, and the
reference in ``kvtxn.recovery`` finishes what the executor left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn, Self

import torch
from torch import Tensor

from . import attention, recovery
from .errors import LayerError, UnresolvedWindowError, incomplete, not_allowed
from .executor import AttentionArgs, StagedLayer, Txn
from .layers import LayerRef
from .layout import as_accepted
from .rows import LayerRows
from .slots import SlotMappings, count_of
from .staging import check_parts, check_ref
from .states import Event, WindowState, after, allowed

if TYPE_CHECKING:
    from .manager import TransactionManager

#: Who writes rows through under ``undo``: ``stage``, or the caller's own code.
WrittenBy = Literal["window", "caller"]


class Window:
    """One transaction; made by ``TransactionManager.window``, used once.

    Attributes:
        number: counts the manager's windows from 0.
        fallback_reason: the operation whose failure made the window DIRECT, or None.
    """

    def __init__(
        self,
        manager: TransactionManager,
        number: int,
        mappings: SlotMappings,
        written_by: WrittenBy,
    ) -> None:
        self.number = number
        self.fallback_reason: str | None = None
        self._manager = manager
        self._executor = manager.executor
        self._mappings = mappings
        self._written_by = written_by
        self._state = WindowState.OPEN
        self._missing = dict.fromkeys(manager.layers)
        self._txn: Txn | None = None

    # -- what it is ---------------------------------------------------------------

    @property
    def state(self) -> WindowState:
        """Where the window stands."""
        return self._state

    @property
    def num_rows(self) -> int | None:
        """Rows of the window; None until the first slot mapping, if ``draft_len`` is an int."""
        return None if self._txn is None else self._txn.layout.num_rows

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the layers that are not staged yet."""
        return tuple(self._missing)

    def __repr__(self) -> str:
        return f"<Window {self.number} {self._state.name}, {len(self._missing)} layers missing>"

    # -- begin --------------------------------------------------------------------

    def _begin(self, slots: Tensor | Sequence[int] | Mapping[str, Tensor] | None) -> None:
        """Take the slot mappings known so far; the manager calls this, once."""
        for group, tensor in self._mappings.by_group(slots).items():
            self._map(group, tensor)
        if self._written_by == "caller":
            unmapped = [g for g in self._manager.groups if g not in self._mappings]
            if unmapped:
                raise self._mappings.missing(unmapped[0])
            self._missing.clear()
            if self._state is WindowState.OPEN:
                self._state = after(self._state, Event.STAGE_LAST)

    def _map(self, group: str, slots: Tensor | Sequence[int]) -> None:
        """Give a group its slots; under ``undo`` save what they hold."""
        tensor = self._mappings.add(group, slots)
        if self._txn is None:
            self._txn = self._manager.new_txn(self._mappings.layout)
        txn = self._txn
        txn.slots[group] = tensor
        txn.in_range = self._mappings.in_range
        failure = self._mappings.failure
        if failure is not None and self._state is not WindowState.DIRECT:
            self._on_failure("begin", failure)
        if txn.policy == "undo" and self._state is not WindowState.DIRECT:
            try:
                txn.saved.update(self._executor.save(txn, group))
            except Exception as error:
                self._on_failure("begin", error)

    # -- stage --------------------------------------------------------------------

    def stage(
        self,
        ref: LayerRef,
        key: Tensor,
        value: Tensor | None = None,
        slots: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Hand in one layer's rows; any layer order, each layer once.

        Args:
            ref: the layer, as the manager knows it.
            key: ``[num_rows, num_kv_heads, head_size]``; for a latent layer
                ``[num_rows, latent_size]``. A floating dtype, or the cache's own.
            value: likewise; for a latent layer None, or the latent's second half.
            slots: int ``[num_rows]``, where the group's mapping was not given yet.

        Raises:
            WindowStateError: the window is over.
            LayerError: unknown layer, staged before, or tensors that do not fit.
            SlotMappingError: no mapping, a malformed one, or a second, different one.
        """
        if self._state is not WindowState.STAGED and not allowed(self._state, Event.STAGE):
            self._refuse("stage", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        check_ref(ref, self._manager.layers, self._missing)
        if slots is None and ref.group not in self._mappings:
            raise self._mappings.missing(ref.group)
        rows = self.num_rows if self._txn is not None else count_of(slots)
        parts = check_parts(ref, rows, key, value)
        if slots is not None:
            if ref.group in self._mappings:
                self._mappings.check_same(ref.group, slots)
            else:
                self._map(ref.group, slots)
        txn = self._txn
        assert txn is not None  # a group has its slots from here on
        layer = self._manager.stager.take(ref, parts)
        self._write_staged(txn, layer)
        self._manager.metrics.layer_calls += txn.layout.num_rows
        del self._missing[ref.name]
        self._state = after(self._state, Event.STAGE if self._missing else Event.STAGE_LAST)

    def _write_staged(self, txn: Txn, layer: StagedLayer) -> None:
        """Let the executor write what is written at staging, and remember the layer."""
        deferred = txn.policy == "deferred"
        if self._state is WindowState.DIRECT:
            self._or_fail(lambda: recovery.write_through(txn, [layer]))
            return
        try:
            if not deferred or txn.layout.has_settled:
                self._executor.stage(txn, layer)
        except Exception as error:
            staged = [*txn.staged.values(), layer] if deferred else [layer]
            self._on_failure("stage", error, staged)
        else:
            txn.staged[layer.ref.name] = layer if deferred else StagedLayer(layer.ref, ())

    # -- attention ----------------------------------------------------------------

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
        """Causal attention of the window's rows that reads the window's own writes.

        Equal to attention over a cache with all rows of the window written.

        Args:
            ref: a staged layer with key and value planes.
            query: ``[num_rows, num_q_heads, head_size]``, any floating dtype; the number of
                query heads is a multiple of the KV heads.
            block_table: int ``[num_requests, max_blocks]``, blocks of the layer's group.
            seq_lens: int ``[num_requests]``, tokens per request, this window's included.
            scale: of the scores; 1 / sqrt(head_size) where None.
            sliding_window: tokens a query sees, itself included; None is all.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.

        Raises:
            WindowStateError: the window is over.
            LayerError: the layer is not staged, or the query does not fit it.
        """
        txn = self._txn
        if self._state.is_final or txn is None:
            self._refuse("attend", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        name = str(getattr(ref, "name", ref))
        if name in self._missing or self._manager.layers.get(name) is not ref:
            raise LayerError(
                "attend", f"layer {name!r} is not staged", hint="stage it before it attends"
            )
        attention.check_query(ref, txn.layout, query, block_table, seq_lens)
        attention.check_scores(scale, sliding_window, soft_cap)
        args = AttentionArgs(
            block_table=block_table,
            seq_lens=seq_lens,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        layer = txn.staged.get(ref.name) or StagedLayer(ref, ())
        try:
            if self._state is not WindowState.DIRECT:
                return self._executor.attend(txn, layer, query, args)
        except Exception as error:
            self._on_failure("attend", error, tuple(txn.staged.values()))
        return attention.attend(txn.layout, ref.planes, None, query, args)

    # -- commit and abort ---------------------------------------------------------

    def commit(self, accepted: int | Sequence[int] | Sequence[bool] | Tensor) -> None:
        """Make exactly the accepted draft rows durable, in all layers, or change nothing.

        Args:
            accepted: draft rows accepted per request, as an int for all, a sequence, an int
                tensor ``[num_requests]``, or bool ``[num_rows]`` (settled rows ignored). A
                device tensor is not read by the host; its counts clamp to the draft lengths.

        Raises:
            IncompleteWindowError: a layer is missing; the window stays open.
            WindowStateError: the window is over, or staged rows were modified.
            AcceptanceError: ``accepted`` does not fit; the window stays as it is.
        """
        if self._missing and not self._state.is_final:
            raise incomplete(self._state.name, list(self._missing), len(self._manager.layers))
        if not allowed(self._state, Event.COMMIT):
            self._refuse("commit", Event.COMMIT)
        txn = self._txn
        assert txn is not None  # every layer is staged, so some group has slots
        counts = as_accepted(accepted, txn.layout, self._manager.device)
        if self._state is WindowState.DIRECT:
            self._or_fail(lambda: txn.count(txn.kept(counts)))
        else:
            self._manager.stager.check_unchanged()
            self._act_commit(txn, counts)
        self._finish(Event.COMMIT, accepted)

    def _act_commit(self, txn: Txn, counts: Tensor) -> None:
        """The executor's commit; on failure finish it, or restore and raise."""
        before: LayerRows = txn.saved
        config = self._manager.config
        counted = txn.counters.clone() if self._manager.may_stop_halfway else None
        try:
            if txn.policy == "deferred" and self._manager.needs_guard:
                before = recovery.read_back(txn)
            self._executor.commit(txn, counts)
            if config.debug:
                recovery.verify(txn, counts, before)
        except Exception as error:
            if counted is not None:
                txn.counters.copy_(counted)  # a window counts once, however often it is tried
            if config.on_error == "raise":
                self._take_back_and_raise("commit", error, before)
            self._enter_direct("commit", error)
            self._or_fail(lambda: recovery.finish_commit(txn, counts, before))
            self._or_fail(lambda: txn.count(txn.kept(counts)))
        except BaseException:
            self._finish(Event.FAIL)  # interrupted half-way: nothing can be promised
            raise

    def abort(self) -> None:
        """Take every draft row back; settled rows stay. The caches are as before the window.

        A window that fell back to direct writes keeps its rows, as stock would.

        Raises:
            WindowStateError: the window is over.
        """
        if not allowed(self._state, Event.ABORT):
            self._refuse("abort", Event.ABORT)
        txn = self._txn
        if txn is not None:
            if txn.saved and self._state is not WindowState.DIRECT:
                self._act_restore(txn)
            self._or_fail(lambda: txn.count(torch.zeros_like(txn.layout.is_draft)))
        self._finish(Event.ABORT)

    def _act_restore(self, txn: Txn) -> None:
        """The executor's restore; on failure the reference does it."""
        try:
            self._executor.restore(txn)
        except Exception as error:
            if self._manager.config.on_error == "raise":
                self._take_back_and_raise("abort", error, txn.saved)
            self._enter_direct("abort", error)
            self._or_fail(lambda: recovery.put_back(txn, txn.saved))
        except BaseException:  # interrupted: finish, since putting back twice does no harm
            self._or_fail(lambda: recovery.put_back(txn, txn.saved))
            self._finish(Event.ABORT)
            raise

    def __enter__(self) -> Self:
        if self._state.is_final:
            self._refuse("with", Event.ABORT)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state.is_final:
            return
        state = self._state
        if error is not None:
            try:
                self.abort()
            except Exception as failure:  # the body's exception always wins
                error.add_note(f"kvtxn: aborting the window failed as well: {failure!r}")
            return
        self.abort()
        raise UnresolvedWindowError(
            "with",
            f"the block ended in state {state.name} without commit or abort",
            state=state.name,
            hint="call commit(accepted) or abort(); the window was aborted",
        )

    # -- failures -----------------------------------------------------------------

    def fall_back(self, operation: str, error: Exception) -> None:
        """The caller failed: write what is staged; other rows are its own, commit only counts."""
        if not allowed(self._state, Event.FALL_BACK) or self._txn is None:
            self._refuse("fall_back", Event.FALL_BACK)
        self._on_failure(operation, error, tuple(self._txn.staged.values()))
        self._missing.clear()

    def _on_failure(
        self, operation: str, error: Exception, layers: Sequence[StagedLayer] = ()
    ) -> None:
        """An executor failed before commit: go direct and lose nothing, or restore and raise."""
        txn = self._txn
        assert txn is not None
        if self._manager.config.on_error == "raise":
            self._take_back_and_raise(operation, error, txn.saved)
        self._enter_direct(operation, error)
        txn.policy, txn.counters = "direct", self._manager.metrics.rows[1]
        if self._written_by == "window":
            waiting = [layer for layer in layers if layer.rows]  # under undo they are written
            self._or_fail(lambda: recovery.write_through(txn, waiting))

    def _enter_direct(self, operation: str, error: Exception) -> None:
        self._state = after(self._state, Event.FALL_BACK)
        self.fallback_reason = operation
        self._manager.note_fallback(self, operation, error)

    def _or_fail(self, repair: Callable[[], None]) -> None:
        """Run a repair; where even that fails, the bytes are unknown and the label says so."""
        try:
            repair()
        except BaseException:
            self._finish(Event.FAIL)
            raise

    def _take_back_and_raise(self, operation: str, error: Exception, before: LayerRows) -> NoReturn:
        """``on_error="raise"``: restore the caches, then let the executor's error surface."""
        txn = self._txn
        assert txn is not None
        try:
            recovery.put_back(txn, before)
            txn.count(torch.zeros_like(txn.layout.is_draft))
        except BaseException as failure:
            self._finish(Event.FAIL)
            error.add_note(f"kvtxn: {operation} failed, and so did restoring: {failure!r}")
        else:
            self._finish(Event.ABORT)
            error.add_note(f"kvtxn: {operation} failed; the caches were restored")
        raise error

    def _finish(self, event: Event, accepted: object = None) -> None:
        """Label the end, and let go of everything the window held."""
        self._state = after(self._state, event)
        self._manager.close(self, accepted)
        if self._txn is not None:
            self._txn.staged.clear()

    def _refuse(self, operation: str, event: Event, detail: str = "") -> NoReturn:
        wanted = " or ".join(state.name for state in WindowState if allowed(state, event))
        raise not_allowed(operation, self._state.name, wanted, self._state.is_final, detail)
