"""Attention of a window, launched: which blocks, how many splits, where partial results go."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ..executor import AttentionArgs
from ..layers import LayerRef, Plane
from ..layout import RowLayout, to_device
from .triton_attention import paged_partial
from .triton_window import window_attention

_COMPUTE: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

#: Tokens of the prefix that one program reads at least.
_MIN_SPLIT: Final = 256


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


@attrs.frozen
class Blocks:
    """Block sizes of both kernels for one shape."""

    rows: int
    queries: int
    keys: int
    d: int
    dv: int
    warps: int


def _power(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())


def blocks_for(longest: int, group: int, d: int, dv: int, keys: int) -> Blocks:
    """Blocks that hold a whole request where it is short, and fit in registers."""
    most = max(1, 64 // group)
    rows = min(longest, most)
    queries = _power(rows * group)
    wide = max(_power(d), _power(dv))
    keys = min(keys, 64 if wide <= 128 else 32)
    return Blocks(rows, queries, keys, _power(d), _power(dv), 4)


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


def _typed(plane: Plane) -> Tensor:
    return plane.cells.view(plane.format.dtype)


def _compute(query: Tensor, plane: Plane) -> tl.dtype:
    """16-bit products where nothing is lost by them, else float32."""
    stored = plane.format.dtype
    exact = stored is query.dtype or stored.itemsize == 1
    return _COMPUTE.get(query.dtype, tl.float32) if exact else tl.float32


class AttentionLauncher:
    """Launches both kernels for one device.

    Args:
        device: where the caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._ones = torch.ones(1, dtype=torch.float32, device=device)
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def _scales(self, plane: Plane) -> Tensor:
        scale = plane.format.scale
        return self._ones if scale is None else scale.reshape(-1)

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
        key, value = ref.planes
        heads, d = key.row_shape
        dv = value.row_shape[1]
        group = query.shape[1] // heads
        rows = requests_of(layout, query.device)
        blocks = blocks_for(rows.longest, group, d, dv, 64)
        slices = -(-rows.longest // blocks.rows)
        splits = self._splits(layout.num_requests * heads * slices, args, key.block_size)
        shape = (splits, query.shape[0], query.shape[1])
        out = query.new_empty(*shape, dv, dtype=torch.float32)
        lse = query.new_empty(shape, dtype=torch.float32)
        k_scale, v_scale = self._scales(key), self._scales(value)
        paged_partial[(layout.num_requests, heads, splits * slices)](
            query,
            _typed(key),
            _typed(value),
            k_scale,
            v_scale,
            args.block_table,
            args.seq_lens,
            rows.starts,
            rows.starts if layout.tree is None else layout.tree.order,
            out,
            lse,
            query.stride(0),
            query.stride(1),
            *key.cells.stride(),
            *value.cells.stride(),
            args.block_table.stride(0),
            key.cells.shape[0],
            query.shape[0],
            args.scale,
            args.soft_cap or 1.0,
            args.sliding_window or 0,
            args.ring_size or 0,
            FRESH=fresh,
            TREE=layout.tree is not None,
            CAPPED=args.soft_cap is not None,
            SLIDING=args.sliding_window is not None,
            RING=args.ring_size is not None,
            K_SCALES=k_scale.numel(),
            V_SCALES=v_scale.numel(),
            GROUP=group,
            HEADS=heads,
            D=d,
            DV=dv,
            BLOCK_SIZE=key.block_size,
            BLOCK_R=blocks.rows,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            BLOCK_D=blocks.d,
            BLOCK_DV=blocks.dv,
            COMPUTE=_compute(query, key),
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
        wanted = max(1, 2 * self._processors // max(1, programs))
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
            keep: what to write beside the output.
            output: where to; may be the prefix's own output. A new tensor where None.
        """
        key, value = ref.planes
        heads, d = key.row_shape
        dv = value.row_shape[1]
        group = query.shape[1] // heads
        rows = requests_of(layout, query.device)
        blocks = blocks_for(rows.longest, group, d, dv, _power(rows.longest))
        if output is None:
            output = query.new_empty(*query.shape[:2], dv)
        k, v = fresh if fresh is not None else (query, query)
        write = keep is not None and keep.slots is not None
        copies = keep.buffers if keep is not None else None
        k_scale, v_scale = self._scales(key), self._scales(value)
        slices = -(-rows.longest // blocks.rows)
        window_attention[(layout.num_requests, heads, slices)](
            query,
            k,
            v,
            prefix.out,
            prefix.lse,
            output,
            rows.starts,
            k_scale,
            v_scale,
            _typed(key) if write else k,
            _typed(value) if write else v,
            k if copies is None else copies[0],
            v if copies is None else copies[1],
            keep.slots if keep is not None and keep.slots is not None else rows.starts,
            layout.position if keep is None else keep.position,
            rows.starts if layout.tree is None else layout.tree.order,
            rows.starts if layout.tree is None else layout.tree.visible.view(torch.uint8),
            query.stride(0),
            query.stride(1),
            *k.stride(),
            *v.stride(),
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
            rows.longest,
            FRESH=fresh is not None,
            TREE=layout.tree is not None,
            CAPPED=args.soft_cap is not None,
            SLIDING=args.sliding_window is not None,
            WRITE=write,
            COPY=copies is not None,
            K_SCALES=k_scale.numel() if key.format.quantised else 0,
            V_SCALES=v_scale.numel() if value.format.quantised else 0,
            GROUP=group,
            HEADS=heads,
            D=d,
            DV=dv,
            BLOCK_SIZE=key.block_size,
            BLOCK_R=blocks.rows,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            BLOCK_D=blocks.d,
            BLOCK_DV=blocks.dv,
            COMPUTE=_compute(query, key),
            EACH=rows.each,
            num_warps=2 if blocks.queries <= 32 else 4,
        )
        return output
