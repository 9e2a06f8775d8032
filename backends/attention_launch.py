"""Attention of a window, launched: which blocks, how many splits, where partial results go."""

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
from .row_scales import scales_of, typed
from .triton_attention import paged_partial
from .triton_short import short_attention
from .triton_window import window_attention

_COMPUTE: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

#: Tokens of the prefix that one program reads at least.
_MIN_SPLIT: Final = 256

#: Rows of a request up to which one program takes one row and one KV head ...
_SHORT: Final = 16

#: ... with at most so many products (query heads x keys x head size), so many to each warp.
_MOST_PRODUCTS: Final = 32768
_PRODUCTS_PER_WARP: Final = 4096


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
            "BLOCK_D": _power(self.d),
            "BLOCK_DV": _power(self.dv),
        }


@attrs.frozen
class Blocks:
    """Rows, query heads and keys per step of a kernel that loops over keys."""

    rows: int
    queries: int
    keys: int
    warps: int


def _power(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())


def blocks_for(shape: Shape, keys: int) -> Blocks:
    """Blocks that hold a whole request where it is short, and fit in registers."""
    most = max(1, 64 // shape.group)
    rows = min(shape.requests.longest, most)
    queries = _power(rows * shape.group)
    wide = max(_power(shape.d), _power(shape.dv))
    return Blocks(rows, queries, min(keys, 64 if wide <= 128 else 32), 4)


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


def _compute(query: Tensor, ref: LayerRef) -> tl.dtype:
    """16-bit products where nothing is lost by them, else float32."""
    stored = ref.planes[0].format.dtype
    exact = stored is query.dtype or stored.itemsize == 1
    if ref.planes[-1].is_scale:  # a code times its scale has more digits
        return tl.float32
    return _COMPUTE.get(query.dtype, tl.float32) if exact else tl.float32


class AttentionLauncher:
    """Launches both kernels for one device.

    Args:
        device: where the caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._ones = torch.ones(1, dtype=torch.float32, device=device)
        #: Multiprocessors of the device.
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def prefix(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        args: AttentionArgs,
        *,
        fresh: bool,
    ) -> Prefix:
        """Attention over rows in the paged cache; the window's own too unless ``fresh``."""
        shape = self._shape(layout, ref, query, args)
        key, value = ref.planes[:2]
        blocks, heads = blocks_for(shape, 64), shape.heads
        slices = -(-shape.requests.longest // blocks.rows)
        splits = self._splits(layout.num_requests * heads * slices, args, key.block_size)
        size = (splits, query.shape[0], query.shape[1])
        out = query.new_empty(*size, shape.dv, dtype=torch.float32)
        lse = query.new_empty(size, dtype=torch.float32)
        k_scale, v_scale = (scales_of(ref, side, self._ones) for side in (0, 1))
        starts = shape.requests.starts
        paged_partial[(layout.num_requests, heads, splits * slices)](
            query,
            typed(key),
            typed(value),
            k_scale.numbers,
            v_scale.numbers,
            args.block_table,
            args.seq_lens,
            starts,
            starts if layout.tree is None else layout.tree.order,
            out,
            lse,
            query.stride(0),
            query.stride(1),
            *key.cells.stride()[:3],
            *value.cells.stride()[:3],
            *k_scale.strides,
            *v_scale.strides,
            args.block_table.stride(0),
            key.cells.shape[0],
            query.shape[0],
            args.scale,
            args.soft_cap or 1.0,
            args.sliding_window or 0,
            args.ring_size or 0,
            **shape.constants(),
            FRESH=fresh,
            RING=args.ring_size is not None,
            K_SCALES=k_scale.count,
            V_SCALES=v_scale.count,
            K_STEP=key.cells.stride(3),
            V_STEP=value.cells.stride(3),
            BLOCK_R=blocks.rows,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            COMPUTE=_compute(query, ref),
            SPLITS=splits,
            num_warps=blocks.warps,
        )
        return Prefix(out, lse)

    def _splits(self, programs: int, args: AttentionArgs, block_size: int) -> int:
        """Slices of the prefix, a power of two, so that programs fill the device."""
        capacity = args.block_table.shape[1] * block_size
        if args.sliding_window is not None:
            capacity = min(capacity, args.sliding_window)
        most = max(1, capacity // _MIN_SPLIT)
        wanted = max(1, 2 * self.processors // max(1, programs))
        return 1 << (min(most, wanted, 64).bit_length() - 1)

    def merge(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        fresh: tuple[Tensor, ...] | None,
        prefix: Prefix,
        args: AttentionArgs,
        keep: Keep | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """The window kernel: the prefix merged with causal attention over ``fresh``.

        Args:
            layout: which rows are whose.
            ref: the layer.
            query: ``[num_rows, num_q_heads, head_size]``.
            fresh: keys and values as the cache stores them; None where the prefix has them.
            prefix: attention over what came before.
            args: scale, sliding window, soft cap.
            keep: what to write beside the output; not for rows with scales of their own.
            output: where to; may be the prefix's own output. A new tensor where None.
        """
        shape = self._shape(layout, ref, query, args)
        key, value = ref.planes[:2]
        if keep is not None and ref.planes[-1].is_scale:
            raise LayerError("attend", f"the window kernel keeps no scales, as {ref.name!r} has")
        if output is None:
            output = query.new_empty(*query.shape[:2], shape.dv)
        k, v = fresh[:2] if fresh is not None else (query, query)
        write = keep is not None and keep.slots is not None
        copies = keep.buffers if keep is not None else None
        k_scale, v_scale = (scales_of(ref, side, self._ones, fresh) for side in (0, 1))
        starts, tree = shape.requests.starts, layout.tree
        kernel, grid, own = self._kernel(
            shape, layout, query, ref, prefix.out.shape[0], fresh is not None
        )
        kernel[grid](
            query,
            k,
            v,
            prefix.out,
            prefix.lse,
            output,
            starts,
            layout.request,
            k_scale.numbers,
            v_scale.numbers,
            typed(key) if write else k,
            typed(value) if write else v,
            k if copies is None else copies[0],
            v if copies is None else copies[1],
            keep.slots if keep is not None and keep.slots is not None else starts,
            layout.position if keep is None else keep.position,
            starts if tree is None else tree.order,
            starts if tree is None else tree.visible.view(torch.uint8),
            query.stride(0),
            query.stride(1),
            *k.stride()[:2],
            *v.stride()[:2],
            *k_scale.strides[:2],
            *v_scale.strides[:2],
            *prefix.out.stride()[:3],
            *prefix.lse.stride(),
            output.stride(0),
            output.stride(1),
            *key.cells.stride()[:3],
            *value.cells.stride()[:3],
            ref.num_slots,
            prefix.out.shape[0],
            args.scale,
            args.soft_cap or 1.0,
            args.sliding_window or 0,
            shape.requests.longest,
            **shape.constants(),
            **own,
            WRITE=write,
            COPY=copies is not None,
            K_SCALES=k_scale.count,
            V_SCALES=v_scale.count,
            K_STEP=k.stride(2),
            V_STEP=v.stride(2),
            EACH=shape.requests.each,
        )
        return output

    def _kernel(
        self,
        shape: Shape,
        layout: RowLayout,
        query: Tensor,
        ref: LayerRef,
        splits: int,
        fresh: bool,
    ) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
        """The window kernel for this shape, its grid, and the constants that it alone has."""
        longest = shape.requests.longest
        queries, keys = 1 << (shape.group - 1).bit_length(), 1 << (longest - 1).bit_length()
        products = queries * keys * max(_power(shape.d), _power(shape.dv))
        if fresh and longest <= _SHORT and products <= _MOST_PRODUCTS:
            grid: tuple[int, ...] = (query.shape[0], shape.heads)
            few = grid[0] * grid[1] <= self.processors
            warps = min(8, max(1, products // _PRODUCTS_PER_WARP) * (2 if few else 1))
            own = {"BLOCK_M": queries, "BLOCK_N": keys, "MORE": splits > 1, "num_warps": warps}
            return short_attention, grid, own
        blocks = blocks_for(shape, _power(longest))
        own = {
            "FRESH": fresh,
            "BLOCK_R": blocks.rows,
            "BLOCK_M": blocks.queries,
            "BLOCK_N": blocks.keys,
            "COMPUTE": _compute(query, ref),
            "num_warps": 2 if blocks.queries <= 32 else 4,
        }
        grid = (layout.num_requests, shape.heads, -(-longest // blocks.rows))
        return window_attention, grid, own

    def _shape(self, layout: RowLayout, ref: LayerRef, query: Tensor, args: AttentionArgs) -> Shape:
        key, value = ref.planes[:2]
        heads, d = key.row_shape
        return Shape(
            requests_of(layout, query.device),
            heads,
            query.shape[1] // heads,
            d,
            value.row_shape[1],
            key.block_size,
            layout.tree is not None,
            args.soft_cap is not None,
            args.sliding_window is not None,
        )
