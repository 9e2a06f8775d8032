"""Ends of blocks that the requests of a step cross, and the blocks that then keep their states."""

from __future__ import annotations

from typing import Final

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

#: Requests of a program.
_REQUESTS: Final = 64


@attrs.frozen(eq=False)
class BlockTables:
    """The block tables of all groups of layers with states; one line for each place of a batch.

    Attributes:
        tables: int32 ``[places, columns]`` each, all of the same strides.
        addresses: int64 ``[groups]`` on the device, where they begin.
        tokens: tokens of a block.
    """

    tables: tuple[Tensor, ...]
    addresses: Tensor
    tokens: int

    @classmethod
    def build(cls, tables: tuple[Tensor, ...], tokens: int) -> BlockTables:
        """Note where the tables are; their memory may not move afterwards.

        Raises:
            AssertionError: the tables' strides differ.
        """
        assert len({table.stride() for table in tables}) == 1
        where = [table.data_ptr() for table in tables]
        return cls(tables, torch.tensor(where, dtype=torch.int64, device=tables[0].device), tokens)


@triton.jit(do_not_specialize=["count", "table_stride", "source_stride", "line_stride"])
def boundaries_of(
    addresses: tl.tensor,
    lengths: tl.tensor,
    starts: tl.tensor,
    places: tl.tensor,
    sources: tl.tensor,
    boundary: tl.tensor,
    snapshots: tl.tensor,
    count: tl.int32,
    table_stride: tl.int64,
    source_stride: tl.int32,
    group_stride: tl.int64,
    line_stride: tl.int32,
    TOKENS: tl.constexpr,
    PLACED: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """Write ``boundary`` and ``snapshots``, as ``name_snapshots`` describes.

    Grid: (runs of requests, groups). The programs of group 0 write ``boundary``.
    """
    number = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    group = tl.program_id(1).to(tl.int64)
    live = number < count
    place = number.to(tl.int64)
    if PLACED:
        place = tl.load(places + number, mask=live, other=0)
    rows = tl.load(starts + place + 1, mask=live, other=0)
    rows -= tl.load(starts + place, mask=live, other=0)
    before = tl.maximum(tl.load(lengths + place, mask=live, other=0) - rows, 0)
    column = before // TOKENS
    table = tl.load(addresses + group).to(tl.pointer_type(tl.int32))
    block = tl.load(table + place * table_stride + column, mask=live, other=0)
    own = tl.load(sources + group * group_stride + number * source_stride, mask=live, other=0)
    block = tl.where(block == own, 0, block)
    tl.store(snapshots + group * line_stride + number, block, mask=live)
    if group == 0:
        tl.store(boundary + number, (column + 1) * TOKENS - before, mask=live)


def name_snapshots(
    tables: BlockTables,
    lengths: Tensor,
    starts: Tensor,
    places: Tensor | None,
    sources: Tensor,
    boundary: Tensor,
    snapshots: Tensor,
) -> None:
    """Write how many rows take each request to the end of its present block, and the block there.

    The present block is the one that the request's next token lies in before the step. Where it is
    the one that keeps the request's present state, there is nothing to keep twice: 0 is written.

    Args:
        tables: the block tables.
        lengths: int32 ``[places]``, the tokens of each request, those of the step included.
        starts: int32 ``[places + 1]``, the first row of each request in the step, and the end.
        places: int64 ``[num_requests]``, the place of each request; None for 0, 1, ...
        sources: int32 ``[groups, num_requests]``, any strides, the blocks of the present states.
        boundary: int32 ``[num_requests]``, contiguous; written: rows until the block's end.
        snapshots: int32 ``[groups, num_requests]``, a group contiguous; written: the block, or 0.
    """
    count = sources.shape[1]
    if sources.is_cuda:
        first = tables.tables[0]
        boundaries_of[triton.cdiv(count, _REQUESTS), len(tables.tables)](
            tables.addresses,
            lengths,
            starts,
            starts if places is None else places,
            *(sources, boundary, snapshots),
            *(count, first.stride(0), sources.stride(1), sources.stride(0), snapshots.stride(0)),
            TOKENS=tables.tokens,
            PLACED=places is not None,
            REQUESTS=_REQUESTS,
        )
        return
    at = slice(count) if places is None else places
    rows = starts.diff()[: lengths.shape[0]][at]
    before = (lengths[: rows.shape[0]] if places is None else lengths[at]) - rows
    before = before.clamp(min=0)
    column = before // tables.tokens
    boundary.copy_((column + 1) * tables.tokens - before)
    for number, table in enumerate(tables.tables):
        block = table[at].gather(1, column[:, None].long())[:, 0]
        snapshots[number] = block.where(block != sources[number], 0)
