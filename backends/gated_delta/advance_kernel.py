"""The kernel that commits: states of gated delta nets take in kept rows, in all layers at once.

Memory contract of ``advance_rows``:

- A program has ``TILES`` times ``VALUES`` rows of one head's state of one request and layer. It
  reads them once and writes them once, and once more into the slot of a snapshot; nothing else is
  written. All slots of requests and snapshots are distinct, so no two programs touch one byte.
- A request whose slot is 0 or less, or that keeps no row, is skipped: nothing is read or written.
- The caller guarantees that slots are inside the caches, and starts inside the staged rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .layers import COLUMNS
from .tile_loads import appended

_COLUMNS = tl.constexpr(len(COLUMNS))
(_STATE, _SLOT_STRIDE, _KEY, _CORRECTED, _DECAY, _GROUP) = (
    tl.constexpr(column) for column in range(len(COLUMNS))
)


@triton.jit
def _column(line: tl.tensor, at: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """Return the address in column ``at`` of a table's line, as a pointer to ``TYPE``."""
    return tl.load(line + at).to(tl.pointer_type(TYPE))


@triton.jit
def _wide(base: tl.tensor, offsets: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """Return pointers ``base + offsets``, of which each ``RUN`` are 16 bytes in one piece.

    The compiler is promised so, and that each piece begins at a multiple of 16.
    """
    pointers = base + offsets  # the compiler forgets a hint about an argument
    if RUN > 1:
        if len(pointers.shape) == 2:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, 16)), (1, RUN))
        else:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), RUN)
    return pointers


@triton.jit
def _key_of(
    row: tl.tensor,
    left: tl.tensor,
    KEY_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tensor:
    """Load a row's key as ``[KEYS]``.

    Zeros beyond ``KEY_SIZE``, and all of them if no row is ``left``. A thread with 8 neighbours of
    the state in a word loads 4 of the key at once, and 4 more: were all 8 asked for together, a
    compiler would exchange them between threads.
    """
    if RUN == 8:
        eighths = tl.arange(0, KEYS // 8)[:, None]
        offsets = eighths * 8 + tl.arange(0, 4)[None, :]
        inside = (eighths < KEY_SIZE // 8) & (left > 0 * offsets)
        lower = tl.load(_wide(row, offsets, 4), mask=inside, other=0.0)
        upper = tl.load(_wide(row + 4, offsets, 4), mask=inside, other=0.0)
        key = tl.reshape(tl.permute(tl.join(lower, upper), [0, 2, 1]), [KEYS])
    else:
        keys = tl.arange(0, KEYS)
        inside = (keys // RUN < KEY_SIZE // RUN) & (left > 0 * keys)
        key = tl.load(_wide(row, keys, RUN), mask=inside, other=0.0)
    return key


@triton.jit(do_not_specialize=["source_stride", "group_stride", "snapshot_stride"])
def advance_rows(
    table: tl.tensor,
    sources: tl.tensor,
    count: tl.tensor,
    starts: tl.tensor,
    boundary: tl.tensor,
    snapshots: tl.tensor,
    source_stride: tl.int32,
    group_stride: tl.int32,
    snapshot_stride: tl.int32,
    STATE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    RUN: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    TILES: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """Advance some tiles of a state by its request's kept rows.

    Grid: (programs of a head * HEADS, requests, layers).

    ``table`` is that of ``DeltaLayers``, where addresses and slot strides in bytes are multiples of
    16; other tensors are those of ``step.advance_gated_delta``, unread without ``SNAPSHOTS`` where
    they are about snapshots. Strides are elements: ``source_stride`` between requests in
    ``sources``, ``group_stride`` and ``snapshot_stride`` between groups. Constants:

    - ``STATE``: dtype of the states.
    - ``KEY_HEADS``: heads of the staged keys.
    - ``HEADS``: heads of a state.
    - ``KEY_SIZE``: columns of a head's state.
    - ``VALUE_SIZE``: rows of a head's state.
    - ``KEYS``: a power of two, at least ``KEY_SIZE``.
    - ``VALUES``: rows of a tile.
    - ``LONGEST``: the most rows of a request.
    - ``RUN``: numbers of the state in 16 bytes; 1 if its rows do not begin on 16 bytes.
    - ``SNAPSHOTS``: some request may leave a snapshot.
    - ``TILES``: tiles of a program, one after another.
    - ``LEAST``: rows that each request keeps, whatever ``count`` says, as far as it has them.
    """
    parts: tl.constexpr = (VALUE_SIZE + VALUES * TILES - 1) // (VALUES * TILES)
    part = tl.program_id(0) % parts
    head = tl.program_id(0) // parts
    number = tl.program_id(1)
    line = table + tl.program_id(2) * _COLUMNS
    first = tl.load(starts + number)
    kept = tl.maximum(tl.load(count + number), LEAST)
    taken = tl.minimum(kept, tl.load(starts + number + 1) - first)
    group = tl.load(line + _GROUP)
    slot = tl.load(sources + group * group_stride + number * source_stride).to(tl.int64)
    if (slot <= 0) | (taken <= 0):
        return
    slot_stride = tl.load(line + _SLOT_STRIDE)
    keys = tl.arange(0, KEYS)
    # A 16-byte word is inside as a whole or not at all; so the compiler sees this.
    some_keys = keys // RUN < KEY_SIZE // RUN
    begin = _column(line, _STATE, STATE)
    row = first.to(tl.int64)
    key_at = _column(line, _KEY, tl.float32) + head // (HEADS // KEY_HEADS) * KEY_SIZE
    value_at = _column(line, _CORRECTED, tl.float32) + head * VALUE_SIZE
    decay_at = _column(line, _DECAY, tl.float32) + head
    row_keys, decays = (), ()
    for turn in tl.static_range(LONGEST):
        from_row = key_at + (row + turn) * (KEY_HEADS * KEY_SIZE)
        row_keys = appended(row_keys, _key_of(from_row, taken - turn, KEY_SIZE, KEYS, RUN))
        decay = tl.load(decay_at + (row + turn) * HEADS, mask=taken > turn, other=1.0)
        decays = appended(decays, decay)
    if SNAPSHOTS:
        until = tl.load(boundary + number)
        snapshot = tl.load(snapshots + group * snapshot_stride + number).to(tl.int64)
        snapshot = tl.where(until <= taken, snapshot, 0)
    for tile in tl.range(0, TILES, num_stages=1):
        values = (part * TILES + tile) * VALUES + tl.arange(0, VALUES)
        some_values = values < VALUE_SIZE
        inside = some_values[:, None] & some_keys[None, :]
        cell = (head * VALUE_SIZE + values)[:, None] * KEY_SIZE + keys[None, :]
        where = _wide(begin + slot * slot_stride, cell, RUN)
        state = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        row_values = ()
        for turn in tl.static_range(LONGEST):
            value = tl.load(
                value_at + (row + turn) * (HEADS * VALUE_SIZE) + values,
                mask=some_values & (taken > turn + 0 * values),
                other=0.0,
            )
            row_values = appended(row_values, value)
        for turn in tl.static_range(LONGEST):
            if taken > turn:
                state = state * decays[turn]
                state += row_values[turn][:, None] * row_keys[turn][None, :]
            if SNAPSHOTS and (snapshot > 0) & (until == turn + 1):
                there = _wide(begin + snapshot * slot_stride, cell, RUN)
                tl.store(there, state.to(STATE), mask=inside)
        tl.store(where, state.to(STATE), mask=inside)
