"""Advancing one tile of a state with heads by its request's rows; ``kernel`` has the contract."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan import (
    AT_HEAD_STRIDE,
    AT_HEADS_PER_KEY,
    AT_KEY_STRIDE,
    AT_KEYS,
    AT_PART,
    AT_SLOT_STRIDE,
    AT_STATE,
    AT_TILES_PER_HEAD,
    AT_VALUE_STRIDE,
    AT_VALUES,
    NUM_PART_FIELDS,
    PART_ADDRESS,
    PART_ELEMENT_STRIDE,
    PART_HEAD_STRIDE,
    PART_ROW_STRIDE,
)


@triton.jit
def rounded(numbers: tl.tensor, STATE: tl.constexpr) -> tl.tensor:
    """Round float32 numbers to the nearest numbers of dtype ``STATE``, ties to even.

    Rounding to bfloat16 is written out in integers, since Triton's interpreter would truncate.
    """
    if tl.bfloat16 == STATE:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits = tl.where(numbers == numbers, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        stored = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        stored = numbers.to(STATE)
    return stored


@triton.jit
def take_in(
    line: tl.tensor,
    parts: tl.tensor,
    slot: tl.tensor,
    last_slot: tl.tensor,
    boundary: tl.tensor,
    tile: tl.tensor,
    lanes: tl.tensor,
    chosen: tl.tensor,
    source: tl.tensor,
    CROSSES: tl.constexpr,
    STATE: tl.constexpr,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    """Let one tile of a state ``[heads, value_size, key_size]`` take its request's rows in.

    Args:
        line: the state's line of the plan.
        parts: int64 ``[num_parts, 4]``; key, value and decay are three lines of it.
        slot: int64, the slot of the request's state.
        last_slot: int64, the slot that gets the state after all rows: ``slot`` itself, or the slot
            beyond a boundary.
        boundary: int32, the number of rows after which ``slot`` gets the state, if ``CROSSES`` and
            ``last_slot`` is beyond the boundary; else -1.
        tile: number of the tile: all tiles of the first head, then those of the next.
        lanes: int32 ``[LONGEST]``, 0, 1, ...
        chosen: int32 ``[LONGEST]``, 1 for each row of the request that advances the state.
        source: int64 ``[LONGEST]``, for each of those rows the row of the window to read.
        CROSSES: some request may cross a boundary.
        STATE: dtype of the state.
        KEY: dtype of the staged keys.
        VALUES: rows of a tile.
        KEYS: columns of a tile, at least those of the state.
        VECTOR: elements of 16 bytes, if keys lie side by side and each run of them begins on 16
            bytes; else 1.
    """
    per_head = tl.load(line + AT_TILES_PER_HEAD).to(tl.int32)
    head = tile // per_head
    values = (tile - head * per_head) * VALUES + tl.arange(0, VALUES)
    keys = tl.arange(0, KEYS)
    some_values = values < tl.load(line + AT_VALUES)
    # A 16-byte word is inside as a whole or not at all; the mask counts words, so that the
    # compiler sees this.
    some_keys = keys // VECTOR < tl.load(line + AT_KEYS) // VECTOR
    inside = some_values[:, None] & some_keys[None, :]
    step = 16 // VECTOR if VECTOR > 1 else tl.load(line + AT_KEY_STRIDE)
    first = tl.load(line + AT_STATE) + head * tl.load(line + AT_HEAD_STRIDE)
    places = first + values[:, None] * tl.load(line + AT_VALUE_STRIDE) + keys[None, :] * step
    here = cells(places + slot * tl.load(line + AT_SLOT_STRIDE), STATE, VECTOR)
    state = tl.load(here, mask=inside, other=0.0).to(tl.float32)

    key_line = parts + tl.load(line + AT_PART) * NUM_PART_FIELDS
    value_line = key_line + NUM_PART_FIELDS
    decay_line = value_line + NUM_PART_FIELDS
    key_head = head // tl.load(line + AT_HEADS_PER_KEY)
    key_at = tl.load(key_line + PART_ADDRESS) + key_head * tl.load(key_line + PART_HEAD_STRIDE)
    value_at = tl.load(value_line + PART_ADDRESS) + head * tl.load(value_line + PART_HEAD_STRIDE)
    decay_at = tl.load(decay_line + PART_ADDRESS) + head * tl.load(decay_line + PART_HEAD_STRIDE)
    key_at = key_at + keys * tl.load(key_line + PART_ELEMENT_STRIDE)
    value_at = value_at + values * tl.load(value_line + PART_ELEMENT_STRIDE)
    decay_at = decay_at + keys * tl.load(decay_line + PART_ELEMENT_STRIDE)
    key_step = tl.load(key_line + PART_ROW_STRIDE)
    value_step = tl.load(value_line + PART_ROW_STRIDE)
    decay_step = tl.load(decay_line + PART_ROW_STRIDE)
    last = tl.max(tl.where(chosen != 0, lanes + 1, 0), axis=0)
    taken = 0
    for turn in range(0, last):
        now = lanes == turn
        if tl.sum(tl.where(now, chosen, 0), axis=0) > 0:
            row = tl.sum(tl.where(now, source, 0), axis=0)
            key = (key_at + row * key_step).to(tl.pointer_type(KEY))
            value = (value_at + row * value_step).to(tl.pointer_type(tl.float32))
            decay = (decay_at + row * decay_step).to(tl.pointer_type(tl.float32))
            k = tl.load(key, mask=some_keys, other=0.0).to(tl.float32)
            v = tl.load(value, mask=some_values, other=0.0)
            d = tl.load(decay, mask=some_keys, other=0.0)
            state = state * d[None, :] + v[:, None] * k[None, :]
            if CROSSES:
                taken += 1
                if taken == boundary:
                    tl.store(here, rounded(state, STATE), mask=inside)
    there = here
    if CROSSES:
        there = cells(places + last_slot * tl.load(line + AT_SLOT_STRIDE), STATE, VECTOR)
    tl.store(there, rounded(state, STATE), mask=inside)


@triton.jit
def cells(places: tl.tensor, STATE: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:
    """Turn addresses ``[VALUES, KEYS]`` into pointers; the constants are those of ``take_in``."""
    pointers = places.to(tl.pointer_type(STATE))
    if VECTOR > 1:
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, VECTOR))
    return pointers
