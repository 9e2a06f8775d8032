"""The rows of one request of a step, in Triton: the same as ``kvtxn.audit.rows.Batch``."""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines

SERIAL = tl.constexpr(book.SERIAL)
BASE = tl.constexpr(group_lines.BASE)
STRIDE = tl.constexpr(group_lines.STRIDE)
BLOCK_SIZE = tl.constexpr(group_lines.BLOCK_SIZE)
NUM_BLOCKS = tl.constexpr(group_lines.NUM_BLOCKS)
RING = tl.constexpr(group_lines.RING)


@triton.jit
def fill_first(
    index: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
) -> None:
    """Write the position of a request's first row into ``first_position``; -1 for no such row.

    Several programs may do so for one request; all write the same.

    Args:
        index: the request's number in the step.
        starts: int ``[num_requests + 1]``.
        first_position: int ``[num_requests]``.
        positions: int ``[num_rows]``.
        num_rows: rows for which every tensor of rows has room.
    """
    start = tl.load(starts + index).to(tl.int64)
    inside = (start >= 0) & (start < num_rows)
    found = tl.load(positions + tl.where(inside, start, 0), mask=inside, other=-1)
    tl.store(first_position + index, found)
    tl.debug_barrier()


@triton.jit
def rows_of(
    index: tl.tensor,
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    facts: tl.tensor,
    num_lines: tl.tensor,
    own_stride: tl.tensor,
    num_rows: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Read one request of a step, so that all addresses made of it lie inside.

    Args:
        index: the request's number in the step.
        lines: int ``[num_requests]``.
        starts: int ``[num_requests + 1]``.
        first_position: int ``[num_requests]``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        num_lines: lines.
        own_stride: one more than the most positions of a request.
        num_rows: rows for which every tensor of rows has room.

    Returns:
        The line, the number of the first row, its position, and the number of rows: 0 for padding
        and where the numbers do not fit, but the first row's number only where it is no row of the
        step; True if the line is of an admitted request; the number of rows that the step has for
        padding, or for a request that is malformed or not admitted; True if the request is so, and
        no padding.
    """
    line = tl.load(lines + index).to(tl.int64)
    start = tl.load(starts + index).to(tl.int64)
    end = tl.load(starts + index + 1).to(tl.int64)
    first = tl.load(first_position + index).to(tl.int64)
    given = end - start
    named = line >= 0
    # No sum of what the step says: it might be too large for 64 bits.
    inside = (end > start) & (start >= 0) & (end <= num_rows)
    fits = inside & named & (line < num_lines) & (first >= 0) & (first < own_stride - given)
    line = tl.where(fits, line, 0)
    start = tl.where(inside, start, 0)
    first = tl.where(fits, first, 0)
    count = tl.where(fits, given, 0)
    admitted = fits & (tl.load(facts + SERIAL * num_lines + line) >= 0)
    skipped = tl.where(inside & (admitted == 0), given, 0)
    refused = named & (given != 0) & (admitted == 0)
    return line, start, first, count, admitted, skipped, refused


@triton.jit
def parent_of(parents: tl.tensor, draft: tl.tensor) -> tl.tensor:
    """Return the drafts that drafts of a tree follow; -1: none, as for whatever is below 0.

    Args:
        parents: pointer to the first of a request's drafts in int ``[num_rows]``.
        draft: int64 ``[TILE]``, numbers among the request's drafts.
    """
    given = tl.load(parents + draft, mask=draft >= 0, other=-1).to(tl.int64)
    return tl.where(draft >= 0, tl.maximum(tl.minimum(given, draft - 1), -1), -1)


@triton.jit
def place_of(
    slots: tl.tensor,
    row: tl.tensor,
    within: tl.tensor,
    count: tl.tensor,
    live: tl.tensor,
    group: tl.tensor,
) -> tl.tensor:
    """Return the index in ``Books.words`` of the digest of each row's slot; -1 if it has none.

    A row has no digest if its slot is -1 or beyond the cache, and in a ring if a later row of the
    same step overwrites it.

    Args:
        slots: address of int64 ``[num_rows]``, the cache slot of each row of the step.
        row: int ``[TILE]``, the index of each row in the step.
        within: int ``[TILE]``, the index of each row in its request.
        count: number of rows that the request has in the step.
        live: bool ``[TILE]``, False for places of the tile beyond the last row.
        group: address of the KV-cache group's line, see ``kvtxn.audit.group_lines``.
    """
    slot = tl.load(slots.to(tl.pointer_type(tl.int64)) + row, mask=live, other=-1)
    size = tl.load(group + BLOCK_SIZE)
    ring = tl.load(group + RING)
    inside = live & (slot >= 0) & (slot < tl.load(group + NUM_BLOCKS) * size)
    inside = inside & ((ring < 0) | (within + ring >= count))
    slot = tl.where(inside, slot, 0)
    place = tl.load(group + BASE) + slot // size * tl.load(group + STRIDE) + slot % size
    return tl.where(inside, place, -1)
