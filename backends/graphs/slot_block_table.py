"""Block tables by slot: an engine's attention reads drafts in spare slots, beside its blocks.

An attention that takes blocks of one row finds a row anywhere, since its block table then names
slots. So a window's drafts can wait in spare slots of the cache itself: the engine's own writer
puts them there and its own attention finds them, and every sum is the one it would make if they lay
in their own slots. One launch per step fills the table.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Places of a request that a program fills in one step.
_STEP: Final = 1024

#: Entries behind the last line: the longest tile of an attention that reads tables by tiles.
_BEYOND: Final = 128

#: Programs that are launched, about, unless there are more requests.
_PROGRAMS: Final = 264


@triton.jit(
    do_not_specialize=["b_row", "t_row", "num_rows", "max_rows", "spare", "requests", "lines"],
    do_not_specialize_on_alignment=["starts", "seq_lens", "blocks", "slots", "table", "written"],
)
def fill_tables(
    starts: tl.tensor,
    seq_lens: tl.tensor,
    blocks: tl.tensor,
    slots: tl.tensor,
    position: tl.tensor,
    table: tl.tensor,
    written: tl.tensor,
    b_row: tl.int64,
    t_row: tl.int64,
    num_rows: tl.int32,
    max_rows: tl.int32,
    spare: tl.int32,
    requests: tl.int32,
    lines: tl.int32,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Fill in the slot of each row that a request reads, and of each row that the batch writes.

    Grid: (requests + 1, programs). The programs of the last line fill ``written``, those of every
    other line one request's lines of ``table``. No place is written twice, and no argument is both
    read and written. Offsets into ``blocks`` and ``table`` are computed in int64.

    Args:
        starts: int32 ``[requests + 1]``, each request's first row in the batch, and the end.
        seq_lens: int32 ``[requests]``, the batch's rows included; 0 for padding.
        blocks: int32 ``[requests, b_row]``, the engine's block table.
        slots: int64 ``[num_rows]``, where the engine writes; -1 is padding and stays -1.
        position: int64 ``[max_rows]``, -1 for rows that do not wait; rows beyond do not wait.
        table: int32 ``[requests * lines, t_row]``, filled as far as each request's length, at most
            to the end of its line.
        written: int64 ``[num_rows]``, filled with ``slots``, or for rows that wait ``spare`` + row.
        b_row: entries between the lines of ``blocks``.
        t_row: entries between the lines of ``table``.
        num_rows: rows of the batch.
        max_rows: rows that may wait.
        spare: first of ``max_rows`` slots that no block table names.
        requests: of the batch.
        lines: equal lines of each request.
        BLOCK_SIZE: slots per block.
        STEP: places per step of a program.
    """
    owner = tl.program_id(0)
    step = tl.arange(0, STEP)
    begin = tl.program_id(1) * STEP
    stride = tl.num_programs(1) * STEP
    if owner == requests:
        for first in range(begin, num_rows, stride):
            row = first + step
            inside = row < num_rows
            waits = tl.load(position + row, mask=row < max_rows, other=-1) >= 0
            slot = tl.load(slots + row, mask=inside, other=-1)
            tl.store(written + row, tl.where(waits & (slot >= 0), spare + row, slot), mask=inside)
    else:
        start = tl.load(starts + owner)
        total = tl.load(seq_lens + owner)
        past = total - (tl.load(starts + owner + 1) - start)
        for first in range(begin, total, stride):
            place = first + step
            inside = place < tl.minimum(total, t_row)
            row = start + place - past
            fresh = inside & (place >= past) & (row < max_rows)
            waits = tl.load(position + row, mask=fresh, other=-1) >= 0
            block = tl.load(blocks + owner * b_row + place // BLOCK_SIZE, mask=inside, other=0)
            slot = tl.where(waits, spare + row, block * BLOCK_SIZE + place % BLOCK_SIZE)
            for line in range(lines):
                tl.store(table + (owner * lines + line) * t_row + place, slot, mask=inside)


def slot_tables(
    starts: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    slots: Tensor,
    position: Tensor,
    *,
    spare: int,
    block_size: int,
    longest: int,
    lines: int = 1,
) -> tuple[Tensor, Tensor]:
    """Make a batch's block table by slot, and the slots that it is written to.

    One launch, which waits for nothing and can be captured.

    Args:
        starts: int32 ``[num_requests + 1]``, each request's first row in the batch, and the end.
        seq_lens: int32 ``[num_requests]``, the batch's rows included; 0 for padding.
        blocks: int32 ``[num_requests, max_blocks]``, the engine's block table.
        slots: int64 ``[num_rows]``, where the engine writes; -1 is padding.
        position: int64 ``[max_rows]``, contiguous: -1 for rows that do not wait.
        spare: first of ``max_rows`` slots that ``blocks`` never names; row ``i`` waits in
            ``spare + i``.
        block_size: rows of a block.
        longest: no number in ``seq_lens`` is greater; the table has memory for no more.
        lines: equal lines that each request gets, one after the other; an attention that knows no
            causal order takes one for each row of a request.

    Returns:
        int32 ``[num_requests * lines, max_blocks * block_size]``: as wide as the engine's own
        table, since an attention may divide its work by the width. Each line is filled as far as
        its request's length; behind ``longest`` it overlaps the next line. Some entries without
        meaning follow the last line, for an attention that reads whole tiles of the table. And
        int64 ``[num_rows]``.
    """
    requests, width = blocks.shape[0], blocks.shape[1] * block_size
    line = min(-(-longest // block_size) * block_size, width)
    entries = requests * lines * line + width - line + _BEYOND
    room = torch.empty(entries, dtype=torch.int32, device=blocks.device)
    table = room.as_strided((requests * lines, width), (line, 1))
    written = torch.empty_like(slots)
    programs = max(1, min(-(-line // _STEP), _PROGRAMS // (requests + 1)))
    fill_tables[(requests + 1, programs)](
        *(starts, seq_lens, blocks, slots, position, table, written),
        *(blocks.stride(0), line, slots.shape[0], position.shape[0], spare, requests, lines),
        BLOCK_SIZE=block_size,
        STEP=_STEP,
    )
    return table, written
