"""The kernel that verifies rows of gated delta nets and writes no state.

Memory contract of ``verify_rows``:

- A program has ``TILES`` times ``VALUES`` rows of one head's state of one request. It reads them
  once, and writes only the outputs and corrected values of these rows. The programs of a head's
  first rows write the decays; of those, the ones of the first head of each key head write the keys.
  So no two programs write one byte.
- A request whose slot is 0 or less, or that has no rows, is skipped: nothing is read or written.
- The caller guarantees that slots are inside the cache, and starts inside the rows.

How it computes. With ``k`` and ``q`` of all rows of the window as columns of a matrix ``C``, the
product ``P = state @ C`` is all that is needed of the state: a row's update of the state,
``state * decay + u (x) k``, is an update of ``P`` as well, ``P * decay + u (x) (k @ C)``. The
column of ``k`` then gives the row's corrected value, the column of ``q`` its output. So the state
is read once and multiplied once, on tensor cores: float32 numbers as sums of three bfloat16
numbers, which is exact, with products that are exact and float32 sums.

Where it computes: see ``tile_loads``. Nothing moves between threads.

When it computes. A program of one tile asks for its state before it multiplies keys by keys. One of
several tiles asks for the next ones while it computes, and does what all tiles need once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_loads import product, runs, state_of, values_of


@triton.jit
def rows_of(
    seen: tl.tensor,
    wanted: tl.tensor,
    among: tl.tensor,
    decay: tl.tensor,
    strength: tl.tensor,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Take in one row after another, working on the products and not on the state.

    Args:
        seen: ``[VALUES, 2 * COLUMNS]``, the state times keys and queries.
        wanted: ``[VALUES, 2 * COLUMNS]``, the values of the rows.
        among: ``[2 * COLUMNS, 2 * COLUMNS]``, keys times keys and queries.
        decay: ``[2 * COLUMNS]``.
        strength: ``[2 * COLUMNS]``.
        VALUES: rows of a tile.
        LONGEST: the most rows of a request.
        COLUMNS: columns of keys.

    Returns:
        The corrected values, by columns of keys, and the outputs, by columns of queries.
    """
    columns = tl.arange(0, 2 * COLUMNS)
    corrected = tl.zeros([VALUES, 2 * COLUMNS], dtype=tl.float32)
    outputs = tl.zeros([VALUES, 2 * COLUMNS], dtype=tl.float32)
    for turn in tl.static_range(LONGEST):
        this = columns == turn
        seen = seen * tl.sum(tl.where(this, decay, 0.0), axis=0)
        fresh = tl.sum(tl.where(this[None, :], wanted - seen, 0.0), axis=1)
        fresh = fresh * tl.sum(tl.where(this, strength, 0.0), axis=0)
        with_key = tl.sum(tl.where(this[:, None], among, 0.0), axis=0)
        seen = seen + fresh[:, None] * with_key[None, :]
        corrected = tl.where(this[None, :], fresh[:, None], corrected)
        outputs = tl.where((columns == COLUMNS + turn)[None, :], seen, outputs)
    return corrected, outputs


@triton.jit
def verify_tile(
    now: tl.tensor,
    wanted: tl.tensor,
    values: tl.tensor,
    pairs: tl.tensor,
    factor: tl.tensor,
    among: tl.tensor,
    decay: tl.tensor,
    strength: tl.tensor,
    live: tl.tensor,
    asks: tl.tensor,
    made: tl.tensor,
    staged: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Compute and store the outputs and corrected values of one tile, of the rows ``values``.

    ``now``, ``wanted`` and ``pairs`` are loaded by ``state_of``, ``values_of`` and ``runs``. Of the
    ``2 * COLUMNS`` columns, ``live`` are those of the request's rows, ``asks`` those of queries;
    ``factor``, ``among``, ``decay`` and ``strength`` are of these columns, see ``rows_of``.
    ``made`` and ``staged``, ``[1, 2 * COLUMNS]``, point to the head's outputs and corrected values
    in each row.
    """
    split_state: tl.constexpr = now.dtype != tl.bfloat16
    split: tl.constexpr = pairs.dtype != tl.bfloat16
    seen = product(now, pairs, VALUES, 2 * COLUMNS, KEYS, RUN, split_state, split)
    corrected, outputs = rows_of(
        seen * factor[None, :], wanted, among, decay, strength, VALUES, LONGEST, COLUMNS
    )
    inside = live[None, :] & (values < VALUE_SIZE)[:, None]
    results = outputs.to(made.dtype.scalar.element_ty)
    tl.store(made + values[:, None], results, mask=inside & asks[None, :])
    tl.store(staged + values[:, None], corrected, mask=inside & (asks == 0)[None, :])


@triton.jit(do_not_specialize=["source_stride"])
def verify_rows(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    sources: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    kept_key: tl.tensor,
    kept_value: tl.tensor,
    kept_decay: tl.tensor,
    scale: tl.float32,
    query_stride: tl.int32,
    key_stride: tl.int32,
    value_stride: tl.int32,
    a_stride: tl.int32,
    b_stride: tl.int32,
    slot_stride: tl.int64,
    out_stride: tl.int32,
    source_stride: tl.int32,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    NORMALISE: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute outputs, and stage keys, corrected values and decays.

    Grid: (programs of a head * HEADS, requests).

    Tensors and ``scale`` are those of ``step.verify_gated_delta``, ``kept_key``, ``kept_value`` and
    ``kept_decay`` those of ``DeltaRows``. Strides are elements between rows, but for
    ``slot_stride`` between slots, and ``source_stride`` between requests in ``sources``. Constants:

    - ``KEY_HEADS``: heads of queries and keys.
    - ``HEADS``: heads of the state.
    - ``KEY_SIZE``: columns of a head's state.
    - ``VALUE_SIZE``: rows of a head's state.
    - ``KEYS``: a power of two, at least ``KEY_SIZE``.
    - ``VALUES``: rows of a tile, a multiple of 16.
    - ``LONGEST``: the most rows of a request; further ones are left out.
    - ``COLUMNS``: a power of two, at least ``LONGEST``, and 4 or more: columns of keys; there
      are as many of queries.
    - ``RUN``: numbers of the state in 16 bytes.
    - ``ALIGNED``: each run of keys begins on 16 bytes in the state, and on a multiple of its size
      in queries and keys.
    - ``NORMALISE``: divide queries and keys by their length.
    - ``TILES``: tiles of a program, one after another.
    - ``STAGES``: tiles that are loaded before they are needed, and one more.
    """
    parts: tl.constexpr = (VALUE_SIZE + VALUES * TILES - 1) // (VALUES * TILES)
    part = tl.program_id(0) % parts
    head = tl.program_id(0) // parts
    number = tl.program_id(1)
    slot = tl.load(sources + number * source_stride).to(tl.int64)
    first = tl.load(starts + number)
    length = tl.load(starts + number + 1) - first
    if (slot <= 0) | (length <= 0):
        return
    key_head = head // (HEADS // KEY_HEADS)

    # The state, and the keys and queries as COLUMNS rows each.
    first_value = part * TILES * VALUES
    begin = state + slot * slot_stride + head * VALUE_SIZE * KEY_SIZE
    if TILES == 1:
        now = state_of(begin, first_value, KEY_SIZE, VALUE_SIZE, KEYS, VALUES, RUN, ALIGNED)
    lines = tl.arange(0, 2 * COLUMNS * KEYS // (4 * RUN))
    turns = lines % COLUMNS
    rows = first.to(tl.int64) + turns
    asked = lines % (2 * COLUMNS) >= COLUMNS
    pointers = tl.where(asked, query + rows * query_stride, key + rows * key_stride)
    some = (turns < length) & (turns < LONGEST)
    pairs = runs(
        pointers + key_head * KEY_SIZE, some,
        2 * COLUMNS, KEY_SIZE, KEYS, RUN, ALIGNED, False,
    )  # fmt: skip
    columns = tl.arange(0, 2 * COLUMNS)
    turn = columns % COLUMNS
    asks = columns >= COLUMNS
    live = (turn < length) & (turn < LONGEST)
    row = first.to(tl.int64) + turn
    x = tl.load(a + row * a_stride + head, mask=live, other=0.0).to(tl.float32)
    strength = tl.load(b + row * b_stride + head, mask=live, other=0.0).to(tl.float32)
    given = value + (row * value_stride + head * VALUE_SIZE)[None, :]
    if TILES == 1:
        wanted = values_of(given, first_value + tl.arange(0, VALUES), live, VALUE_SIZE)

    # Decay and strength of each row.
    x += tl.load(dt_bias + head).to(tl.float32)
    soft = tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x)
    decay = tl.exp(-tl.exp(tl.load(A_log + head).to(tl.float32)) * soft)
    strength = tl.sigmoid(strength)

    # The products of keys with keys and queries, all of them normalised.
    split: tl.constexpr = pairs.dtype != tl.bfloat16
    among = product(pairs, pairs, 2 * COLUMNS, 2 * COLUMNS, KEYS, RUN, split, split)
    factor = tl.where(asks, scale, 1.0)
    if NORMALISE:
        squares = tl.where(columns[:, None] == columns[None, :], among, 0.0)
        factor = factor * tl.rsqrt(tl.sum(squares, axis=0) + 1e-6)
        among = among * tl.rsqrt(tl.sum(squares, axis=1) + 1e-6)[:, None]
    among = among * factor[None, :]

    kept = live & (columns < COLUMNS)
    if part == 0:
        tl.store(kept_decay + row * HEADS + head, decay, mask=kept)
        if head % (HEADS // KEY_HEADS) == 0:
            unit = pairs.to(tl.float32)
            if NORMALISE:
                pieces: tl.constexpr = KEYS // (4 * RUN)
                total = tl.reshape(tl.sum(unit * unit, axis=1), [pieces, 2 * COLUMNS])
                total = tl.broadcast_to(tl.sum(total, axis=0)[None, :], [pieces, 2 * COLUMNS])
                unit = unit * tl.rsqrt(tl.reshape(total, lines.shape) + 1e-6)[:, None]
            keys = (lines // (2 * COLUMNS) * (4 * RUN))[:, None] + tl.arange(0, 4 * RUN)[None, :]
            staged = kept_key + ((rows * KEY_HEADS + key_head) * KEY_SIZE)[:, None] + keys
            tl.store(staged, unit, mask=(some & (asked == 0))[:, None] & (keys < KEY_SIZE))

    made = out + (row * out_stride + head * VALUE_SIZE)[None, :]
    staged = kept_value + ((row * HEADS + head) * VALUE_SIZE)[None, :]
    if TILES == 1:
        values = first_value + tl.arange(0, VALUES)
        verify_tile(
            now, wanted, values, pairs, factor, among, decay, strength, live, asks, made, staged,
            VALUE_SIZE, KEYS, VALUES, LONGEST, COLUMNS, RUN,
        )  # fmt: skip
    else:
        for tile in tl.range(0, TILES, num_stages=STAGES):
            begins = first_value + tile * VALUES
            now = state_of(begin, begins, KEY_SIZE, VALUE_SIZE, KEYS, VALUES, RUN, ALIGNED)
            values = begins + tl.arange(0, VALUES)
            wanted = values_of(given, values, live, VALUE_SIZE)
            verify_tile(
                now, wanted, values, pairs, factor, among, decay, strength, live, asks, made,
                staged, VALUE_SIZE, KEYS, VALUES, LONGEST, COLUMNS, RUN,
            )  # fmt: skip
