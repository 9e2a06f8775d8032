"""``Window``: one transaction, from begin to commit or abort.

Every call here goes the same way: validate, let the executor act, then change
the label. What a failure does to a window, and how it ends, is in ``kvtxn.window_life``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from . import attention
from .eager import outside_graphs
from .errors import LayerError, UnresolvedWindowError, incomplete
from .executor import SampledIds, StagedLayer, Standing, Txn, as_counts
from .layers import LayerRef
from .parts import check_parts, check_ref
from .slots import Slots
from .states import Event, WindowState, after, allowed
from .tree import Accepted, as_acceptance
from .window_life import WindowLife


class Window(WindowLife):
    """One transaction; made by ``TransactionManager.window``, used once.

    Attributes:
        number: counts the manager's windows from 0.
        fallback_reason: the operation whose failure made the window DIRECT, or None.
    """

    # -- begin --------------------------------------------------------------------

    def _begin(self, slots: Slots) -> None:
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

    def _begin_staged(self, standing: Standing) -> None:
        """Begin with every layer staged, from captured rows; the manager calls this, once."""
        manager = self._manager
        self._txn = txn = manager.new_txn(standing.layout)
        txn.slots, txn.staged = standing.slots, standing.staged
        txn.in_range = self._mappings.in_range
        if standing.recurs:
            txn.standing = standing
            manager.stager.watch(txn.slots)
        self._missing = {}
        manager.metrics.layer_calls += standing.layout.num_rows * len(txn.staged)
        self._state = after(self._state, Event.STAGE_LAST)
        if self._mappings.failure is not None:
            self._on_failure("begin", self._mappings.failure, tuple(txn.staged.values()))
        elif standing.layout.has_settled:
            try:
                self._executor.stage_all(txn, tuple(txn.staged.values()))
            except Exception as error:
                self._on_failure("stage", error, tuple(txn.staged.values()))

    def _map(self, group: str, slots: Tensor | Sequence[int]) -> None:
        """Give a group its slots; under ``undo`` save what they hold."""
        tensor = self._mappings.add(group, slots)
        if self._txn is None:
            self._txn = self._manager.new_txn(self._mappings.layout)
        txn = self._txn
        txn.slots[group] = tensor
        waits = txn.policy == "deferred" and not txn.layout.has_settled
        self._waits = waits and len(txn.slots) == len(self._manager.groups)
        txn.in_range = self._mappings.in_range
        failure = self._mappings.failure
        if failure is not None and self._state is not WindowState.DIRECT:
            self._on_failure("begin", failure)
        if txn.policy == "undo" and self._state is not WindowState.DIRECT:
            try:
                txn.saved.update(self._executor.save(txn, group))
            except Exception as error:
                self._on_failure("begin", error)
        self._save_what_is_evicted(txn, group)

    # -- stage --------------------------------------------------------------------

    def stage(
        self,
        ref: LayerRef,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor] | None = None,
        slots: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Hand in one layer's rows; any layer order, each layer once.

        Args:
            ref: the layer, as the manager knows it.
            key: ``[num_rows, num_kv_heads, head_size]``; for a latent layer
                ``[num_rows, latent_size]``. A floating dtype, or the cache's own. For a
                recurrent layer the states after each row, ``[num_rows, *state_shape]``: one
                tensor, or a sequence of them. Where scales lie beside the rows, numbers, or a
                pair: codes, and their scales, float32 ``[num_rows, num_kv_heads]``.
            value: likewise; for a latent layer None, or the latent's second half.
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
        txn = self._txn
        if (
            txn is not None
            and self._waits
            and slots is None
            and self._state is WindowState.OPEN
            and self._manager.stager.again(ref, key, value, self._missing, txn.staged)
        ):
            self._taken(txn)
            return
        if self._state is not WindowState.STAGED and not allowed(self._state, Event.STAGE):
            self._refuse("stage", Event.STAGE, f"layer={getattr(ref, 'name', ref)!r}")
        check_ref(ref, self._manager.layers, self._missing, self._written_by)
        if slots is None and ref.group not in self._mappings:
            raise self._mappings.missing(ref.group)
        rows = self.num_rows if self._txn is not None else self._mappings.rows_in(ref.group, slots)
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
        self._remember(txn, layer)

    def _remember(self, txn: Txn, layer: StagedLayer) -> None:
        """Note that the layer is staged, and its rows where commit needs them."""
        name = layer.ref.name
        if self._state is not WindowState.DIRECT:
            txn.staged[name] = layer if txn.holds_rows else StagedLayer(layer.ref, ())
        del self._missing[name]
        self._taken(txn)

    def _taken(self, txn: Txn) -> None:
        """Count one more staged layer; the last one makes the window STAGED."""
        self._manager.metrics.layer_calls += txn.layout.num_rows
        if not self._missing:
            self._state = after(self._state, Event.STAGE_LAST)

    def _write_staged(self, txn: Txn, layer: StagedLayer) -> None:
        """Let the executor write what is written at staging."""
        holds = txn.holds_rows
        if self._state is WindowState.DIRECT:
            self._or_fail(lambda: self._write_without_executor(txn, [layer]))
            return
        try:
            if txn.policy != "deferred" or txn.layout.has_settled:
                self._executor.stage(txn, layer)
        except Exception as error:
            staged = [*txn.staged.values(), layer] if holds else [layer]
            self._on_failure("stage", error, staged)

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

        Equal to attention over a cache with all rows of the window written; what a query sees of
        a row without a slot (-1) is left open. In a tree a draft row sees what came before the
        drafts, its ancestors and itself, and is as far from them, for a sliding window, as it is
        deep.

        Args:
            ref: a staged layer with key and value planes.
            query: ``[num_rows, num_q_heads, head_size]``, any floating dtype; the number of
                query heads is a multiple of the KV heads.
            block_table: int ``[num_requests, max_blocks]``, blocks of the layer's group.
            seq_lens: int ``[num_requests]``, tokens per request, this window's included; every
                node of a tree counts. All three may have any strides.
            scale: of the scores; 1 / sqrt(head_size) where None.
            sliding_window: tokens a query sees, itself included; None is all.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.

        Raises:
            WindowStateError: the window is over.
            LayerError: the layer is not staged, or the query does not fit it.
        """
        if torch.compiler.is_compiling():
            return outside_graphs(Window.attend)(
                self,
                ref,
                query,
                block_table,
                seq_lens,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
            )
        txn = self._txn
        name = str(getattr(ref, "name", ref))
        if self._state.is_final:
            self._refuse("attend", Event.ABORT, f"layer={name!r}")
        if txn is None or name in self._missing or self._manager.layers.get(name, txn) is not ref:
            raise LayerError(
                "attend", f"layer {name!r} is not staged", hint="stage it before it attends"
            )
        args = attention.arguments(
            ref,
            txn.layout,
            query,
            block_table,
            seq_lens,
            scale,
            sliding_window,
            soft_cap,
            waiting=self._manager.policy == "deferred",
        )
        layer = txn.staged.get(ref.name) or StagedLayer(ref, ())
        try:
            if self._state is not WindowState.DIRECT:
                return self._executor.attend(txn, layer, query, args)
        except Exception as error:
            self._on_failure("attend", error, tuple(txn.staged.values()))
        layer = txn.staged.get(ref.name, layer)
        return attention.attend(txn.layout, ref.planes, layer.rows or None, query, args)

    # -- commit and abort ---------------------------------------------------------

    def commit(self, accepted: Accepted) -> None:
        """Make exactly the accepted draft rows durable, in all layers, or change nothing.

        In a tree window they move to the request's first draft slots, in the path's order.

        Args:
            accepted: draft rows accepted per request, as an int for all, a sequence, an int
                tensor ``[num_requests]``, or bool ``[num_rows]`` (settled rows ignored). A
                device tensor is not read by the host; its counts clamp to the draft lengths.
                Or ``SampledIds``: what the sampler returned, counted by the executor.
                For a tree: draft rows along the accepted path from the root on, as int
                ``[num_requests, depth]`` padded with -1, or one sequence per request; on a
                device, a path is cut at its first row whose parent is not the one before.

        A device slot outside its cache makes the commit write nothing. Only the device knows
        that, so the label still says COMMITTED: the commit was handed over whole.
        ``manager.snapshot()["kvtxn_windows_refused_total"]`` counts such commits.

        Raises:
            IncompleteWindowError: a layer is missing; the window stays open.
            WindowStateError: the window is over, or staged rows were modified.
            AcceptanceError: ``accepted`` does not fit; the window stays as it is.
            Exception: whatever an ``on_commit`` hook raised, under ``on_error="raise"``; the
                window is committed.
        """
        if torch.compiler.is_compiling():
            outside_graphs(Window.commit)(self, accepted)
            return
        if self._missing and not self._state.is_final:
            raise incomplete(self._state.name, list(self._missing), len(self._manager.layers))
        if not allowed(self._state, Event.COMMIT):
            self._refuse("commit", Event.COMMIT)
        txn = self._txn
        assert txn is not None  # every layer is staged, so some group has slots
        tree = txn.layout.tree
        counts: Tensor | SampledIds
        if isinstance(accepted, SampledIds) and (tree is None or tree.is_chain):
            ids = self._executor.capabilities.takes_ids
            counts = self._manager.acceptance.of_window(accepted, txn.layout, takes_ids=ids)
        else:
            counts = as_acceptance(accepted, txn.layout, self._manager.device)
        if self._state is WindowState.DIRECT:
            known = as_counts(counts)
            held = self._held_layers()
            groups = (layer.ref.group for layer in held.values())
            self._manager.stager.check_unchanged({*held, *groups})
            self._or_fail(lambda: self._finish_held(txn, known))
            self._or_fail(lambda: txn.count(txn.kept(known)))
        else:
            self._manager.stager.check_unchanged()
            self._act_commit(txn, counts)
        self._accepted = counts
        self._finish(Event.COMMIT, accepted)
        self._surface()

    def abort(self) -> None:
        """Take every draft row back; settled rows stay. The caches are as before the window.

        A window that fell back to direct writes keeps its rows, as stock would; but not in
        rings and states, where that would have evicted what is live.

        Raises:
            WindowStateError: the window is over.
            Exception: whatever an ``on_abort`` hook raised, under ``on_error="raise"``; the
                window is aborted.
        """
        if torch.compiler.is_compiling():
            outside_graphs(Window.abort)(self)
            return
        if not allowed(self._state, Event.ABORT):
            self._refuse("abort", Event.ABORT)
        txn = self._txn
        if txn is not None:
            if txn.saved and self._state is not WindowState.DIRECT:
                self._act_restore(txn)
            nothing = torch.zeros_like(txn.layout.is_draft)
            if self._state is WindowState.DIRECT:
                self._or_fail(lambda: self._finish_held(txn, None))
            self._or_fail(lambda: txn.count(nothing, aborted=True))
        self._finish(Event.ABORT)
        self._surface()

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
        if torch.compiler.is_compiling():
            outside_graphs(Window.__exit__)(self, kind, error, trace)
            return
        if self._state.is_final:
            return
        state = self._state
        if error is not None:
            try:
                self.abort()
            except Exception as failure:  # the body's exception always wins
                error.add_note(f"kvtxn: abort raised as well: {failure!r}")
            return
        self.abort()
        raise UnresolvedWindowError(
            "with",
            f"the block ended in state {state.name} without commit or abort",
            state=state.name,
            hint="call commit(accepted) or abort(); the window was aborted",
        )
