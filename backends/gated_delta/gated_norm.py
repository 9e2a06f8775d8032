"""A gated norm in one launch, in place, beside a gate whose rows lie any distance apart."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

#: Heads of one program.
_HEADS: Final = 4


@triton.jit(do_not_specialize=["heads"])
def norm_rows(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    x_stride: tl.int64,
    gate_stride: tl.int64,
    heads: tl.int32,
    eps: tl.float32,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> None:
    """Norm some heads of a row of ``x`` in place, times the weight and the gate.

    A program writes what it has read. Grid: (rows, runs of heads), as a prompt may have more rows
    than other axes of a grid take.

    Args:
        x: ``[num_rows, heads, SIZE]``, a row contiguous.
        gate: ``[num_rows, heads, SIZE]``, a row contiguous.
        weight: ``[SIZE]``.
        x_stride: elements between rows of ``x``.
        gate_stride: elements between rows of ``gate``.
        heads: of a row.
        eps: added to the mean of squares.
        SIZE: numbers of a head.
        WIDTH: a power of two, at least ``SIZE``.
        HEADS: heads of a program, a power of two.
        SIGMOID: the gate is a sigmoid; else it is multiplied by itself as well.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (column < SIZE)[None, :]
    cell = head[:, None] * SIZE + column[None, :]
    numbers = tl.load(x + row * x_stride + cell, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gate + row * gate_stride + cell, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, axis=1) / SIZE
    normed = numbers * tl.rsqrt(mean + eps)[:, None] * scale[None, :]
    factor = tl.sigmoid(given)
    if not SIGMOID:
        factor = factor * given
    tl.store(x + row * x_stride + cell, (normed * factor).to(x.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, sigmoid: bool) -> None:
    """Replace each head of ``x`` by its RMS norm, times the weight and the gate.

    Nothing without rows.

    Args:
        x: ``[num_rows, heads, size]``; rows any distance apart, a row contiguous.
        gate: of the same shape, rows any distance apart; ``silu(gate)`` is multiplied in, or
            ``sigmoid(gate)``.
        weight: ``[size]``.
        eps: added to the mean of squares.
        sigmoid: see ``gate``.
    """
    rows, heads, size = x.shape
    if not rows:
        return
    norm_rows[rows, triton.cdiv(heads, _HEADS)](
        *(x, gate, weight, x.stride(0), gate.stride(0), heads, eps),
        SIZE=size,
        WIDTH=triton.next_power_of_2(size),
        HEADS=_HEADS,
        SIGMOID=sigmoid,
        num_warps=1,
    )
