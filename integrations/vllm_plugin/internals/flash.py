"""vLLM's FlashAttention backend: its classes, its calls, and their arguments."""

from __future__ import annotations

from functools import cache

import attrs
from torch import Tensor

from . import Foreign
from .protocols.layers import AttentionLayer, FlashImpl, FlashMetadata


@cache
def module() -> Foreign:
    """Return the module of the FlashAttention backend."""
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


def classes() -> tuple[type, type, type]:
    """Return the classes of metadata builders, of layers' attention, and of the backend."""
    own = module()
    return own.FlashAttentionMetadataBuilder, own.FlashAttentionImpl, own.FlashAttentionBackend


def version(named: int | None = None) -> int | None:
    """Return the version of FlashAttention that vLLM takes on this machine's GPU.

    Args:
        named: the version that the engine's configuration names; None lets vLLM choose.
    """
    found: int | None = named or module().get_flash_attn_version()
    return found


def version_of(impl: object) -> int | None:
    """Return the version of FlashAttention of a layer's attention; None if it is another one."""
    return getattr(impl, "vllm_flash_attn_version", None)


# -- metadata -------------------------------------------------------------------------


def has_schedule(metadata: FlashMetadata) -> bool:
    """Tell whether vLLM made FlashAttention's schedule of this batch."""
    return metadata.scheduler_metadata is not None


def drop_schedule(metadata: FlashMetadata) -> None:
    """Remove vLLM's schedule from the metadata, so that FlashAttention makes one itself."""
    metadata.scheduler_metadata = None


# -- calls ------------------------------------------------------------------------------


def write(
    impl: FlashImpl,
    layer: AttentionLayer,
    rows: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
) -> None:
    """Write a batch's keys and values with vLLM's own writer.

    Args:
        impl: vLLM's attention of the layer.
        layer: vLLM's layer.
        rows: keys and values, ``[num_rows, num_kv_heads, head_size]`` each.
        caches: the layer's keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]``.
        slots: int64 ``[num_rows]``.
    """
    module().reshape_and_cache_flash(
        *(*rows, *caches, slots, impl.kv_cache_dtype, layer._k_scale, layer._v_scale)
    )


def fixed_arguments(impl: FlashImpl, key: Tensor, value: Tensor) -> dict[str, object] | None:
    """Prepare the arguments that all of a layer's calls of FlashAttention share.

    Outside of graphs the host has to keep up with all layers; making these arguments anew in each
    call, as vLLM does, takes a third of the call's host time.

    Args:
        impl: vLLM's attention of the layer.
        key: the layer's keys as blocks of one row, ``[num_slots, 1, num_kv_heads, head_size]``.
        value: the layer's values, ``[num_slots, 1, num_kv_heads, head_size]``.

    Returns:
        The arguments; None if vLLM adds others for this layer, so that its own code must make the
        call.
    """
    if impl.kv_cache_dtype not in ("auto", "float16", "bfloat16") or impl.alibi_slopes is not None:
        return None
    own = module()
    return {
        "k": own.canonicalize_singleton_dim_strides(key),
        "v": own.canonicalize_singleton_dim_strides(value),
        "softmax_scale": impl.scale,
        "window_size": list(impl.sliding_window),
        "softcap": impl.logits_soft_cap,
        "s_aux": impl.sinks,
        "fa_version": impl.vllm_flash_attn_version,
    }


@attrs.frozen(eq=False)
class BatchArguments:
    """The arguments that the calls of all layers share in one step.

    Attributes:
        rows: number of rows of the batch, padding excluded.
        named: the arguments, by the names of FlashAttention's parameters.
    """

    rows: slice
    named: dict[str, object]


def batch_arguments(metadata: FlashMetadata) -> BatchArguments | None:
    """Prepare the arguments that all layers share; None if vLLM passes each layer its own."""
    if metadata.causal is not True:
        return None
    named = {
        "cu_seqlens_q": metadata.query_start_loc,
        "seqused_k": metadata.seq_lens,
        "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_seq_len,
        "causal": True,
        "block_table": metadata.block_table,
        "scheduler_metadata": metadata.scheduler_metadata,
        "num_splits": metadata.max_num_splits,
    }
    return BatchArguments(slice(metadata.num_actual_tokens), named)


def attend(query: Tensor, output: Tensor, fixed: dict[str, object], batch: BatchArguments) -> None:
    """Attend with FlashAttention, called as vLLM calls it, and write the result to ``output``.

    Args:
        query: ``[num_rows, num_heads, head_size]``.
        output: ``[num_rows, num_heads, head_size]``, overwritten.
        fixed: the layer's arguments, see ``fixed_arguments``.
        batch: the batch's arguments, see ``batch_arguments``.
    """
    rows = batch.rows
    module().flash_attn_varlen_func(q=query[rows], out=output[rows], **fixed, **batch.named)
