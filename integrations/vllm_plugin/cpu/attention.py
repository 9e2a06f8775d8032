"""vLLM's CPU attention with a window: its code attends; between layers no draft is in the cache.

Keys and values of drafts lie in their slots for one call alone: see ``LentRowsMixin``. Latent rows
of drafts are never written: see ``LatentWindowMixin``. So every sum is stock's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import attrs
from torch import Tensor

from ....errors import LayerError
from ....layers import LayerRef
from ...serving.eager_steps import EagerSteps
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
    """

    steps: EagerSteps
    ref: LayerRef


class LentRowsMixin:
    """A mixin of vLLM's attention that lends the slots of draft rows for a call.

    All rows are written and read as in stock. After the call the drafts are staged, and their slots
    hold, byte for byte, the rows that they held before. One thread runs the layers one after
    another, so nobody else looks in between.
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
        """Write all rows; with a window remember the bytes below the drafts.

        If that fails, the step falls back, and all rows are written.
        """
        hook = self.kvtxn
        if hook is not None and hook.steps.deferring:
            hook.steps.lend(hook.ref)
        super().do_kv_cache_update(  # type: ignore[misc]
            layer, key, value, kv_cache, slot_mapping
        )

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
        """Run vLLM's own attention, and take the drafts out of their slots, even if it raises."""
        try:
            attended: Tensor = super().forward(  # type: ignore[misc]
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                output_scale,
                output_block_scale,
            )
        finally:
            if self.kvtxn is not None:
                self.kvtxn.steps.take_back()
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
        more = {"skip_scale": True} if skip_scale else {}  # before 0.33 there is none

        def write(slots: Tensor) -> None:
            super(LatentWindowMixin, self).do_kv_cache_update(  # type: ignore[misc]
                *(kv_c_normed, k_pe, kv_cache, slots, kv_cache_dtype, k_scale), **more
            )

        hook = self.kvtxn
        if hook is None or not hook.steps.deferring:
            write(slot_mapping)
            return
        try:
            write(hook.steps.without_drafts(hook.ref.group, slot_mapping))
            hook.steps.stage(hook.ref, kv_c_normed, k_pe.squeeze(1))
        except Exception as error:
            hook.steps.fail("stage", error)
            write(slot_mapping)


def hook_attention(steps: EagerSteps, layers: Sequence[TargetLayer]) -> None:
    """Let these layers keep drafts in the steps' windows; ``unhook_attention`` undoes this.

    Args:
        steps: the runner's steps.
        layers: latent ones stage their drafts, others lend the drafts' slots.

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
        swap_class(layer.impl, LatentWindowMixin if layer.latent else LentRowsMixin)
        layer.impl.kvtxn = LayerHook(steps, steps.manager.layers[layer.name])


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
