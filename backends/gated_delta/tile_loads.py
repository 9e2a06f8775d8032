"""Tiles of states and of keys, as threads load them, and their products on tensor cores.

A thread holds runs of keys of one row of the state, as it loads them. Tensor cores want other keys
in a thread; but a sum over keys has no order, so ``keys_in_threads`` renames the keys, of state and
rows alike, and nothing moves between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def appended(items: tl.tuple, item: tl.tensor) -> tl.tuple:
    """Return a tuple with one more item; compilers know no lists."""
    return items + (item,)  # noqa: RUF005 - nor unpacking


@triton.jit
def truncated(numbers: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the upper halves of float32 numbers as bfloat16, and the rest of them, exactly."""
    bits = numbers.to(tl.uint32, bitcast=True)
    upper = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), numbers - upper


@triton.jit
def keys_in_threads(
    numbers: tl.tensor, ROWS: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr
) -> tl.tensor:
    """Turn lines of runs, as ``runs`` loads them, into ``[ROWS, KEYS]`` as tensor cores hold it.

    Of each 16 columns of an operand, a thread has two pairs, 8 columns apart, and four threads
    share a row. So the run of a thread becomes such pairs.
    """
    pieces: tl.constexpr = KEYS // (4 * RUN)
    apart = tl.reshape(numbers, [pieces, ROWS, 4, RUN // 4, 2, 2])
    return tl.reshape(tl.permute(apart, [1, 0, 3, 4, 2, 5]), [ROWS, KEYS])


@triton.jit
def product(
    left: tl.tensor,
    right: tl.tensor,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    SPLIT_LEFT: tl.constexpr,
    SPLIT_RIGHT: tl.constexpr,
) -> tl.tensor:
    """Multiply ``left`` by ``right`` transposed, with float32's precision.

    Args:
        left: lines of runs, ``[LEFT * KEYS / (4 * RUN), 4 * RUN]``.
        right: lines of runs, ``[RIGHT * KEYS / (4 * RUN), 4 * RUN]``.
        LEFT: rows of ``left``.
        RIGHT: rows of ``right``.
        KEYS: columns of both.
        RUN: as for ``keys_in_threads``.
        SPLIT_LEFT: ``left`` is no bfloat16: it becomes three of them.
        SPLIT_RIGHT: the same of ``right``.
    """
    if SPLIT_LEFT:
        left_0, rest = truncated(left.to(tl.float32))
        left_1, rest = truncated(rest)
        left_2, rest = truncated(rest)
        a0 = keys_in_threads(left_0, LEFT, KEYS, RUN)
        a1 = keys_in_threads(left_1, LEFT, KEYS, RUN)
        a2 = keys_in_threads(left_2, LEFT, KEYS, RUN)
    else:
        a0 = keys_in_threads(left, LEFT, KEYS, RUN)
    if SPLIT_RIGHT:
        right_0, rest = truncated(right.to(tl.float32))
        right_1, rest = truncated(rest)
        right_2, rest = truncated(rest)
        b0 = tl.trans(keys_in_threads(right_0, RIGHT, KEYS, RUN))
        b1 = tl.trans(keys_in_threads(right_1, RIGHT, KEYS, RUN))
        b2 = tl.trans(keys_in_threads(right_2, RIGHT, KEYS, RUN))
    else:
        b0 = tl.trans(keys_in_threads(right, RIGHT, KEYS, RUN))
    # The smallest products first. Those left out are below float32's precision.
    result = tl.zeros([LEFT, RIGHT], dtype=tl.float32)
    if SPLIT_LEFT:
        result = tl.dot(a2, b0, result)
    if SPLIT_RIGHT:
        result = tl.dot(a0, b2, result)
    if SPLIT_LEFT and SPLIT_RIGHT:
        result = tl.dot(a1, b1, result)
    if SPLIT_LEFT:
        result = tl.dot(a1, b0, result)
    if SPLIT_RIGHT:
        result = tl.dot(a0, b1, result)
    return tl.dot(a0, b0, result)


@triton.jit
def runs(
    rows: tl.tensor,
    inside: tl.tensor,
    ROWS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    """Load rows of ``KEY_SIZE`` numbers, four threads to a line of ``4 * RUN``.

    First come the first lines of all rows, then the second ones, and so on: so a compiler gives
    neighbouring lines, which belong to different rows, to different threads.

    Args:
        rows: pointers ``[lines]`` to the row of each line.
        inside: bool ``[lines]``; numbers of other rows are 0.
        ROWS: number of rows.
        KEY_SIZE: see ``verify_rows``, as for all below.
        KEYS: a power of two.
        RUN: numbers that a thread loads at once; no more, so that threads hold alike.
        ALIGNED: each run begins on a multiple of its size.
        WHOLE: every row is inside.
    """
    lines = tl.arange(0, ROWS * KEYS // (4 * RUN))
    keys = (lines // ROWS * (4 * RUN))[:, None] + tl.arange(0, 4 * RUN)[None, :]
    pointers = rows[:, None] + keys
    if ALIGNED:
        bytes: tl.constexpr = rows.dtype.scalar.element_ty.primitive_bitwidth // 8 * RUN
        pointers = tl.max_contiguous(tl.multiple_of(pointers, (1, bytes)), (1, RUN))
    if WHOLE and KEY_SIZE == KEYS:
        numbers = tl.load(pointers)
    elif KEY_SIZE == KEYS:
        numbers = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif ALIGNED:
        some = keys // RUN < KEY_SIZE // RUN
        numbers = tl.load(pointers, mask=inside[:, None] & some, other=0.0)
    else:
        numbers = tl.load(pointers, mask=inside[:, None] & (keys < KEY_SIZE), other=0.0)
    return numbers


@triton.jit
def state_of(
    begin: tl.tensor,
    first: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Load ``VALUES`` rows of a head's state that begins at ``begin``, from ``first`` on.

    They come as lines of runs, see ``runs``; rows from ``VALUE_SIZE`` on are 0.
    """
    values = first + tl.arange(0, VALUES * KEYS // (4 * RUN)) % VALUES
    return runs(
        begin + values * KEY_SIZE, values < VALUE_SIZE,
        VALUES, KEY_SIZE, KEYS, RUN, ALIGNED, VALUE_SIZE % VALUES == 0,
    )  # fmt: skip


@triton.jit
def values_of(
    given: tl.tensor, values: tl.tensor, live: tl.tensor, VALUE_SIZE: tl.constexpr
) -> tl.tensor:
    """Load the elements ``values`` of the rows' values as float32 ``[VALUES, 2 * COLUMNS]``.

    ``given`` points to the row of each column; columns that are not ``live`` are 0.
    """
    inside = live[None, :] & (values < VALUE_SIZE)[:, None]
    return tl.load(given + values[:, None], mask=inside, other=0.0).to(tl.float32)
