"""Shifting one tile of a convolution's past by its request's rows; ``kernel`` has the contract."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan import (
    AT_KEY_STRIDE,
    AT_KEYS,
    AT_PART,
    AT_SLOT_STRIDE,
    AT_STATE,
    AT_VALUE_STRIDE,
    AT_VALUES,
    NUM_PART_FIELDS,
    PART_ADDRESS,
    PART_ELEMENT_STRIDE,
    PART_ROW_STRIDE,
)


@triton.jit
def past_after(
    count: tl.tensor,
    column: tl.tensor,
    step: tl.tensor,
    fresh: tl.tensor,
    row_stride: tl.tensor,
    chosen: tl.tensor,
    source: tl.tensor,
    taps: tl.tensor,
    size: tl.tensor,
    inside: tl.tensor,
    WORD: tl.constexpr,
) -> tl.tensor:
    """Read a convolution's past as it is after ``count`` rows: ``[TAPS, CHANNELS]`` words.

    The past after ``count`` rows is the end of the stored past, followed by those rows. ``column``
    has the address of each channel's oldest tap, ``fresh`` that of each channel's input in the
    window's first row.
    """
    origin = taps + count
    rank = tl.cumsum(chosen, axis=0) - 1
    picked = (rank[None, :] == (origin - size)[:, None]) & (chosen != 0)[None, :]
    row = tl.sum(tl.where(picked, source[None, :], 0), axis=1)
    before = column[None, :] + origin.to(tl.int64)[:, None] * step
    there = fresh[None, :] + row[:, None] * row_stride
    place = tl.where((origin < size)[:, None], before, there)
    return tl.load(place.to(tl.pointer_type(WORD)), mask=inside)


@triton.jit
def shift_in(
    line: tl.tensor,
    parts: tl.tensor,
    slot: tl.tensor,
    last_slot: tl.tensor,
    boundary: tl.tensor,
    tile: tl.tensor,
    chosen: tl.tensor,
    source: tl.tensor,
    CROSSES: tl.constexpr,
    WORD: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Let one tile of a convolution's past ``[taps, channels]`` take its request's rows in.

    Args:
        line: the state's line of the plan.
        parts: int64 ``[num_parts, 4]``; the convolution's inputs are one line of it.
        slot: as for ``take_in``.
        last_slot: as for ``take_in``.
        boundary: as for ``take_in``.
        tile: number of the run of ``CHANNELS`` channels.
        chosen: int32 ``[LONGEST]``, 1 for each row of the request that enters the past.
        source: int64 ``[LONGEST]``, for each of those rows the row of the window to read.
        CROSSES: some request may cross a boundary.
        WORD: integer dtype as wide as an element.
        TAPS: rows of a tile, at least those of the state.
        CHANNELS: columns of a tile.
    """
    taps = tl.arange(0, TAPS)
    channels = tile * CHANNELS + tl.arange(0, CHANNELS)
    size = tl.load(line + AT_KEYS).to(tl.int32)
    inside = (taps < size)[:, None] & (channels < tl.load(line + AT_VALUES))[None, :]
    first = tl.load(line + AT_STATE) + channels * tl.load(line + AT_VALUE_STRIDE)
    column, slot_stride, step = (
        first + slot * tl.load(line + AT_SLOT_STRIDE),
        tl.load(line + AT_SLOT_STRIDE),
        tl.load(line + AT_KEY_STRIDE),
    )
    part = parts + tl.load(line + AT_PART) * NUM_PART_FIELDS
    fresh = tl.load(part + PART_ADDRESS) + channels * tl.load(part + PART_ELEMENT_STRIDE)
    row_stride = tl.load(part + PART_ROW_STRIDE)
    every = tl.sum(chosen, axis=0)
    word = past_after(
        every, column, step, fresh, row_stride, chosen, source, taps, size, inside, WORD
    )
    down = taps.to(tl.int64)[:, None] * step
    if CROSSES:
        early = inside & (taps * 0 + boundary > 0)[:, None]
        middle = past_after(
            boundary, column, step, fresh, row_stride, chosen, source, taps, size, early,
            WORD,
        )  # fmt: skip
    tl.debug_barrier()  # a tap that one thread overwrites is another thread's to read
    if CROSSES:
        tl.store((column[None, :] + down).to(tl.pointer_type(WORD)), middle, mask=early)
        column = first + last_slot * slot_stride
    tl.store((column[None, :] + down).to(tl.pointer_type(WORD)), word, mask=inside)
