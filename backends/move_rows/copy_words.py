"""Copying tiles of rows: in 16-byte words where addresses allow it, else in smaller ones.

Memory contract: both functions take addresses as int64 and mask by row, so that a row that is not
wanted is neither read nor written. Staged rows are always ``[num_rows, *row_shape]``. ``line`` is
one plane's line of the plane table; its columns are named in ``plane_table``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plane_table import (
    AT_CACHE_RUN,
    AT_CACHE_STEP,
    AT_OFFSETS,
    AT_ROW_UNITS,
    AT_ROWS_RUN,
    AT_ROWS_STEP,
    AT_RUN_UNITS,
    AT_UNIT_BYTES,
)


@triton.jit
def wide_pointer(address: tl.tensor) -> tl.tensor:
    """Turn addresses of 8-byte words into pointers to int64, both ``[ROWS, 2 x COLS]``.

    The compiler is promised that each two words of a row are neighbours, the first at a multiple
    of 16: it then moves both at once.
    """
    words = address.to(tl.pointer_type(tl.int64))
    return tl.max_contiguous(tl.multiple_of(words, (1, 16)), (1, 2))


@triton.jit
def copy_wide(
    cache: tl.tensor,
    outside: tl.tensor,
    wanted: tl.tensor,
    bad: tl.tensor,
    line: tl.tensor,
    TO_CACHE: tl.constexpr,
    LATE: tl.constexpr,
    COLS: tl.constexpr,
    TAIL: tl.constexpr,
    UNITS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Move the wanted rows in 16-byte units: two int64 words that one thread moves at once.

    Args:
        cache: int64 ``[ROWS]``, addresses of the rows in the cache, multiples of 16.
        outside: int64 ``[ROWS]``, addresses of the staged rows, multiples of 16.
        wanted: bool ``[ROWS]``.
        bad: int32, any shape: nothing is written unless all are 0; if ``LATE``.
        line: the plane's line of the plane table; runs are multiples of 16 bytes apart.
        TO_CACHE: True writes the cache, False the staged rows.
        LATE: look at ``bad`` only after the loads of the staged rows were issued.
        COLS: units per step.
        TAIL: if not 0, a row is one run of ``COLS`` and ``TAIL`` units, moved in one step: the
            second piece is loaded before the first is written.
        UNITS: units per row if known at compile time, else 0.
        RUN: units per run if known at compile time, else 0.
    """
    per_run = RUN if RUN > 0 else tl.load(line + AT_RUN_UNITS)
    per_row = UNITS if UNITS > 0 else tl.load(line + AT_ROW_UNITS)
    lanes = tl.arange(0, COLS * 2)
    for start in range(0, per_row - TAIL, COLS):
        word = start * 2 + lanes
        if UNITS > 0 and UNITS == RUN:  # one run: nothing to look up
            here = wide_pointer(cache[:, None] + (word * 8)[None, :])
            there = wide_pointer(outside[:, None] + (word * 8)[None, :])
        else:
            run = word // (per_run * 2)
            within = (word - run * (per_run * 2)) * 8
            cache_run = run * tl.load(line + AT_CACHE_RUN)
            rows_run = run * tl.load(line + AT_ROWS_RUN)
            here = wide_pointer(cache[:, None] + (cache_run + within)[None, :])
            there = wide_pointer(outside[:, None] + (rows_run + within)[None, :])
        inside = wanted[:, None] & (lanes >= 0)[None, :]
        if TAIL == 0 and (UNITS % COLS != 0 or UNITS == 0):
            inside = wanted[:, None] & (word < per_row * 2)[None, :]
        source = there if TO_CACHE else here
        target = here if TO_CACHE else there
        words = tl.load(source, mask=inside)
        if TAIL > 0:
            after = COLS * 2 + tl.arange(0, TAIL * 2)
            here = wide_pointer(cache[:, None] + (after * 8)[None, :])
            there = wide_pointer(outside[:, None] + (after * 8)[None, :])
            also = wanted[:, None] & (after >= 0)[None, :]
            rest = tl.load(there if TO_CACHE else here, mask=also)
        if LATE:
            stop = tl.max(bad, axis=0) * (COLS * 2 + TAIL * 2)
            inside = inside & (lanes >= stop)[None, :]
        tl.store(target, words, mask=inside)
        if TAIL > 0:
            if LATE:
                also = also & (after >= stop)[None, :]
            tl.store(here if TO_CACHE else there, rest, mask=also)


@triton.jit
def narrow_pointer(address: tl.tensor, NARROW: tl.constexpr) -> tl.tensor:
    """Turn addresses into pointers to words of ``NARROW`` bytes."""
    if NARROW == 8:
        words = address.to(tl.pointer_type(tl.int64))
    elif NARROW == 4:
        words = address.to(tl.pointer_type(tl.int32))
    elif NARROW == 2:
        words = address.to(tl.pointer_type(tl.int16))
    else:
        words = address.to(tl.pointer_type(tl.int8))
    return words


@triton.jit
def copy_narrow(
    cache: tl.tensor,
    outside: tl.tensor,
    wanted: tl.tensor,
    line: tl.tensor,
    block_offset: tl.tensor,
    TO_CACHE: tl.constexpr,
    COLS: tl.constexpr,
    NARROW: tl.constexpr,
) -> None:
    """Move the wanted rows element by element, any strides, in words of ``NARROW`` bytes.

    Args:
        cache: int64 ``[ROWS]``, addresses of the rows; with an offset table, of their blocks.
        outside: int64 ``[ROWS]``, addresses of the staged rows.
        wanted: bool ``[ROWS]``.
        line: the plane's line of the plane table.
        block_offset: int64 ``[ROWS]``, the rows' places in their blocks.
        TO_CACHE: True writes the cache, False the staged rows.
        COLS: words per step.
        NARROW: 1, 2, 4 or 8; divides every unit.
    """
    cache_run = tl.load(line + AT_CACHE_RUN)
    rows_run = tl.load(line + AT_ROWS_RUN)
    run_units = tl.load(line + AT_RUN_UNITS)
    row_units = tl.load(line + AT_ROW_UNITS)
    offsets = tl.load(line + AT_OFFSETS)
    cache_step = tl.load(line + AT_CACHE_STEP)
    rows_step = tl.load(line + AT_ROWS_STEP)
    unit_bytes = tl.load(line + AT_UNIT_BYTES)
    words = unit_bytes // NARROW
    for start in range(0, row_units * words, COLS):
        word = start + tl.arange(0, COLS)
        unit = word // words
        within = (word - unit * words) * NARROW
        run = unit // run_units
        step = unit - run * run_units
        inside = wanted[:, None] & (unit < row_units)[None, :]
        there = outside[:, None] + (run * rows_run + step * rows_step + within)[None, :]
        here = cache[:, None] + (run * cache_run + step * cache_step + within)[None, :]
        if offsets != 0:
            entry = offsets.to(tl.pointer_type(tl.int64)) + block_offset[:, None] * row_units
            element = tl.load(entry + unit[None, :], mask=inside, other=0)
            here = cache[:, None] + element * unit_bytes + within[None, :]
        source = narrow_pointer(there, NARROW)
        target = narrow_pointer(here, NARROW)
        if TO_CACHE:
            tl.store(target, tl.load(source, mask=inside), mask=inside)
        else:
            tl.store(source, tl.load(target, mask=inside), mask=inside)
