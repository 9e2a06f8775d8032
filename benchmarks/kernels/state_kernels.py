"""A kernel that verifies over a recurrent state as engines do, writing the state after each row.

It is used where no engine's own kernel is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def verify_rows(
    state: tl.tensor,
    table: tl.tensor,
    column: tl.tensor,
    starts: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    strength: tl.tensor,
    decay: tl.tensor,
    out: tl.tensor,
    columns: tl.int32,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CORRECTS: tl.constexpr,
) -> None:
    """Compute the outputs of a step's rows, and write the states that the table has blocks for.

    Grid: (VALUES / BLOCK, num_requests * HEADS); each program has its own part of a state.

    Args:
        state: ``[num_blocks, HEADS, VALUES, KEYS]``, contiguous.
        table: int32 ``[num_requests, columns]``: row ``i`` of a request writes to the block in
            column ``i``; 0 is no block.
        column: int32 ``[num_requests]``: the step begins with the state in this column, counted
            from 1.
        starts: int32 ``[num_requests + 1]``.
        query: ``[num_rows, KEY_HEADS, KEYS]``.
        key: shaped like ``query``.
        value: ``[num_rows, HEADS, VALUES]``.
        strength: float32 ``[num_rows, HEADS]``, the factor of each value.
        decay: float32 ``[num_rows, HEADS]``, the factor of each state.
        out: ``[num_rows, HEADS, VALUES]``.
        columns: columns of ``table``.
        HEADS: heads of a state.
        KEY_HEADS: heads of keys and queries; divides ``HEADS``.
        VALUES: values of a head.
        KEYS: keys of a value, a power of two.
        BLOCK: values of a program, a power of two that divides ``VALUES``.
        CORRECTS: the state's own answer to a key is taken off the value: a gated delta net.
    """
    request = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    key_head = head // (HEADS // KEY_HEADS)
    values = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = tl.arange(0, KEYS)
    place = (head * VALUES + values)[:, None] * KEYS + keys[None, :]
    first = tl.load(starts + request)
    line = table + request * columns
    source = tl.load(line + tl.load(column + request) - 1).to(tl.int64)
    if source > 0:
        now = tl.load(state + source * (HEADS * VALUES * KEYS) + place).to(tl.float32)
        for number in range(0, tl.load(starts + request + 1) - first):
            row = (first + number).to(tl.int64)
            q = tl.load(query + (row * KEY_HEADS + key_head) * KEYS + keys).to(tl.float32)
            k = tl.load(key + (row * KEY_HEADS + key_head) * KEYS + keys).to(tl.float32)
            v = tl.load(value + (row * HEADS + head) * VALUES + values).to(tl.float32)
            now *= tl.load(decay + row * HEADS + head)
            if CORRECTS:
                v -= tl.sum(now * k[None, :], 1)
            v *= tl.load(strength + row * HEADS + head)
            now += v[:, None] * k[None, :]
            answer = tl.sum(now * q[None, :], 1).to(out.dtype.element_ty)
            tl.store(out + (row * HEADS + head) * VALUES + values, answer)
            target = tl.load(line + number).to(tl.int64)
            if target > 0:
                written = state + target * (HEADS * VALUES * KEYS) + place
                tl.store(written, now.to(state.dtype.element_ty))
