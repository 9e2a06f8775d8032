"""vLLM's attention backends that can read blocks of one row: their classes, metadata, and calls.

For each way in which a backend keeps the metadata of a batch there is one class. It says of what a
block table by slot is made, and puts that table into a copy that leads to blocks of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from ....errors import KVTxnError
from . import Foreign
from .runner_protocols import (
    AttentionLayer,
    FlashBuilder,
    FlashImpl,
    FlashLatentBuilder,
    FlashLatentMetadata,
    FlashMetadata,
    LatentMetadata,
    TritonMetadata,
)


def triton_attention() -> tuple[type, type, type]:
    """Return TRITON_ATTN's classes of metadata builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends import triton_attn as own

    return own.TritonAttentionMetadataBuilder, own.TritonAttentionImpl, own.TritonAttentionBackend


def triton_latent() -> tuple[type, type, type]:
    """Return TRITON_MLA's classes of metadata builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends.mla import triton_mla as own

    return own.TritonMLAMetadataBuilder, own.TritonMLAImpl, own.TritonMLABackend


def flash_latent() -> tuple[type, type, type]:
    """Return FLASH_ATTN_MLA's classes of builders, of layers' attention, of the backend."""
    from vllm.v1.attention.backends.mla import flashattn_mla as own

    return own.FlashAttnMLAMetadataBuilder, own.FlashAttnMLAImpl, own.FlashAttnMLABackend


def register(name: str, path: str) -> Callable[[], None]:
    """Let vLLM find the class at ``path`` under the name of one of its attention backends.

    Returns:
        A function that undoes it; if the same class was registered before, one that does nothing.

    Raises:
        KVTxnError: another class is registered under that name.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    backend = AttentionBackendEnum[name]
    if backend.is_overridden():
        found = backend.get_path()
        if found != path:
            raise KVTxnError(
                "register_attention_backend",
                f"vLLM's attention backend {name} is replaced already",
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
    """Tell whether a layer's attention is kvtxn's, over kernels that read blocks of one row.

    It is vLLM's own class if a model names that class, or if vLLM remembers the class from an
    earlier engine of this process. Of FlashAttention version 3 reads such blocks; Triton's kernel
    does unless the user asks for tensor descriptors, which want whole tiles within a block.
    """
    version = getattr(impl, "vllm_flash_attn_version", 3)
    return hasattr(impl, "kvtxn") and version == 3 and not getattr(impl, "use_td", False)


@cache
def flash_module() -> Foreign:
    """Return vLLM's module of the FlashAttention backend, imported at the first call."""
    from vllm.v1.attention.backends import flash_attn

    return flash_attn


def flash_attention() -> tuple[type, type, type]:
    """Return FLASH_ATTN's classes of metadata builders, of layers' attention, of the backend."""
    own = flash_module()
    return own.FlashAttentionMetadataBuilder, own.FlashAttentionImpl, own.FlashAttentionBackend


def flash_version(named: int | None = None) -> int | None:
    """Return the version of FlashAttention that vLLM takes on this machine's GPU.

    Args:
        named: the version that the user has named, which is taken; None: vLLM chooses.

    Returns:
        The version, such as 3; None if vLLM has none here.
    """
    found: int | None = named or flash_module().get_flash_attn_version()
    return found


def flash_version_of(impl: object) -> int | None:
    """Return the version of FlashAttention of a layer's attention; None for other backends."""
    return getattr(impl, "vllm_flash_attn_version", None)


# -- metadata -------------------------------------------------------------------------


def has_schedule(metadata: FlashMetadata) -> bool:
    """Tell whether vLLM made FlashAttention's schedule of this batch."""
    return metadata.scheduler_metadata is not None


def drop_schedule(metadata: FlashMetadata) -> None:
    """Set vLLM's schedule in the metadata to None, so that FlashAttention makes one itself."""
    metadata.scheduler_metadata = None


# -- calls ------------------------------------------------------------------------------


def write_by_flash(
    impl: FlashImpl,
    layer: AttentionLayer,
    rows: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
) -> None:
    """Write a batch's keys and values into the caches, with vLLM's own writer.

    Args:
        impl: vLLM's attention of the layer.
        layer: vLLM's layer.
        rows: keys and values, ``[num_rows, num_kv_heads, head_size]`` each.
        caches: the layer's keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]``.
        slots: int64 ``[num_rows]``; rows with a negative slot are not written.
    """
    flash_module().reshape_and_cache_flash(
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
        The arguments; None for caches in eight bits and for ALiBi, where vLLM adds others, so that
        its own code must make the call.
    """
    if impl.kv_cache_dtype not in ("auto", "float16", "bfloat16") or impl.alibi_slopes is not None:
        return None
    own = flash_module()
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
    """Return the arguments of FlashAttention that all layers share in one step.

    None if the batch is not causal, or says so by a tensor: vLLM passes each layer its own then.
    """
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


def attend_by_flash(
    query: Tensor, output: Tensor, fixed: dict[str, object], batch: BatchArguments
) -> None:
    """Attend with FlashAttention, called as vLLM calls it, and write the result to ``output``.

    Args:
        query: ``[num_rows, num_heads, head_size]``.
        output: ``[num_rows, num_heads, head_size]``, overwritten.
        fixed: the layer's arguments, see ``fixed_arguments``.
        batch: the batch's arguments, see ``batch_arguments``.
    """
    rows = batch.rows
    flash_module().flash_attn_varlen_func(q=query[rows], out=output[rows], **fixed, **batch.named)


BatchLike = TypeVar("BatchLike", bound=TritonMetadata)
LatentLike = TypeVar("LatentLike", bound=LatentMetadata)


@attrs.frozen(eq=False)
class TableArguments:
    """The parts of which a block table by slot is made.

    Attributes:
        starts: int32 ``[num_requests + 1]``, each request's first row in the batch, and the end.
        seq_lens: int32 ``[num_requests]``, the batch's rows included.
        blocks: int32 ``[num_requests, max_blocks]``, vLLM's block table.
        longest: no number in ``seq_lens`` is greater.
        lines: lines of the table that each request gets.
    """

    starts: Tensor
    seq_lens: Tensor
    blocks: Tensor
    longest: int
    lines: int = 1


class SchedulingBuilder(FlashBuilder, Protocol):
    """FLASH_ATTN's builder of metadata, as kvtxn hooks it; ``schedules``: it makes schedules."""

    schedules: bool | None


class Tables(Protocol):
    """A way in which metadata names blocks; each backend has its own metadata and builder."""

    def arguments(self, metadata: Any) -> TableArguments:
        """Return the rows, lengths and blocks of which a batch's table by slot is made."""

    def by_slot(self, metadata: Any, table: Tensor, builder: Any) -> object:
        """Copy a batch's metadata for blocks of one row; ``metadata`` itself stays as it is.

        Args:
            metadata: vLLM's.
            table: the table by slot, of which the copy names the blocks.
            builder: vLLM's builder of this metadata, which may make a schedule.
        """


class BatchTables:
    """Metadata of a whole batch: TRITON_ATTN's."""

    def arguments(self, metadata: TritonMetadata) -> TableArguments:
        """Return the rows, lengths and blocks of which the batch's table by slot is made."""
        return _of_batch(metadata)

    def by_slot(self, metadata: TritonMetadata, table: Tensor, builder: object) -> TritonMetadata:
        """Copy a batch's metadata with ``table`` as its block table; ``builder`` is not used."""
        return _batch_by_slot(metadata, table)


class FlashTables:
    """FLASH_ATTN's metadata, with the schedule of FlashAttention 3."""

    def arguments(self, metadata: FlashMetadata) -> TableArguments:
        """Return the rows, lengths and blocks of which the batch's table by slot is made."""
        return _of_batch(metadata)

    def by_slot(
        self, metadata: FlashMetadata, table: Tensor, builder: SchedulingBuilder
    ) -> FlashMetadata:
        """Copy a batch's metadata with ``table`` as its block table.

        If ``builder.schedules``, the copy has a new schedule of FlashAttention, for blocks of one
        row.
        """
        found = _batch_by_slot(metadata, table)
        if builder.schedules:
            found.scheduler_metadata = self._schedule(builder, metadata)
        return found

    def _schedule(self, builder: SchedulingBuilder, metadata: FlashMetadata) -> Tensor | None:
        """Make FlashAttention's schedule of a batch over blocks of one row, in one launch.

        vLLM's metadata builder makes schedules for blocks of its own size only; of large blocks
        FlashAttention reads otherwise, and may divide the work differently. The builder's size is 1
        during the call.
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


class TritonLatentTables:
    """TRITON_MLA's metadata.

    Its kernel knows no causal order, so vLLM's code gives each row of a request a line of the
    table and a length of its own, anew in each layer. Here all layers share them.
    """

    def arguments(self, metadata: LatentMetadata) -> TableArguments:
        """Return the parts of which the table by slot is made: a line for each decoding row."""
        return attrs.evolve(_of_decoding(metadata), lines=self._lines(metadata))

    def by_slot(self, metadata: LatentMetadata, table: Tensor, builder: object) -> LatentMetadata:
        """Copy a batch's metadata as if each decoding row were a request.

        Each row's length ends with that row. Where requests have different numbers of rows, or
        attention is not causal, the lines are left to vLLM's code. ``builder`` is not used.
        """
        found, lines = _decoding_by_slot(metadata, table), self._lines(metadata)
        if lines > 1 and found.decode is not None:
            lengths = found.decode.seq_lens
            back = torch.arange(1 - lines, 1, device=lengths.device, dtype=lengths.dtype)
            found.decode.seq_lens = (lengths.unsqueeze(1) + back).flatten().clamp(min=0)
        return found

    @staticmethod
    def _lines(metadata: LatentMetadata) -> int:
        """Return the decoding rows of each request; 1 leaves the lines to vLLM's own code.

        1 if nothing decodes, if attention is not causal, or if requests have different numbers of
        rows.
        """
        if metadata.decode is None or not metadata.causal:
            return 1
        each, rest = divmod(metadata.num_decode_tokens, metadata.decode.seq_lens.shape[0])
        return 1 if rest else max(1, each)


class FlashLatentTables:
    """FLASH_ATTN_MLA's metadata, with the schedule of FlashAttention 3."""

    def arguments(self, metadata: FlashLatentMetadata) -> TableArguments:
        """Return the rows, lengths and blocks of the decoding requests, for the table by slot."""
        return _of_decoding(metadata)

    def by_slot(
        self, metadata: FlashLatentMetadata, table: Tensor, builder: FlashLatentBuilder
    ) -> FlashLatentMetadata:
        """Copy a batch's metadata with ``table`` as the block table of its decoding part.

        If vLLM made a schedule, the copy has one for blocks of one row; the builder's page size is
        1 during that call.
        """
        found = _decoding_by_slot(metadata, table)
        decode = found.decode
        if decode is not None and decode.scheduler_metadata is not None:
            size, builder.page_size = builder.page_size, 1
            try:
                decode.scheduler_metadata = builder._schedule_decode(
                    num_reqs=decode.seq_lens.shape[0],
                    cu_query_lens=decode.query_start_loc,
                    max_query_len=decode.max_query_len,
                    seqlens=decode.seq_lens,
                    max_seq_len=decode.max_seq_len,
                    causal=True,
                    max_num_splits=decode.max_num_splits,
                )
            finally:
                builder.page_size = size
        return found


def _of_batch(metadata: TritonMetadata) -> TableArguments:
    """Return the rows, lengths and blocks of a whole batch, for its table by slot."""
    return TableArguments(
        *(metadata.query_start_loc, metadata.seq_lens),
        *(metadata.block_table, metadata.max_seq_len),
    )


def _batch_by_slot(metadata: BatchLike, table: Tensor) -> BatchLike:
    """Copy a batch's metadata, with ``table`` as its block table."""
    found = copy(metadata)
    found.block_table = table
    return found


def _of_decoding(metadata: LatentMetadata) -> TableArguments:
    """Return the rows, lengths and blocks of a latent batch's decoding part, for its table by slot.

    No request if nothing decodes. Of latent attention's metadata the part for decoding alone reads
    the step's rows from the cache. Requests that vLLM counts among prompts read them from the
    forward, and from the cache older rows, none of which waits.
    """
    starts, decode = metadata.query_start_loc, metadata.decode
    if decode is None:
        none = starts.new_empty(0)
        return TableArguments(starts, none, none.view(0, 1), 1)
    return TableArguments(starts, decode.seq_lens, decode.block_table, metadata.max_seq_len)


def _decoding_by_slot(metadata: LatentLike, table: Tensor) -> LatentLike:
    """Copy a batch's metadata, with ``table`` as the block table of its decoding part, if any."""
    found = copy(metadata)
    if metadata.decode is not None:
        found.decode = copy(metadata.decode)
        found.decode.block_table = table
    return found
