"""Attention of a window, launched: which blocks, how many splits, where partial results go."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from ..errors import LayerError
from ..executor import AttentionArgs
from ..layers import LayerRef
from ..layout import RowLayout
from .attention_shapes import (
    Keep,
    PagedTile,
    Prefix,
    Shape,
    paged_tile,
    power,
    requests_of,
    window_form,
)
from .jobs import Launch
from .recurring_windows import RecurringWindows
from .row_scales import scales_of, typed
from .triton_paged import combine, paged_attention
from .triton_short import short_attention
from .triton_window import window_attention

_COMPUTE: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _compute(query: Tensor, ref: LayerRef) -> tl.dtype:
    """16-bit products where nothing is lost by them, else float32."""
    stored = ref.planes[0].format.dtype
    exact = stored is query.dtype or stored.itemsize == 1
    if ref.planes[-1].is_scale:  # a code times its scale has more digits
        return tl.float32
    return _COMPUTE.get(query.dtype, tl.float32) if exact else tl.float32


def _refuse_scales(ref: LayerRef) -> None:
    if ref.planes[-1].is_scale:
        raise LayerError("attend", f"the window kernel keeps no scales, as {ref.name!r} has")


class AttentionLauncher:
    """Launches the attention kernels for one device.

    Args:
        device: where the caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._ones = torch.ones(1, dtype=torch.float32, device=device)
        self._recurring = RecurringWindows()
        #: Multiprocessors of the device.
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def attend(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        fresh: tuple[Tensor, ...] | None,
        args: AttentionArgs,
        *,
        slots: Tensor | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Attention over the paged cache and the window's own rows; one launch, or two.

        Args:
            layout: which rows are whose.
            ref: the layer.
            query: ``[num_rows, num_q_heads, head_size]``.
            fresh: keys and values as the cache stores them; None where the cache has them.
            args: see ``Window.attend``.
            slots: int ``[num_rows]``, to write settled rows of ``fresh`` to the layer's cache;
                None writes none. Not for rows with scales of their own.
            output: where to; a new tensor where None.
        """
        shape = self._shape(layout, ref, query, args)
        if output is None:
            output = query.new_empty(*query.shape[:2], shape.dv)
        if slots is not None:
            _refuse_scales(ref)
        tile = self._tile(layout, shape, args, _compute(query, ref))
        if tile.splits == 1:
            whole = output.unsqueeze(0)
            self._paged(layout, ref, query, args, shape, tile, whole, None, fresh, slots)
            return output
        parts = self._parts(query, shape, tile)
        self._paged(layout, ref, query, args, shape, tile, *parts, fresh, slots)
        self._combine(parts, output)
        return output

    def _combine(self, parts: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Merge what the slices found."""
        (rows, heads, size), splits = output.shape, parts[0].shape[0]
        combine[(rows, heads)](
            *parts,
            output,
            output.stride(0),
            output.stride(1),
            rows,
            HEADS=heads,
            DV=size,
            BLOCK_DV=power(size),
            SPLITS=splits,
            num_warps=max(1, min(4, splits * power(size) // 2048)),
        )

    def prefix(
        self, layout: RowLayout, ref: LayerRef, query: Tensor, args: AttentionArgs
    ) -> Prefix:
        """Attention over the rows before the window alone."""
        shape = self._shape(layout, ref, query, args)
        tile = self._tile(layout, shape, args, _compute(query, ref))
        parts = self._parts(query, shape, tile)
        self._paged(layout, ref, query, args, shape, tile, *parts, (), None)
        return Prefix(*parts)

    def _parts(self, query: Tensor, shape: Shape, tile: PagedTile) -> tuple[Tensor, Tensor]:
        """Room for the output and log-sum-exp of every slice."""
        size = (tile.splits, *query.shape[:2])
        out = query.new_empty(*size, shape.dv, dtype=torch.float32)
        return out, query.new_empty(size, dtype=torch.float32)

    def _paged(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        args: AttentionArgs,
        shape: Shape,
        tile: PagedTile,
        output: Tensor,
        lse: Tensor | None,
        fresh: tuple[Tensor, ...] | None,
        slots: Tensor | None,
    ) -> None:
        """One launch: ``fresh`` rows are joined to the cached ones, left out where there are none.

        ``output`` is ``[splits, num_rows, num_q_heads, value_head_size]``; ``lse`` likewise, where
        that is not the end of it.
        """
        key, value = ref.planes[:2]
        k, v = fresh[:2] if fresh else (query, query)
        slices = -(-shape.requests.longest // tile.rows)
        grid = (layout.num_requests, shape.heads, tile.splits * slices)
        k_scale, v_scale = (scales_of(ref, side, self._ones) for side in (0, 1))
        own_k, own_v = (scales_of(ref, side, self._ones, fresh or None) for side in (0, 1))
        starts, tree = shape.requests.starts, layout.tree
        paged_attention[grid](
            query,
            k,
            v,
            typed(key),
            typed(value),
            k_scale.numbers,
            v_scale.numbers,
            own_k.numbers,
            own_v.numbers,
            args.block_table,
            args.seq_lens,
            starts,
            starts if slots is None else slots,
            layout.position,
            starts if tree is None else tree.order,
            starts if tree is None else tree.visible.view(torch.uint8),
            output,
            output if lse is None else lse,
            query.stride(0),
            query.stride(1),
            *k.stride()[:2],
            *v.stride()[:2],
            *own_k.strides[:2],
            *own_v.strides[:2],
            *key.cells.stride()[:3],
            *value.cells.stride()[:3],
            *k_scale.strides,
            *v_scale.strides,
            *output.stride()[:3],
            args.block_table.stride(0),
            key.cells.shape[0],
            ref.num_slots,
            query.shape[0],
            shape.requests.longest,
            tile.splits,
            args.scale,
            args.soft_cap or 1.0,
            args.sliding_window or 0,
            args.ring_size or 0,
            **shape.constants(),
            FRESH=fresh is not None,
            JOIN=bool(fresh),
            WRITE=slots is not None,
            SHARED=lse is not None,
            RING=args.ring_size is not None,
            K_SCALES=k_scale.count,
            V_SCALES=v_scale.count,
            KC_STEP=key.cells.stride(3),
            VC_STEP=value.cells.stride(3),
            K_STEP=k.stride(2),
            V_STEP=v.stride(2),
            BLOCK_R=tile.rows,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            BLOCK_W=min(power(shape.requests.longest), tile.keys),
            COMPUTE=_compute(query, ref),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _tile(
        self, layout: RowLayout, shape: Shape, args: AttentionArgs, compute: tl.dtype
    ) -> PagedTile:
        """How to divide the work, so that programs fill the device."""
        capacity = args.block_table.shape[1] * shape.block_size
        if args.sliding_window is not None:
            capacity = min(capacity, args.sliding_window)
        pairs, half = layout.num_requests * shape.heads, compute is not tl.float32
        return paged_tile(shape, pairs, capacity, self.processors, half=half)

    def merge(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        fresh: tuple[Tensor, ...],
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
            fresh: keys and values as the cache stores them.
            prefix: attention over what came before.
            args: scale, sliding window, soft cap.
            keep: what to write beside the output; not for rows with scales of their own.
            output: where to; may be the prefix's own output. A new tensor where None.
        """
        if output is None:
            output = query.new_empty(*query.shape[:2], ref.planes[1].row_shape[1])
        places = (query, *fresh[:2], prefix.out, prefix.lse, output)
        places += () if keep is None or keep.buffers is None else keep.buffers
        like = self._recurring.likeness(layout, ref, places, args, keep)
        if not self._recurring.again(like, places):
            launch = self._arranged(layout, ref, query, fresh, prefix, args, keep, output)
            self._recurring.remember(like, launch, layout)
        return output

    def _arranged(
        self,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        fresh: tuple[Tensor, ...],
        prefix: Prefix,
        args: AttentionArgs,
        keep: Keep | None,
        output: Tensor,
    ) -> Launch:
        """The launch of a window kernel, down to its last argument."""
        shape = self._shape(layout, ref, query, args)
        key, value = ref.planes[:2]
        if keep is not None:
            _refuse_scales(ref)
        k, v = fresh[:2]
        write = keep is not None and keep.slots is not None
        copies = keep.buffers if keep is not None else None
        k_scale, v_scale = (scales_of(ref, side, self._ones, fresh) for side in (0, 1))
        starts, tree = shape.requests.starts, layout.tree
        kernel, grid, own, warps = self._kernel(shape, layout, query, ref, prefix.out.shape[0])
        arguments = (
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
        )
        constants = {
            **shape.constants(),
            **own,
            "WRITE": write,
            "COPY": copies is not None,
            "K_SCALES": k_scale.count,
            "V_SCALES": v_scale.count,
            "K_STEP": k.stride(2),
            "V_STEP": v.stride(2),
            "EACH": shape.requests.each,
        }
        return Launch(kernel, grid, arguments, constants, warps)

    def _kernel(
        self, shape: Shape, layout: RowLayout, query: Tensor, ref: LayerRef, splits: int
    ) -> tuple[Any, tuple[int, int, int], dict[str, Any], int]:
        """The window kernel for this shape, its grid, constants that it alone has, and warps."""
        form = window_form(shape, query.shape[0], self.processors)
        own: dict[str, Any] = {
            "BLOCK_M": form.queries,
            "BLOCK_N": form.keys,
            "COMPUTE": _compute(query, ref),
            "MORE": splits > 1,
        }
        longest = shape.requests.longest
        if form.rows == 1:
            return short_attention, (query.shape[0], shape.heads, 1), own, form.warps
        own |= {"BLOCK_R": form.rows, "ONCE": longest <= form.keys}
        grid = (layout.num_requests, shape.heads, -(-longest // form.rows))
        return window_attention, grid, own, form.warps

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
