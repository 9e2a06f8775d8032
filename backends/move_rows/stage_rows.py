"""Copying the rows of several tensors to buffers in one launch, as a forward stages them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

#: Most tensors in one launch.
MOST_PARTS: Final = 5
_BLOCK: Final = 1024


@triton.jit
def _copy(
    source: tl.tensor,
    target: tl.tensor,
    stride: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Copy the elements ``at`` of one row of ``WIDTH`` elements; those beyond its end are left out.

    ``stride`` lies between rows of ``source``; rows of ``target`` follow each other.
    """
    inside = at < WIDTH
    number = tl.load(source + row * stride + at, mask=inside)
    tl.store(target + row * WIDTH + at, number, mask=inside)


@triton.jit
def _stage(
    source_0: tl.tensor,
    source_1: tl.tensor,
    source_2: tl.tensor,
    source_3: tl.tensor,
    source_4: tl.tensor,
    target_0: tl.tensor,
    target_1: tl.tensor,
    target_2: tl.tensor,
    target_3: tl.tensor,
    target_4: tl.tensor,
    stride_0: tl.tensor,
    stride_1: tl.tensor,
    stride_2: tl.tensor,
    stride_3: tl.tensor,
    stride_4: tl.tensor,
    WIDTH_0: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    WIDTH_4: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy one row of each tensor.

    A width of 0 means that the tensor, and all after it, are missing. Grid: (rows, pieces of
    ``BLOCK`` elements of the widest row).
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _copy(source_0, target_0, stride_0, row, at, WIDTH_0)
    if WIDTH_1 > 0:
        _copy(source_1, target_1, stride_1, row, at, WIDTH_1)
    if WIDTH_2 > 0:
        _copy(source_2, target_2, stride_2, row, at, WIDTH_2)
    if WIDTH_3 > 0:
        _copy(source_3, target_3, stride_3, row, at, WIDTH_3)
    if WIDTH_4 > 0:
        _copy(source_4, target_4, stride_4, row, at, WIDTH_4)


def stage_rows(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy rows of several tensors, the same rows of each, in one launch; in none without rows.

    Args:
        sources: at most ``MOST_PARTS``, ``[num_rows, width]`` each; elements of a row are
            neighbours, rows may be any distance apart.
        targets: one per source, contiguous, of its dtype, with room for ``num_rows`` rows of
            ``width`` elements, row after row from the first element on.
    """
    rows, missing = sources[0].shape[0], MOST_PARTS - len(sources)
    widths = [part.shape[1] for part in sources]
    if not rows:
        return
    grid = rows, triton.cdiv(max(widths), _BLOCK)
    _stage[grid](
        *(*sources, *[sources[0]] * missing),
        *(*targets, *[targets[0]] * missing),
        *(*(part.stride(0) for part in sources), *[0] * missing),
        *(*widths, *[0] * missing),
        BLOCK=_BLOCK,
    )
