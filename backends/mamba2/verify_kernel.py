"""The kernel that verifies rows of Mamba-2 layers and writes no state.

Memory contract of ``verify_rows``:

- A program has ``VALUES`` rows of one head of one request's state. It reads them once, and writes
  only the outputs and the staged values of these rows. The programs of a head's first rows write
  the decays, the ones of a group's first rows the keys. So no two programs write one byte.
- A request that has no rows is skipped: nothing is read or written. The outputs of a request whose
  slot is 0 or less are zeros, and nothing else is written for it.
- The caller guarantees that slots are inside the cache, and starts inside the rows.

How it computes. A row's update of the state, ``state * decay + (x * dt) (x) B``, is an update of
the product ``P = state @ C`` as well, ``P * decay + (x * dt) (x) (B @ C)``, where the columns of
``C`` are those of all rows of the window. So the state is read once and multiplied once, on tensor
cores: float32 numbers as sums of three bfloat16 numbers, which is exact, with products that are
exact and float32 sums. All heads of a group share ``C`` and ``B @ C``.

Where it computes: see ``gated_delta.tile_loads``. Nothing of a state moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..gated_delta.tile_loads import appended, product, runs, state_of


@triton.jit
def lines_of(
    given: tl.tensor,
    stride: tl.int32,
    first: tl.tensor,
    most: tl.tensor,
    ROWS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Load the first ``most`` rows of B or of C in one group, as ``runs`` loads them.

    Others are 0.
    """
    turns = tl.arange(0, ROWS * KEYS // (4 * RUN)) % ROWS
    rows = given + (first.to(tl.int64) + turns) * stride
    return runs(rows, turns < most, ROWS, STATE_SIZE, KEYS, RUN, ALIGNED, False)


@triton.jit
def rows_of(
    x: tl.tensor,
    dt: tl.tensor,
    A: tl.tensor,
    dt_bias: tl.tensor,
    row: tl.tensor,
    most: tl.tensor,
    head: tl.tensor,
    values: tl.tensor,
    x_stride: tl.int32,
    dt_stride: tl.int32,
    HEAD_SIZE: tl.constexpr,
    LONGEST: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple, tl.tuple]:
    """Load what a program needs of its request's rows: all at once, before anything is stored.

    It computes ``most`` rows from ``row`` on, and of its head the rows ``values``. All else is as
    in ``verify_rows``. Returns x ``[VALUES]``, dt after its bias and softplus, and the decay
    ``exp(dt * A)`` of each of ``LONGEST`` rows, float32; x is 0 beyond ``most``.
    """
    rate = tl.load(A + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    given, steps, decays = (), (), ()
    for turn in tl.static_range(LONGEST):
        here = x + (row + turn) * x_stride + head * HEAD_SIZE + values
        inside = (values < HEAD_SIZE) & (most > turn + 0 * values)
        given = appended(given, tl.load(here, mask=inside, other=0.0).to(tl.float32))
        step = tl.load(dt + (row + turn) * dt_stride + head, mask=most > turn, other=0.0)
        step = step.to(tl.float32) + bias
        step = tl.where(step <= 20.0, tl.log(1 + tl.exp(step)), step)
        steps = appended(steps, step)
        decays = appended(decays, tl.exp(step * rate))
    return given, steps, decays


@triton.jit(do_not_specialize=["source_stride"])
def verify_rows(
    x: tl.tensor,
    dt: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    A: tl.tensor,
    D: tl.tensor,
    dt_bias: tl.tensor,
    state: tl.tensor,
    sources: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    kept_key: tl.tensor,
    kept_value: tl.tensor,
    kept_decay: tl.tensor,
    x_stride: tl.int32,
    dt_stride: tl.int32,
    b_stride: tl.int32,
    c_stride: tl.int32,
    slot_stride: tl.int64,
    out_stride: tl.int32,
    source_stride: tl.int32,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LONGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """Compute outputs, and stage B, ``x * dt`` and decays.

    Grid: (programs of a head * HEADS, requests).

    Tensors are those of ``step.verify_mamba2``, ``kept_key``, ``kept_value`` and ``kept_decay``
    those of ``DeltaRows``. Strides are elements between rows, but for ``slot_stride`` between
    slots, and ``source_stride`` between requests in ``sources``. Constants:

    - ``GROUPS``: groups of heads that share B and C.
    - ``HEADS``: heads of the state.
    - ``STATE_SIZE``: columns of a head's state.
    - ``HEAD_SIZE``: rows of a head's state.
    - ``KEYS``: a power of two, at least ``STATE_SIZE``.
    - ``VALUES``: rows of a program, a multiple of 16.
    - ``LONGEST``: the most rows of a request; further ones are left out.
    - ``COLUMNS``: a power of two, at least ``LONGEST``, and 8 or more.
    - ``RUN``: numbers of the state in 16 bytes.
    - ``ALIGNED``: each run begins on 16 bytes in the state, and on a multiple of its size
      in B and C.
    """
    parts: tl.constexpr = (HEAD_SIZE + VALUES - 1) // VALUES
    ROWS: tl.constexpr = COLUMNS if COLUMNS > 16 else 16
    head = tl.program_id(0) // parts
    begins = tl.program_id(0) % parts * VALUES
    group = head // (HEADS // GROUPS)
    number = tl.program_id(1)
    slot = tl.load(sources + number * source_stride).to(tl.int64)
    first = tl.load(starts + number)
    most = tl.minimum(tl.load(starts + number + 1) - first, LONGEST)
    if most <= 0:
        return
    row = first.to(tl.int64)
    values = begins + tl.arange(0, VALUES)
    some_values = values < HEAD_SIZE
    columns = tl.arange(0, COLUMNS)
    made = out + ((row + columns) * out_stride + head * HEAD_SIZE)[None, :] + values[:, None]
    inside = some_values[:, None] & (columns < most)[None, :]
    if slot <= 0:
        tl.store(made, tl.zeros([VALUES, COLUMNS], out.dtype.element_ty), mask=inside)
        return

    now = state_of(
        state + slot * slot_stride + head * (HEAD_SIZE * STATE_SIZE), begins,
        STATE_SIZE, HEAD_SIZE, KEYS, VALUES, RUN, ALIGNED,
    )  # fmt: skip
    given, steps, decays = rows_of(
        x, dt, A, dt_bias, row, most, head, values, x_stride, dt_stride, HEAD_SIZE, LONGEST
    )
    skip = tl.load(D + head).to(tl.float32)
    reads = lines_of(
        C + group * STATE_SIZE, c_stride, first, most,
        COLUMNS, STATE_SIZE, KEYS, RUN, ALIGNED,
    )  # fmt: skip
    writes = lines_of(
        B + group * STATE_SIZE, b_stride, first, most,
        ROWS, STATE_SIZE, KEYS, RUN, ALIGNED,
    )  # fmt: skip
    split: tl.constexpr = writes.dtype != tl.bfloat16
    pairs = product(writes, reads, ROWS, COLUMNS, KEYS, RUN, split, split)
    if tl.program_id(0) % (HEADS // GROUPS * parts) == 0:
        lines = tl.arange(0, ROWS * KEYS // (4 * RUN))
        keys = (lines // ROWS * (4 * RUN))[:, None] + tl.arange(0, 4 * RUN)[None, :]
        staged = kept_key + (((row + lines % ROWS) * GROUPS + group) * STATE_SIZE)[:, None] + keys
        some_keys = (lines % ROWS < most)[:, None] & (keys < STATE_SIZE)
        tl.store(staged, writes.to(tl.float32), mask=some_keys)

    split_state: tl.constexpr = now.dtype != tl.bfloat16
    seen = product(now, reads, VALUES, COLUMNS, KEYS, RUN, split_state, split)
    outputs = tl.zeros([VALUES, COLUMNS], dtype=tl.float32)
    turns = tl.arange(0, ROWS)
    for turn in tl.static_range(LONGEST):
        value = given[turn] * steps[turn]
        among = tl.sum(tl.where((turns == turn)[:, None], pairs, 0.0), axis=0)
        seen = seen * decays[turn] + value[:, None] * among[None, :]
        result = seen + (given[turn] * skip)[:, None]
        outputs = tl.where((columns == turn)[None, :], result, outputs)
    tl.store(made, outputs.to(out.dtype.element_ty), mask=inside)
    for turn in tl.static_range(LONGEST):
        staged = kept_value + ((row + turn) * HEADS + head) * HEAD_SIZE + values
        some_rows = some_values & (most > turn + 0 * values)
        tl.store(staged, given[turn] * steps[turn], mask=some_rows)
        decay = kept_decay + (row + turn) * HEADS + head
        tl.store(decay, decays[turn], mask=(most > turn) & (begins == 0))
