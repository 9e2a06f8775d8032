"""Attention of a window, launched: which blocks, how many splits, where partial results go."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ..executor import AttentionArgs
from ..layers import LayerRef
from ..layout import RowLayout
from .attention_shapes import (
    Call,
    Keep,
    PagedTile,
    Prefix,
    call_of,
    paged_tile,
    power,
    refuse_scales,
)
from .row_scales import scales_of, typed
from .triton_paged import combine, paged_attention
from .window_launch import launch_window


class AttentionLauncher:
    """Launches the attention kernels for one device.

    Args:
        device: where the caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._ones = torch.ones(1, dtype=torch.float32, device=device)
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

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
        call = call_of(layout, ref, query, args)
        if output is None:
            output = query.new_empty(*query.shape[:2], call.shape.dv)
        if slots is not None:
            refuse_scales(ref)
        tile = self._tile(call)
        if tile.splits == 1:
            self._paged(call, tile, fresh, slots, output.unsqueeze(0), None)
            return output
        parts = _parts(call, tile)
        self._paged(call, tile, fresh, slots, *parts)
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
        call = call_of(layout, ref, query, args)
        tile = self._tile(call)
        parts = _parts(call, tile)
        self._paged(call, tile, (), None, *parts)
        return Prefix(*parts)

    def _paged(
        self,
        call: Call,
        tile: PagedTile,
        fresh: tuple[Tensor, ...] | None,
        slots: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """One launch over the cached rows and, joined to them, the window's own.

        Args:
            call: what attends.
            tile: how the work is divided.
            fresh: the window's rows; none where they are to be left out, None where the cache
                has them.
            slots: where settled rows go; None writes none.
            output: ``[splits, num_rows, num_q_heads, value_head_size]``.
            lse: ``[splits, num_rows, num_q_heads]``; None where the output is not to be merged.
        """
        layout, ref, query = call.layout, call.ref, call.query
        args, shape = call.args, call.shape
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
            COMPUTE=call.compute,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _tile(self, call: Call) -> PagedTile:
        """How to divide the work, so that programs fill the device."""
        args, shape = call.args, call.shape
        capacity = args.block_table.shape[1] * shape.block_size
        if args.sliding_window is not None:
            capacity = min(capacity, args.sliding_window)
        pairs, half = call.layout.num_requests * shape.heads, call.compute is not tl.float32
        return paged_tile(shape, pairs, capacity, self._processors, half=half)

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
        call = call_of(layout, ref, query, args)
        launch_window(call, fresh, prefix, keep, output, self._ones, self._processors)
        return output


def _parts(call: Call, tile: PagedTile) -> tuple[Tensor, Tensor]:
    """Room for the output and log-sum-exp of every slice."""
    size = (tile.splits, *call.query.shape[:2])
    out = call.query.new_empty(*size, call.shape.dv, dtype=torch.float32)
    return out, call.query.new_empty(size, dtype=torch.float32)
