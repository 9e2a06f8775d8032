"""What attention launches are made of: requests, heads, blocks, and what goes in and out."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ..errors import LayerError
from ..executor import AttentionArgs
from ..layers import LayerRef
from ..layout import RowLayout, to_device

_COMPUTE: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

#: Rows of a request, and query heads of a KV head, up to which one program may take one row.
_SHORT: Final = 16

#: Rows x KV heads per processor from which one program takes all rows of a request: with so many
#: programs, reading a request's keys once is worth more than having more programs.
_CROWD: Final = 8

#: The window's rows that one step reads at most.
_WINDOW_KEYS: Final = 64

#: Cached rows that one program reads at least, and in one step: few, so that a processor has
#: room for four programs, each with the next steps' rows on their way.
_MIN_SPLIT: Final = 64
_CACHED_KEYS: Final = 32

#: Programs per processor that are worth having; with more, each takes more.
_WAVES: Final = 4


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
    """What every attention launch of a layer has in common.

    Attributes:
        requests: the window's.
        heads: KV heads.
        group: query heads of each KV head.
        d: head size of queries and keys.
        dv: head size of values.
        block_size: slots per block of the cache.
        tree: the window has draft trees.
        capped: scores have a soft cap.
        sliding: a query sees a sliding window.
    """

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


@attrs.frozen
class WindowForm:
    """How the window kernel divides its work.

    Attributes:
        rows: of a request, per program; 1 means ``short_attention``.
        queries: room for their query heads.
        keys: the window's rows that are read in one step.
        warps: per program.
    """

    rows: int
    queries: int
    keys: int
    warps: int


def window_form(shape: Shape, num_rows: int, processors: int) -> WindowForm:
    """The window kernel for a shape; measured on an H200.

    Args:
        shape: the layer and its requests.
        num_rows: rows of the window.
        processors: of the device.
    """
    longest, programs = shape.requests.longest, num_rows * shape.heads
    short = max(longest, shape.group) <= _SHORT and max(shape.d, shape.dv) <= 256
    if short and programs <= _CROWD * processors:
        return WindowForm(1, power(shape.group), power(longest), 2 if programs <= processors else 1)
    blocks = blocks_for(shape)
    keys = min(power(longest), _WINDOW_KEYS)
    return WindowForm(blocks.rows, blocks.queries, keys, 2 if blocks.queries <= 32 else 4)


@attrs.frozen
class PagedTile:
    """How the kernel over cached rows divides its work.

    Attributes:
        rows: of a request, per program.
        queries: room for their query heads.
        keys: cached rows that are read in one step.
        warps: per program.
        stages: steps whose rows are on their way at once.
        splits: slices of a request's cached rows, a power of two.
    """

    rows: int
    queries: int
    keys: int
    warps: int
    stages: int
    splits: int


def paged_tile(
    shape: Shape, pairs: int, capacity: int, processors: int, *, half: bool
) -> PagedTile:
    """The tile for a shape; measured on an H200.

    Args:
        shape: the layer and its requests.
        pairs: requests x KV heads.
        capacity: most cached rows that a row may see.
        processors: of the device.
        half: products are of 16 bits.
    """
    blocks = blocks_for(shape)
    programs = pairs * -(-shape.requests.longest // blocks.rows)
    most, wanted = capacity // _MIN_SPLIT, _WAVES * processors // max(1, programs)
    splits = floor_power(min(most, wanted, 64))
    few = programs * splits <= 2 * processors
    if few and half and max(power(shape.d), power(shape.dv)) <= 128:
        # What counts is how long a step takes: least on blocks of 64 queries, by four warps.
        return PagedTile(blocks.rows, max(64, blocks.queries), _CACHED_KEYS, 4, 4, splits)
    warps = min(8, blocks.warps * (2 if few else 1))
    return PagedTile(blocks.rows, blocks.queries, _CACHED_KEYS, warps, 3, splits)


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


@attrs.frozen(eq=False)
class Call:
    """One layer's attention in one window.

    Attributes:
        layout: which rows are whose.
        ref: the layer.
        query: ``[num_rows, num_q_heads, head_size]``.
        args: see ``Window.attend``.
        shape: what every launch of it has in common.
        compute: the dtype of products.
    """

    layout: RowLayout
    ref: LayerRef
    query: Tensor
    args: AttentionArgs
    shape: Shape
    compute: tl.dtype


def call_of(layout: RowLayout, ref: LayerRef, query: Tensor, args: AttentionArgs) -> Call:
    """What attends, ready to be launched."""
    key, value = ref.planes[:2]
    heads, size = key.row_shape
    shape = Shape(
        requests_of(layout, query.device),
        heads,
        query.shape[1] // heads,
        size,
        value.row_shape[1],
        key.block_size,
        layout.tree is not None,
        args.soft_cap is not None,
        args.sliding_window is not None,
    )
    return Call(layout, ref, query, args, shape, _compute(query, ref))


def _compute(query: Tensor, ref: LayerRef) -> tl.dtype:
    """16-bit products where nothing is lost by them, else float32."""
    stored = ref.planes[0].format.dtype
    exact = stored is query.dtype or stored.itemsize == 1
    if ref.planes[-1].is_scale:  # a code times its scale has more digits
        return tl.float32
    return _COMPUTE.get(query.dtype, tl.float32) if exact else tl.float32


def refuse_scales(ref: LayerRef) -> None:
    """Refuse to write rows with scales of their own: the attention kernels write none."""
    if ref.planes[-1].is_scale:
        raise LayerError(
            "attend",
            f"the window kernel cannot write rows of {ref.name!r}, whose scales lie beside them",
            hint="stage them instead, and attend without slots and without anything to keep",
        )
