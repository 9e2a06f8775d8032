"""Launching a window's attention: the division of the work, and room for partial results."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...executor import AttentionArgs
from ...layers import LayerRef
from ...layout import RowLayout
from .call import AttnCall, power, scales_of, typed
from .paged_kernel import combine, paged_attention
from .tile_sizes import AttnTile, tile_for


class AttentionLauncher:
    """Launches the attention kernels of one device.

    Args:
        device: where the caches are.
    """

    def __init__(self, device: torch.device) -> None:
        self._unread = torch.ones(1, dtype=torch.float32, device=device)
        self._caches: dict[str, tuple[LayerRef, dict[str, Any]]] = {}
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
    ) -> Tensor:
        """Attend to the paged cache and the window's own rows, in one launch, or two.

        Args:
            layout: the window's rows by request.
            ref: the layer.
            query: ``[num_rows, num_q_heads, head_size]``, innermost contiguous.
            fresh: the window's rows as the cache stores them, one tensor per plane; None if they
                are in the cache.
            args: the arguments of ``Window.attend``; ``block_table``, ``seq_lens`` contiguous
                in their last dimension.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.
        """
        call = AttnCall.of(layout, ref, query, fresh, args)
        output = query.new_empty(*query.shape[:2], call.shape.dv)
        tile = self._tile(call)
        if tile.splits == 1:
            self._launch(call, tile, output.unsqueeze(0), None)
            return output
        size = (tile.splits, *output.shape)
        parts = query.new_empty(size, dtype=torch.float32)
        lse = query.new_empty(size[:3], dtype=torch.float32)
        self._launch(call, tile, parts, lse)
        self._combine(parts, lse, output)
        return output

    def _tile(self, call: AttnCall) -> AttnTile:
        """Divide the work so that programs fill the device."""
        args, shape = call.args, call.shape
        capacity = args.block_table.shape[1] * shape.block_size
        if args.sliding_window is not None:
            capacity = min(capacity, args.sliding_window)
        pairs, half = call.layout.num_requests * shape.heads, call.compute is not tl.float32
        return tile_for(shape, pairs, capacity, self._processors, half=half)

    def _launch(self, call: AttnCall, tile: AttnTile, output: Tensor, lse: Tensor | None) -> None:
        """Launch ``paged_attention``.

        ``output`` is ``[splits, num_rows, num_q_heads, value_head_size]``, ``lse`` ``[splits,
        num_rows, num_q_heads]``, or None if there is one slice only.
        """
        layout, query, args = call.layout, call.query, call.args
        starts, tree, longest = call.requests.starts, layout.tree, call.shape.longest
        slices = -(-longest // tile.rows)
        grid = (layout.num_requests, call.shape.heads, tile.splits * slices)
        paged_attention[grid](
            query=query,
            block_table=args.block_table,
            seq_lens=args.seq_lens,
            starts=starts,
            order=starts if tree is None else tree.order,
            visible=starts if tree is None else tree.visible.view(torch.uint8),
            output=output,
            lse=output if lse is None else lse,
            **_fresh_arguments(call, self._unread),
            **self._cached(call.ref),
            q_row=query.stride(0),
            q_head=query.stride(1),
            o_split=output.stride(0),
            o_row=output.stride(1),
            o_head=output.stride(2),
            table_row=args.block_table.stride(0),
            num_rows=query.shape[0],
            longest=longest,
            splits=tile.splits,
            scale=args.scale,
            cap=args.soft_cap or 1.0,
            window=args.sliding_window or 0,
            ring=args.ring_size or 0,
            **call.constants(),
            SHARED=lse is not None,
            BLOCK_R=tile.rows,
            BLOCK_M=tile.queries,
            BLOCK_N=tile.keys,
            BLOCK_W=min(power(longest), tile.keys),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _cached(self, ref: LayerRef) -> dict[str, Any]:
        """Return ``_cache_arguments`` of a layer, computed once per layer."""
        found = self._caches.get(ref.name)
        if found is None or found[0] is not ref:
            found = self._caches[ref.name] = (ref, _cache_arguments(ref, self._unread))
        return found[1]

    def _combine(self, parts: Tensor, lse: Tensor, output: Tensor) -> None:
        """Merge the slices' results into ``output``."""
        (rows, heads, size), splits = output.shape, parts.shape[0]
        combine[(rows, heads)](
            partial_out=parts,
            partial_lse=lse,
            output=output,
            o_row=output.stride(0),
            o_head=output.stride(1),
            num_rows=rows,
            HEADS=heads,
            DV=size,
            BLOCK_DV=power(size),
            SPLITS=splits,
            num_warps=max(1, min(4, splits * power(size) // 2048)),
        )


def _fresh_arguments(call: AttnCall, unread: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments about the window's own keys and values, by name.

    Without fresh rows the query is passed in their place, and ``unread`` in that of scales.
    """
    ref, fresh = call.ref, call.fresh
    key, value = (call.query, call.query) if fresh is None else fresh[:2]
    k_scale, v_scale = (scales_of(ref, side, unread, fresh) for side in (0, 1))
    k_row, k_head, k_step = key.stride()
    v_row, v_head, v_step = value.stride()
    return {
        "k_fresh": key,
        "k_fresh_scale": k_scale.numbers,
        "k_fresh_row": k_row,
        "k_fresh_head": k_head,
        "k_fresh_scale_row": k_scale.strides[0],
        "k_fresh_scale_head": k_scale.strides[1],
        "K_FRESH_STEP": k_step,
        "v_fresh": value,
        "v_fresh_scale": v_scale.numbers,
        "v_fresh_row": v_row,
        "v_fresh_head": v_head,
        "v_fresh_scale_row": v_scale.strides[0],
        "v_fresh_scale_head": v_scale.strides[1],
        "V_FRESH_STEP": v_step,
    }


def _cache_arguments(ref: LayerRef, unread: Tensor) -> dict[str, Any]:
    """Return the kernel's arguments about cached rows, by name; equal in every window."""
    key, value = ref.planes[:2]
    k_scale, v_scale = (scales_of(ref, side, unread) for side in (0, 1))
    k_block, k_slot, k_head, k_step = key.cells.stride()
    v_block, v_slot, v_head, v_step = value.cells.stride()
    return {
        "k_cache": typed(key),
        "k_cache_block": k_block,
        "k_cache_slot": k_slot,
        "k_cache_head": k_head,
        "K_CACHE_STEP": k_step,
        "k_scale": k_scale.numbers,
        "k_scale_block": k_scale.strides[0],
        "k_scale_slot": k_scale.strides[1],
        "k_scale_head": k_scale.strides[2],
        "K_SCALES": k_scale.count,
        "v_cache": typed(value),
        "v_cache_block": v_block,
        "v_cache_slot": v_slot,
        "v_cache_head": v_head,
        "V_CACHE_STEP": v_step,
        "v_scale": v_scale.numbers,
        "v_scale_block": v_scale.strides[0],
        "v_scale_slot": v_scale.strides[1],
        "v_scale_head": v_scale.strides[2],
        "V_SCALES": v_scale.count,
        "num_blocks": key.cells.shape[0],
    }
