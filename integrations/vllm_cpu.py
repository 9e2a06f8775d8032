"""vLLM's CPU attention with a window: drafts are staged, all other rows are written.

Two kinds of layers. Over keys and values, the whole batch attends here, over
cache and window, since the CPU kernels return no log-sum-exp. Latent attention
needs nothing of that: see ``latent_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor

from .. import attention
from ..errors import LayerError
from ..executor import AttentionArgs
from ..formats import words
from ..layers import LayerRef
from . import vllm_internals as internals
from .vllm_hooks import check_methods
from .vllm_steps import Steps


@attrs.frozen(eq=False)
class LayerHook:
    """What a hooked layer needs to know.

    Attributes:
        steps: the runner's.
        ref: the layer.
        scores: how it attends; None where that does not matter.
    """

    steps: Steps
    ref: LayerRef
    scores: internals.Scores | None


def _write(
    hook: LayerHook | None,
    write: Callable[[Tensor], None],
    slots: Tensor,
    rows: Callable[[], tuple[Tensor, ...]],
) -> None:
    """Stage the drafts; write all other rows.

    Args:
        hook: the layer's.
        write: vLLM's own writer of this batch's rows, given the slots.
        slots: of the batch.
        rows: gives the batch's keys and values, or both parts of its latent rows.
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


@cache
def window_attention(own: Any) -> Any:
    """A subclass of a layer's own attention class, whose objects can become ones of this."""

    class WindowAttention(own):  # type: ignore[misc]
        """Without a window it is vLLM's, untouched.

        With one, draft rows are staged instead of written, and the whole batch attends over
        the cached prefix and its own fresh rows: drafts, plain decodes and prompt chunks alike.
        """

        kvtxn: LayerHook | None = None

        def do_kv_cache_update(
            self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            """Stage the drafts; write all other rows."""
            write = super().do_kv_cache_update
            _write(
                self.kvtxn,
                lambda slots: write(layer, key, value, kv_cache, slots),
                slot_mapping,
                lambda: self._stored(layer, key, value, kv_cache),
            )

        def _stored(
            self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor
        ) -> tuple[Tensor, ...]:
            """Rows as they are, or quantised by vLLM's own writer, which rounds its own way."""
            assert self.kvtxn is not None
            planes = self.kvtxn.ref.planes
            if not planes[0].format.quantised:
                return key, value
            slots = torch.arange(key.shape[0])
            blocks = internals.scratch_blocks(kv_cache, -(-key.shape[0] // planes[0].block_size))
            super().do_kv_cache_update(layer, key, value, blocks, slots)
            cells = words(blocks.flatten(1))
            return tuple(cells[plane.index(slots)].view(plane.format.dtype) for plane in planes)

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            """Attend; through the window while there is one."""
            hook = self.kvtxn
            if hook is not None and hook.steps.deferring:
                try:
                    batch = internals.batch_of(attn_metadata)
                    fresh = self._stored(layer, key, value, kv_cache)
                    _attend(hook, query, fresh, batch, output)
                except Exception as error:
                    hook.steps.fail("attend", error)
                else:
                    return output
            attended: Tensor = super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                output_scale,
                output_block_scale,
            )
            return attended

    return WindowAttention


@cache
def latent_attention(own: Any) -> Any:
    """A subclass of a latent attention class, whose objects can become ones of this.

    Only writing differs. Rows that a request has beside drafts, and the drafts, attend to each
    other through the forward's own tensors: vLLM takes every request with more than one row for
    a prompt, and reads from the cache only what lies before it. ``internals.step_slots`` makes
    sure of that in every step, so what this computes is bit-equal to stock.
    """

    class LatentAttention(own):  # type: ignore[misc]
        """Without a window it is vLLM's, untouched."""

        kvtxn: LayerHook | None = None

        def do_kv_cache_update(
            self,
            kv_c_normed: Tensor,
            k_pe: Tensor,
            kv_cache: Tensor,
            slot_mapping: Tensor,
            kv_cache_dtype: str,
            k_scale: Tensor,
        ) -> None:
            """Stage the drafts; write all other rows."""
            write = super().do_kv_cache_update
            _write(
                self.kvtxn,
                lambda s: write(kv_c_normed, k_pe, kv_cache, s, kv_cache_dtype, k_scale),
                slot_mapping,
                lambda: (kv_c_normed, k_pe.squeeze(1)),
            )

    return LatentAttention


def _attend(
    hook: LayerHook,
    query: Tensor,
    fresh: tuple[Tensor, ...],
    batch: internals.Batch,
    output: Tensor,
) -> None:
    """Attention of a whole batch over cached prefixes and its own rows, into ``output``."""
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


def hook_attention(steps: Steps, layers: Sequence[internals.TargetLayer]) -> None:
    """Let these layers read the steps' windows.

    Raises:
        LayerError: an attention class is not as expected; nothing was hooked.
    """
    for layer in layers:
        methods = internals.LATENT_METHODS if layer.latent else internals.ATTENTION_METHODS
        wrong = check_methods(type(layer.impl), methods)
        if wrong is not None:
            raise LayerError("vllm", f"the attention of {layer.name!r} is unknown: {wrong}")
    for layer in layers:
        if not hasattr(layer.impl, "kvtxn"):
            own: Any = type(layer.impl)
            layer.impl.__class__ = (latent_attention if layer.latent else window_attention)(own)
        ref = steps.manager.layers[layer.name]
        scores = None if layer.latent else internals.scores_of(layer.impl)
        layer.impl.kvtxn = LayerHook(steps, ref, scores)


def unhook_attention(layers: Sequence[internals.TargetLayer]) -> None:
    """Give these layers their own attention back."""
    for layer in layers:
        if hasattr(layer.impl, "kvtxn"):
            layer.impl.kvtxn = None
            layer.impl.__class__ = type(layer.impl).__mro__[1]
