"""The kernel that commits: states of gated delta nets take in kept rows, in all layers at once.

Memory contract of ``advance_rows``:

- A program has ``VALUES`` rows of one head's state of one request and layer. It reads them once and
  writes them once, or twice where the request crosses a boundary; nothing else is written. Slots
  of distinct requests are distinct, so no two programs touch one byte of a state.
- A request whose slot is 0 or less, or that keeps no row, is skipped: nothing is read or written.
- The caller guarantees that slots are inside the caches, and starts inside the staged rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layers import COLUMNS

_COLUMNS = tl.constexpr(len(COLUMNS))
(_STATE, _SLOT_STRIDE, _KEY, _CORRECTED, _DECAY, _GROUP) = (
    tl.constexpr(column) for column in range(len(COLUMNS))
)


@triton.jit
def _column(line: tl.tensor, at: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """Load an address from the table."""
    return tl.load(line + at).to(tl.pointer_type(TYPE))


@triton.jit
def _wide(base: tl.tensor, offsets: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """Return pointers, and tell the compiler that each ``RUN`` of a line are 16 bytes."""
    pointers = base + offsets  # the compiler forgets what it is told of an argument
    if RUN > 1:
        if len(pointers.shape) == 2:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, RUN))
        else:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), RUN)
    return pointers


@triton.jit(do_not_specialize=["source_stride", "group_stride"])
def advance_rows(
    table: tl.tensor,
    sources: tl.tensor,
    count: tl.tensor,
    starts: tl.tensor,
    boundary: tl.tensor,
    beyond: tl.tensor,
    source_stride: tl.int32,
    group_stride: tl.int32,
    STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    RUN: tl.constexpr,
    CROSSES: tl.constexpr,
) -> None:
    """Advance one tile of a state by its request's kept rows.

    Grid: (tiles of a head * HEADS, requests, layers).

    Args:
        table: int64 ``[layers, len(COLUMNS)]``, see ``layers``; addresses are multiples of 16, and
            so are slot strides in bytes.
        sources: int32 ``[groups, num_requests]``, the slot of each request.
        count: int32 ``[num_requests]``, the rows that each request keeps.
        starts: int32 ``[num_requests + 1]``, the first row of each request, and the end.
        boundary: int32 ``[groups, num_requests]``, contiguous, if ``CROSSES``: the rows after which
            a request crosses a boundary.
        beyond: int32 likewise: the slot beyond the boundary; 0 or less is none.
        source_stride: elements between requests in ``sources``.
        group_stride: elements between groups in ``sources``.
        STATE: dtype of the states.
        KEY_HEADS: heads of the staged keys.
        HEADS: heads of a state.
        KEY_SIZE: columns of a head's state.
        VALUE_SIZE: rows of a head's state.
        KEYS: a power of two, at least ``KEY_SIZE``.
        VALUES: rows of a tile.
        LONGEST: the most rows of a request.
        RUN: numbers of the state in 16 bytes; 1 if its rows do not begin on 16 bytes.
        CROSSES: some request may cross a boundary.
    """
    tiles: tl.constexpr = (VALUE_SIZE + VALUES - 1) // VALUES
    key_run: tl.constexpr = 4 if RUN > 1 else 1
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    number = tl.program_id(1)
    line = table + tl.program_id(2) * _COLUMNS
    first = tl.load(starts + number)
    taken = tl.minimum(tl.load(count + number), tl.load(starts + number + 1) - first)
    group = tl.load(line + _GROUP)
    slot = tl.load(sources + group * group_stride + number * source_stride).to(tl.int64)
    if (slot <= 0) | (taken <= 0):
        return
    slot_stride = tl.load(line + _SLOT_STRIDE)
    keys = tl.arange(0, KEYS)
    values = tile * VALUES + tl.arange(0, VALUES)
    # A 16-byte word is inside as a whole or not at all; so the compiler sees this.
    some_keys = keys // RUN < KEY_SIZE // RUN
    some_values = values < VALUE_SIZE
    inside = some_values[:, None] & some_keys[None, :]
    cell = (head * VALUE_SIZE + values)[:, None] * KEY_SIZE + keys[None, :]
    begin = _column(line, _STATE, STATE)
    where = _wide(begin + slot * slot_stride, cell, RUN)
    state = tl.load(where, mask=inside, other=0.0).to(tl.float32)

    row = first.to(tl.int64)
    key_at = _column(line, _KEY, tl.float32) + head // (HEADS // KEY_HEADS) * KEY_SIZE
    value_at = _column(line, _CORRECTED, tl.float32) + head * VALUE_SIZE + values
    decay_at = _column(line, _DECAY, tl.float32) + head
    if CROSSES:
        there = group * tl.num_programs(1) + number
        next_slot = tl.load(beyond + there).to(tl.int64)
        until = tl.load(boundary + there)
        crosses = (next_slot > 0) & (taken > until)
    for turn in tl.static_range(LONGEST):
        if CROSSES and crosses & (until == turn):
            if turn > 0:
                tl.store(where, state.to(STATE), mask=inside)
            where = _wide(begin + next_slot * slot_stride, cell, RUN)
        now = row + turn
        key = tl.load(
            _wide(key_at + now * (KEY_HEADS * KEY_SIZE), keys, key_run),
            mask=some_keys & (taken > turn + 0 * keys),
            other=0.0,
        )
        value = tl.load(
            value_at + now * (HEADS * VALUE_SIZE),
            mask=some_values & (taken > turn + 0 * values),
            other=0.0,
        )
        decay = tl.load(decay_at + now * HEADS, mask=taken > turn, other=1.0)
        state = state * decay + value[:, None] * key[None, :]
    tl.store(where, state.to(STATE), mask=inside)
