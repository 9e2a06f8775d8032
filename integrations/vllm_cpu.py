"""vLLM's CPU attention: where its packed rows lie, and attention that reads a window.

The CPU kernels store K transposed or interleaved, differently per instruction
set, so a row there is no strided view. Instead of knowing each packing, the
layout is *probed*: the real writer fills one scratch block with bit patterns
that tell, for every element of the block, which element of which row it holds.
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
from .vllm_session import Session

#: Writes keys and values ``[block_size, heads, head_size]`` to slots 0, 1, ... of a block.
Writer = Callable[[Tensor, Tensor], None]


def probe(write: Writer, block: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Where a writer puts each element of each row, found by watching it.

    Args:
        write: the real writer.
        block: the scratch block it writes to, any shape, contiguous.
        shape: ``(block_size, num_kv_heads, head_size)``.
        dtype: of the keys and values it takes.

    Returns:
        int64 ``[2, block_size, num_kv_heads, head_size]``: offsets in the block, of keys and
        of values.

    Raises:
        LayerError: the writer does not put each element in exactly one place of its own.
    """
    count = 2 * shape[0] * shape[1] * shape[2]
    identity = torch.arange(count)
    cells = words(block.view(-1))

    def places_of(pattern: Tensor) -> Tensor:
        cells.zero_()
        write(*pattern.to(dtype).view(2, *shape))
        return cells != 0

    places = places_of(torch.ones_like(identity)).nonzero().squeeze(1)
    found = torch.zeros_like(places)
    for bit in range((count - 1).bit_length()):
        found |= places_of(identity >> bit & 1)[places].long() << bit
    table = torch.full((count,), -1)
    table[found % count] = places
    if places.numel() != count or bool((table < 0).any()):
        raise LayerError(
            "probe",
            "the cache's layout is not one element per place",
            expected=f"{count} places for {count} elements",
            got=f"{places.numel()} places for {int((table >= 0).sum())} elements",
            hint="kvtxn cannot address rows of this cache",
        )
    return table.view(2, *shape)


def layer_refs(layers: Sequence[internals.TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """The target's layers, their packing probed once per kind.

    Raises:
        LayerError: a layout that cannot be addressed.
    """
    tables: dict[tuple[object, ...], Tensor] = {}
    refs = []
    for layer in layers:
        blocks = layer.cache.flatten(1)
        if blocks.data_ptr() != layer.cache.data_ptr():
            raise LayerError("vllm", f"the blocks of {layer.name!r} are not contiguous")
        kind = (internals.kernel_of(layer.module), layer.cache.dtype, *layer.cache.shape[1:])
        if kind not in tables:
            tables[kind] = _probe_layer(layer)
        key_scale, value_scale = (
            (None, None) if kv_dtype == "auto" else internals.stored_scales(layer.module)
        )
        refs.append(
            LayerRef(
                layer.name,
                blocks,
                blocks,
                group=layer.group,
                k_scale=key_scale,
                v_scale=value_scale,
                kv_dtype=kv_dtype,
                key_offsets=tables[kind][0],
                value_offsets=tables[kind][1],
            )
        )
    return refs


def _probe_layer(layer: internals.TargetLayer) -> Tensor:
    heads, block_size = layer.cache.shape[1:3]
    scratch = internals.scratch_block(layer.cache)
    slots = torch.arange(block_size)

    def write(key: Tensor, value: Tensor) -> None:
        layer.impl.do_kv_cache_update(layer.module, key, value, scratch, slots)

    dtype = internals.model_dtype(layer.module)
    return probe(write, scratch, (block_size, heads, layer.head_size), dtype)


# -- deferred: attention that reads the window ------------------------------------


@attrs.frozen(eq=False)
class LayerHook:
    """What a hooked layer needs to know.

    Attributes:
        session: the runner's.
        ref: the layer.
        scores: how it attends.
    """

    session: Session
    ref: LayerRef
    scores: internals.Scores


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
            """Write what is no draft; stage the drafts."""
            hook = self.kvtxn
            if hook is None or not hook.session.deferring:
                super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
                return
            session = hook.session
            try:
                kept = session.without_drafts(hook.ref.group, slot_mapping)
                super().do_kv_cache_update(layer, key, value, kv_cache, kept)
                session.stage(hook.ref, key, value)
            except Exception as error:
                session.fail("stage", error)
                super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

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
            if hook is not None and hook.session.deferring:
                try:
                    _attend(hook, query, key, value, internals.batch_of(attn_metadata), output)
                except Exception as error:
                    hook.session.fail("attend", error)
                else:
                    return output
            attended: Tensor = super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                output_scale,
                output_block_scale,
            )
            return attended

    return WindowAttention


def _attend(
    hook: LayerHook,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch: internals.Batch,
    output: Tensor,
) -> None:
    """Attention of a whole batch over cached prefixes and its own rows, into ``output``."""
    planes, rows = hook.ref.planes, slice(batch.num_rows)
    args = AttentionArgs(
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        scale=hook.scores.scale,
        sliding_window=hook.scores.sliding_window,
        soft_cap=hook.scores.soft_cap,
    )
    fresh = (planes[0].format.encode(key[rows]), planes[1].format.encode(value[rows]))
    layout = hook.session.batch_layout(batch.starts)
    output[rows].copy_(attention.attend(layout, planes, fresh, query[rows], args))


def hook_attention(session: Session, layers: Sequence[internals.TargetLayer]) -> None:
    """Let these layers read the session's windows.

    Raises:
        LayerError: an attention class is not as expected; nothing was hooked.
    """
    for layer in layers:
        wrong = internals.check_methods(type(layer.impl), internals.ATTENTION_METHODS)
        if wrong is not None:
            raise LayerError("vllm", f"the attention of {layer.name!r} is unknown: {wrong}")
    for layer in layers:
        if not hasattr(layer.impl, "kvtxn"):
            own: Any = type(layer.impl)
            layer.impl.__class__ = window_attention(own)
        ref = session.manager.layers[layer.name]
        layer.impl.kvtxn = LayerHook(session, ref, internals.scores_of(layer.impl))


def unhook_attention(layers: Sequence[internals.TargetLayer]) -> None:
    """Give these layers their own attention back."""
    for layer in layers:
        if hasattr(layer.impl, "kvtxn"):
            layer.impl.kvtxn = None
            layer.impl.__class__ = type(layer.impl).__mro__[1]
