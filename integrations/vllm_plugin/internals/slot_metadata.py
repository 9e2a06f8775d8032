"""vLLM's metadata of attention, and copies of it that lead to blocks of one row.

One class per way in which an attention backend keeps the metadata of a batch. Each says from what a
block table by slot is made, and puts that table into a copy.
"""

from __future__ import annotations

from copy import copy
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from .protocols.layers import (
    FlashBuilder,
    FlashLatentBuilder,
    FlashLatentMetadata,
    FlashMetadata,
    LatentMetadata,
    TritonMetadata,
)

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
        """Return what the table by slot is made of."""

    def by_slot(self, metadata: Any, table: Tensor, builder: Any) -> object:
        """Copy a batch's metadata for blocks of one row.

        Args:
            metadata: vLLM's metadata of the batch.
            table: the block table by slot.
            builder: the builder of the metadata.
        """


class BatchTables:
    """Metadata of a whole batch: TRITON_ATTN's."""

    def arguments(self, metadata: TritonMetadata) -> TableArguments:
        """Return what the table by slot is made of."""
        return _of_batch(metadata)

    def by_slot(self, metadata: TritonMetadata, table: Tensor, builder: object) -> TritonMetadata:
        """Copy a batch's metadata for blocks of one row."""
        return _batch_by_slot(metadata, table)


class FlashTables:
    """FLASH_ATTN's metadata, with the schedule of FlashAttention 3."""

    def arguments(self, metadata: FlashMetadata) -> TableArguments:
        """Return what the table by slot is made of."""
        return _of_batch(metadata)

    def by_slot(
        self, metadata: FlashMetadata, table: Tensor, builder: SchedulingBuilder
    ) -> FlashMetadata:
        """Copy a batch's metadata; the copy has a schedule if vLLM makes one for such a batch."""
        found = _batch_by_slot(metadata, table)
        if builder.schedules:
            found.scheduler_metadata = self._schedule(builder, metadata)
        return found

    def _schedule(self, builder: SchedulingBuilder, metadata: FlashMetadata) -> Tensor | None:
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


class TritonLatentTables:
    """TRITON_MLA's metadata.

    Its kernel knows no causal order, so vLLM's code gives each row of a request a line of the
    table and a length of its own, anew in each layer. Here all layers share them.
    """

    def arguments(self, metadata: LatentMetadata) -> TableArguments:
        """Return what the table by slot is made of, with a line for each decoding row."""
        return attrs.evolve(_of_decoding(metadata), lines=self._lines(metadata))

    def by_slot(self, metadata: LatentMetadata, table: Tensor, builder: object) -> LatentMetadata:
        """Copy a batch's metadata as if each decoding row were a request."""
        found, lines = _decoding_by_slot(metadata, table), self._lines(metadata)
        if lines > 1 and found.decode is not None:
            lengths = found.decode.seq_lens
            back = torch.arange(1 - lines, 1, device=lengths.device, dtype=lengths.dtype)
            found.decode.seq_lens = (lengths.unsqueeze(1) + back).flatten().clamp(min=0)
        return found

    @staticmethod
    def _lines(metadata: LatentMetadata) -> int:
        """Return the decoding rows of each request; 1 leaves the lines to vLLM's own code."""
        if metadata.decode is None or not metadata.causal:
            return 1
        each, rest = divmod(metadata.num_decode_tokens, metadata.decode.seq_lens.shape[0])
        return 1 if rest else max(1, each)


class FlashLatentTables:
    """FLASH_ATTN_MLA's metadata, with the schedule of FlashAttention 3."""

    def arguments(self, metadata: FlashLatentMetadata) -> TableArguments:
        """Return what the table by slot is made of."""
        return _of_decoding(metadata)

    def by_slot(
        self, metadata: FlashLatentMetadata, table: Tensor, builder: FlashLatentBuilder
    ) -> FlashLatentMetadata:
        """Copy a batch's metadata; the copy has a schedule if vLLM makes one."""
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
    """Return what the table by slot of a whole batch is made of."""
    return TableArguments(
        *(metadata.query_start_loc, metadata.seq_lens),
        *(metadata.block_table, metadata.max_seq_len),
    )


def _batch_by_slot(metadata: BatchLike, table: Tensor) -> BatchLike:
    found = copy(metadata)
    found.block_table = table
    return found


def _of_decoding(metadata: LatentMetadata) -> TableArguments:
    """Return what the table by slot of a latent batch is made of.

    Of latent attention's metadata the part for decoding alone reads the step's rows from the cache.
    Requests that vLLM counts among prompts read them from the forward, and from the cache older
    rows, none of which waits.
    """
    starts, decode = metadata.query_start_loc, metadata.decode
    if decode is None:
        none = starts.new_empty(0)
        return TableArguments(starts, none, none.view(0, 1), 1)
    return TableArguments(starts, decode.seq_lens, decode.block_table, metadata.max_seq_len)


def _decoding_by_slot(metadata: LatentLike, table: Tensor) -> LatentLike:
    found = copy(metadata)
    if metadata.decode is not None:
        found.decode = copy(metadata.decode)
        found.decode.block_table = table
    return found
