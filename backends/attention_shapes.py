"""What attention launches are made of: requests, heads, blocks, and what goes in and out."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from ..layout import RowLayout, to_device


@attrs.frozen(eq=False)
class Requests:
    """A layout as the attention kernels want it.

    Attributes:
        starts: int32 ``[num_requests + 1]`` on the device.
        longest: rows of the longest request.
        each: rows of every request, where all are alike and few; else 0.
    """

    starts: Tensor
    longest: int
    each: int


_requests: WeakKeyDictionary[RowLayout, Requests] = WeakKeyDictionary()


def requests_of(layout: RowLayout, device: torch.device) -> Requests:
    """The layout on the device; made once."""
    found = _requests.get(layout)
    if found is None:
        lengths = [b - a for a, b in zip(layout.starts, layout.starts[1:], strict=False)]
        longest = max(lengths, default=0)
        each = longest if len({*lengths}) == 1 and longest <= 32 else 0
        starts = to_device(layout.starts, device, torch.int32)
        found = _requests[layout] = Requests(starts, longest, each)
    return found


@attrs.frozen(eq=False)
class Shape:
    """What every attention launch of a layer has in common."""

    requests: Requests
    heads: int
    group: int
    d: int
    dv: int
    block_size: int
    tree: bool
    capped: bool
    sliding: bool

    def constants(self) -> dict[str, Any]:
        """Constants of the kernels, by their names there."""
        return {
            "TREE": self.tree,
            "CAPPED": self.capped,
            "SLIDING": self.sliding,
            "GROUP": self.group,
            "HEADS": self.heads,
            "D": self.d,
            "DV": self.dv,
            "BLOCK_SIZE": self.block_size,
            "BLOCK_D": power(self.d),
            "BLOCK_DV": power(self.dv),
        }


@attrs.frozen
class Blocks:
    """Rows and query heads of a program that loops over keys, and the warps they are enough for."""

    rows: int
    queries: int
    warps: int


def power(value: int) -> int:
    """The least power of two that is neither below ``value`` nor below 16."""
    return max(16, 1 << (value - 1).bit_length())


def floor_power(value: int) -> int:
    """The greatest power of two that is not above ``value``; 1 below that."""
    return 1 << (max(1, value).bit_length() - 1)


def blocks_for(shape: Shape) -> Blocks:
    """Blocks that hold a whole request where it is short, and fit in registers.

    Tensor cores take 16 queries at a time: a warp without 16 of its own would do another's work.
    """
    rows = min(shape.requests.longest, max(1, 64 // shape.group))
    queries = power(rows * shape.group)
    wide = max(power(shape.d), power(shape.dv))
    return Blocks(rows, queries, queries // 16 * (1 if wide <= 128 else 2))


@attrs.frozen(eq=False)
class Prefix:
    """Attention over the rows before the window: its output and log-sum-exp.

    Attributes:
        out: ``[splits, num_rows, num_q_heads, value_head_size]``, innermost contiguous.
        lse: float32 ``[splits, num_rows, num_q_heads]``, natural logarithm, any strides.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def single(cls, out: Tensor, lse: Tensor) -> Prefix:
        """From one call of FlashAttention: out ``[rows, heads, size]``, lse ``[heads, rows]``."""
        return cls(out.unsqueeze(0), lse.transpose(0, 1).unsqueeze(0))


@attrs.frozen(eq=False)
class Keep:
    """What the window kernel writes beside its output.

    Attributes:
        slots: int ``[num_rows]``, -1 is padding, to write settled rows to the layer's cache;
            None writes none.
        position: int64 ``[num_rows]``, -1 for settled rows.
        buffers: ``[max_rows, heads, size]`` for keys and values, to copy all rows to; or None.
    """

    slots: Tensor | None
    position: Tensor
    buffers: tuple[Tensor, Tensor] | None = None
