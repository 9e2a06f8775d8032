"""vLLM's FlashAttention backend: its classes, its calls, and its metadata."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any

import attrs
from torch import Tensor

from ....errors import KVTxnError
from . import Foreign


@cache
def module() -> Any:
    """Return the module of the FlashAttention backend."""
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


def classes() -> tuple[Any, Any, Any]:
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


def register(path: str) -> Callable[[], None]:
    """Let vLLM find the class at ``path`` under the name FLASH_ATTN.

    Returns:
        A function that undoes it.

    Raises:
        KVTxnError: somebody else's class is registered under that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum.FLASH_ATTN
    if backend.is_overridden():
        found = backend.get_path()
        if found != path:
            raise KVTxnError(
                "register_flash_attention",
                "vLLM's attention backend FLASH_ATTN is replaced already",
                expected="vLLM's own",
                got=found,
                hint="use policy 'undo', or switch the other plug-in off",
            )
        return lambda: None  # an earlier engine of this process registered it, and undoes it
    register_backend(backend, path)

    def undo() -> None:
        backend.clear_override()

    return undo


def takes_slots(impl: object) -> bool:
    """Tell whether a layer's attention is kvtxn's over FlashAttention 3, which reads by slot.

    It is vLLM's own class if a model names that class, or if vLLM remembers the class from an
    earlier engine of this process.
    """
    return hasattr(impl, "kvtxn") and getattr(impl, "vllm_flash_attn_version", None) == 3


# -- metadata -------------------------------------------------------------------------


def has_schedule(metadata: Any) -> bool:
    """Tell whether vLLM made FlashAttention's schedule of this batch."""
    return metadata.scheduler_metadata is not None


def drop_schedule(metadata: Any) -> None:
    """Remove vLLM's schedule from the metadata, so that FlashAttention makes one itself."""
    metadata.scheduler_metadata = None


def table_arguments(metadata: Any) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return requests' first rows, requests' lengths, the block table, and the longest length."""
    return (
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        metadata.max_seq_len,
    )


def by_slot(metadata: Any, table: Tensor, builder: Any, *, schedules: bool) -> Foreign:
    """Copy a batch's metadata for blocks of one row.

    Args:
        metadata: vLLM's metadata of the batch.
        table: the block table by slot, int32 ``[num_requests, max_seq_len]``.
        builder: the builder of the metadata.
        schedules: True if vLLM makes a schedule for such a batch; the copy then gets one, too.
    """
    found = copy(metadata)
    found.block_table = table
    if schedules:
        found.scheduler_metadata = _schedule(builder, metadata)
    return found


def _schedule(builder: Any, metadata: Any) -> Any:
    """Make FlashAttention's schedule of a batch over blocks of one row, in one launch.

    vLLM's metadata builder makes schedules for blocks of its own size only; of large blocks
    FlashAttention reads otherwise, and may divide the work differently.
    """
    size, builder.block_size = builder.block_size, 1
    try:
        return builder._get_scheduler_metadata(
            aot_schedule=True,
            batch_size=metadata.seq_lens.shape[0],
            cu_query_lens=metadata.query_start_loc,
            max_query_len=metadata.max_query_len,
            seqlens=metadata.seq_lens,
            max_seq_len=metadata.max_seq_len,
            causal=metadata.causal,
            max_num_splits=metadata.max_num_splits,
        )
    finally:
        builder.block_size = size


# -- calls ------------------------------------------------------------------------------


def write(
    impl: Any,
    layer: Any,
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


def fixed_arguments(impl: Any, key: Tensor, value: Tensor) -> dict[str, Any] | None:
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
    named: dict[str, Any]


def batch_arguments(metadata: Any) -> BatchArguments | None:
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


def attend(query: Tensor, output: Tensor, fixed: dict[str, Any], batch: BatchArguments) -> None:
    """Attend with FlashAttention, called as vLLM calls it, and write the result to ``output``.

    Args:
        query: ``[num_rows, num_heads, head_size]``.
        output: ``[num_rows, num_heads, head_size]``, overwritten.
        fixed: the layer's arguments, see ``fixed_arguments``.
        batch: the batch's arguments, see ``batch_arguments``.
    """
    rows = batch.rows
    module().flash_attn_varlen_func(q=query[rows], out=output[rows], **fixed, **batch.named)
