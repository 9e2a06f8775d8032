"""vLLM's CPU attention with a window: draft rows are staged, all other rows are written.

There are three kinds of layers. Over keys and values, kvtxn attends for the whole batch, over the
cache and the window, since vLLM's CPU kernels return no log-sum-exp. Latent attention needs no
attention of kvtxn's: see ``LatentWindowMixin``. In models with recurrent states vLLM's own
attention reads drafts from their slots, where they lie for one call alone: see ``LentRowsMixin``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from .... import attention
from ....errors import LayerError
from ....executor import AttentionArgs
from ....formats import words
from ....layers import LayerRef
from ....row_io import read, select, write
from ...serving.eager_steps import EagerSteps, StateSteps
from ..seam import batches
from ..seam import layers as attention_layers
from ..seam.hooks import check_methods, give_back, is_swapped, swap_class
from ..seam.layers import TargetLayer
from ..seam.runner_protocols import AttentionLayer, BatchMetadata


@attrs.frozen(eq=False)
class LayerHook:
    """The steps of a hooked layer, and its place in them.

    Attributes:
        steps: the runner's steps.
        ref: the layer, as the steps' manager knows it.
        scores: how the layer attends; None for latent attention, which vLLM computes.
    """

    steps: EagerSteps
    ref: LayerRef
    scores: attention_layers.Scores | None


class WindowMixin:
    """A mixin of vLLM's attention that reads the step's window; without one, vLLM's code runs.

    With one, draft rows are staged instead of written, and the whole batch attends over the
    cached prefix and its own fresh rows: drafts, plain decodes and prompt chunks alike.
    """

    kvtxn: LayerHook | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write all rows but drafts, which are staged; without a window write all.

        If that fails, the step falls back, and all rows are written.
        """
        write = super().do_kv_cache_update  # type: ignore[misc]
        _write(
            self.kvtxn,
            lambda slots: write(layer, key, value, kv_cache, slots),
            slot_mapping,
            lambda: self.kvtxn_stored(layer, key, value, kv_cache),
        )

    def kvtxn_stored(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a batch's rows in the cache's format, ``[num_rows, ...]`` for each plane.

        Those that are quantised go through vLLM's own writer, into a cache of their own, since it
        rounds in its own way. Others are returned as they are.
        """
        assert self.kvtxn is not None
        planes = self.kvtxn.ref.planes
        if not planes[0].format.quantised:
            return key, value
        slots = torch.arange(key.shape[0])
        count = -(-key.shape[0] // planes[0].block_size)
        blocks = kv_cache.new_zeros(count, *kv_cache.shape[1:])
        super().do_kv_cache_update(layer, key, value, blocks, slots)  # type: ignore[misc]
        cells = words(blocks.flatten(1))
        return tuple(cells[plane.index(slots)].view(plane.format.dtype) for plane in planes)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: BatchMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over the cache and the staged rows; without a window call vLLM's own attention.

        If that fails, the step falls back, and vLLM's own attention is called. ``output`` is
        written.
        """
        hook = self.kvtxn
        if hook is not None and hook.steps.deferring:
            try:
                batch = batches.batch_of(attn_metadata)
                fresh = self.kvtxn_stored(layer, key, value, kv_cache)
                _attend(hook, query, fresh, batch, output)
            except Exception as error:
                hook.steps.fail("attend", error)
            else:
                return output
        attended: Tensor = super().forward(  # type: ignore[misc]
            *(layer, query, key, value, kv_cache, attn_metadata, output),
            output_scale,
            output_block_scale,
        )
        return attended


class LatentWindowMixin:
    """A mixin that stages the draft rows of latent attention; vLLM's own code attends.

    Drafts, and the other rows of a request that has drafts, attend to each other through the
    forward's own tensors: vLLM takes every request with more than one row for a prompt, and reads
    from the cache only rows before it. ``batches.step_slots`` refuses a step that is not like
    that, so the results are bit-equal to stock's.
    """

    kvtxn: LayerHook | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write all rows but drafts, which are staged; without a window write all.

        If that fails, the step falls back, and all rows are written.
        """
        write = super().do_kv_cache_update  # type: ignore[misc]
        more = {"skip_scale": True} if skip_scale else {}  # before 0.33 there is none
        _write(
            self.kvtxn,
            lambda slots: write(
                *(kv_c_normed, k_pe, kv_cache, slots, kv_cache_dtype, k_scale), **more
            ),
            slot_mapping,
            lambda: (kv_c_normed, k_pe.squeeze(1)),
        )


def _write(
    hook: LayerHook | None,
    write: Callable[[Tensor], None],
    slots: Tensor,
    rows: Callable[[], tuple[Tensor, ...]],
) -> None:
    """Write a batch's rows but drafts, which are staged; without a window write all.

    If that fails, the step falls back, and all rows are written.

    Args:
        hook: the layer's; None: it is not hooked.
        write: writes the batch's rows to the slots that it is given, -1 for none.
        slots: int64 ``[num_rows]``.
        rows: returns the batch's rows to stage, one tensor per plane.
    """
    if hook is None or not hook.steps.deferring:
        write(slots)
        return
    steps = hook.steps
    try:
        write(steps.without_drafts(hook.ref.group, slots))
        steps.stage(hook.ref, *rows())
    except Exception as error:
        steps.fail("stage", error)
        write(slots)


def _attend(
    hook: LayerHook,
    query: Tensor,
    fresh: tuple[Tensor, ...],
    batch: batches.Batch,
    output: Tensor,
) -> None:
    """Attend for a whole batch over cached prefixes and its own rows, into ``output``.

    Rows of padding are not written.

    Args:
        hook: the layer's.
        query: ``[num_rows, num_heads, head_size]``.
        fresh: the batch's rows, one tensor per plane.
        batch: the batch.
        output: in the shape of ``query``.
    """
    planes, rows = hook.ref.planes, slice(batch.num_rows)
    assert hook.scores is not None
    args = AttentionArgs(
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        scale=hook.scores.scale,
        sliding_window=hook.scores.sliding_window,
        soft_cap=hook.scores.soft_cap,
    )
    own = tuple(p.format.encode(part[rows]) for p, part in zip(planes, fresh, strict=True))
    layout = hook.steps.batch_layout(batch.starts)
    output[rows].copy_(attention.attend(layout, planes, own, query[rows], args))


def hook_attention(steps: EagerSteps, layers: Sequence[TargetLayer]) -> None:
    """Let these layers read the steps' windows; ``unhook_attention`` undoes this.

    Args:
        steps: the runner's steps.
        layers: latent ones stage their drafts, and vLLM attends; for others kvtxn attends.

    Raises:
        LayerError: an attention class is not as expected; nothing was hooked.
        KVTxnError: a layer is hooked already.
    """
    for layer in layers:
        methods = (
            attention_layers.LATENT_METHODS if layer.latent else attention_layers.ATTENTION_METHODS
        )
        wrong = check_methods(type(layer.impl), methods)
        if wrong is not None:
            raise LayerError(
                "vllm",
                f"the attention of {layer.name!r} is unknown: {wrong}",
                hint="use policy 'undo', which leaves the attention alone",
            )
    for layer in layers:
        swap_class(layer.impl, LatentWindowMixin if layer.latent else WindowMixin)
        ref = steps.manager.layers[layer.name]
        scores = None if layer.latent else attention_layers.scores_of(layer.impl)
        layer.impl.kvtxn = LayerHook(steps, ref, scores)


class LentRowsMixin(WindowMixin):
    """A mixin of vLLM's attention that stages draft rows, and lends them their slots for a call.

    After the call the slots hold, byte for byte, the rows that they held before. So every sum is
    stock's, and between two layers no draft is in the cache. One thread runs the layers one after
    another, so nobody else looks in between.

    Attributes:
        kvtxn_before: the slots of the drafts, and the bytes that they hold between two calls, one
            tensor per plane; None while no slot is lent.
    """

    kvtxn_before: tuple[Tensor, list[Tensor]] | None = None

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write all rows, stage the draft rows, and remember the bytes below them.

        If staging fails, the step falls back; the rows are written in any case.
        """
        hook = self.kvtxn
        if hook is not None and hook.steps.deferring:
            assert isinstance(hook.steps, StateSteps)
            try:
                slots = hook.steps.draft_slots(hook.ref.group)
                before = [read(plane, slots) for plane in hook.ref.planes]
                hook.steps.stage(hook.ref, *self.kvtxn_stored(layer, key, value, kv_cache))
                self.kvtxn_before = slots, before
            except Exception as error:
                hook.steps.fail("stage", error)
        super(WindowMixin, self).do_kv_cache_update(  # type: ignore[misc]
            layer, key, value, kv_cache, slot_mapping
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run vLLM's own attention, and take the drafts out of their slots, even if it raises."""
        try:
            attended: Tensor = super(WindowMixin, self).forward(  # type: ignore[misc]
                *args, **kwargs
            )
        finally:
            self.kvtxn_give_back()
        return attended

    def kvtxn_give_back(self) -> None:
        """Put the bytes below the drafts back, if slots are lent; not in a step that has failed.

        There drafts stay written. If it fails, the step falls back.
        """
        hook, lent = self.kvtxn, self.kvtxn_before
        self.kvtxn_before = None
        if hook is None or lent is None or not hook.steps.deferring:
            return
        slots, before = lent
        try:
            chosen = select(slots, torch.ones_like(slots, dtype=torch.bool))
            for plane, content in zip(hook.ref.planes, before, strict=True):
                write(plane, content, chosen)
        except Exception as error:
            hook.steps.fail("attend", error)


def hook_lent_rows(steps: StateSteps, layers: Sequence[TargetLayer]) -> None:
    """Let these layers lend their slots to drafts; ``unhook_attention`` undoes this.

    Raises:
        LayerError: a layer is latent, or its class is not as expected; nothing was hooked.
        KVTxnError: a layer is hooked already.
    """
    for layer in layers:
        methods = attention_layers.ATTENTION_METHODS
        wrong = "its rows are latent" if layer.latent else check_methods(type(layer.impl), methods)
        if wrong is not None:
            raise LayerError("vllm", f"the attention of {layer.name!r} is unknown: {wrong}")
    for layer in layers:
        swap_class(layer.impl, LentRowsMixin)
        layer.impl.kvtxn = LayerHook(steps, steps.manager.layers[layer.name], None)


def unhook_attention(layers: Sequence[TargetLayer]) -> None:
    """Give these layers their own attention back; layers that are not hooked stay as they are.

    Raises:
        KVTxnError: somebody else has subclassed a layer's attention, which stays hooked; the
            others are given back.
    """
    with ExitStack() as ends:
        for layer in layers:
            if is_swapped(layer.impl):
                ends.callback(give_back, layer.impl)
