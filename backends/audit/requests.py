"""The rows of one request of a step, in Triton: the same as ``kvtxn.audit.rows.Batch``."""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book

SERIAL = tl.constexpr(book.SERIAL)


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
        The line, the number of the first row, its position, and the number of rows, all 0 for
        padding and where the numbers do not fit; True if the line is of an admitted request; the
        number of rows that the step has for padding or for a malformed request; True if the
        request is malformed.
    """
    line = tl.load(lines + index).to(tl.int64)
    start = tl.load(starts + index).to(tl.int64)
    end = tl.load(starts + index + 1).to(tl.int64)
    first = tl.load(first_position + index).to(tl.int64)
    given = end - start
    named = line >= 0
    inside = (given > 0) & (start >= 0) & (end <= num_rows)
    fits = inside & named & (line < num_lines) & (first >= 0) & (first + given < own_stride)
    line = tl.where(fits, line, 0)
    start = tl.where(inside, start, 0)
    first = tl.where(fits, first, 0)
    count = tl.where(fits, given, 0)
    admitted = fits & (tl.load(facts + SERIAL * num_lines + line) >= 0)
    skipped = tl.where(inside & (admitted == 0), given, 0)
    refused = named & (given != 0) & (admitted == 0)
    return line, start, first, count, admitted, skipped, refused
