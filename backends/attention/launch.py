"""Launching a window's attention: the division of the work, and room for partial results."""

from __future__ import annotations

from typing import Any, Final

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...executor import AttentionArgs
from ...layers import LayerRef
from ...layout import RowLayout
from .call import AttnCall, AttnShape, power, scales_of, typed
from .paged_kernel import combine, paged_attention

#: Fewest cached rows that one program reads.
_MIN_SPLIT: Final = 64

#: Cached rows that a program reads in one step: few, so that a processor has room for four
#: programs, each with the rows of its next steps on their way from memory.
_CACHED_KEYS: Final = 32

#: Programs per processor that are worth having; beyond, each program takes more.
_WAVES: Final = 4


@attrs.frozen
class AttnTile:
    """The division of a launch's work.

    Attributes:
        rows: rows of a request per program.
        queries: query heads of these rows that the tile has room for.
        keys: cached rows that are read in one step.
        warps: warps per program.
        stages: steps whose rows are on their way from memory at once.
        splits: slices of a request's cached rows, a power of two.
    """

    rows: int
    queries: int
    keys: int
    warps: int
    stages: int
    splits: int


def tile_for(
    shape: AttnShape, pairs: int, capacity: int, processors: int, *, half: bool
) -> AttnTile:
    """Choose the tile for a shape; measured on an H200.

    A tile holds a whole request if it is short, and fits in registers. Tensor cores take 16 queries
    at a time, so each warp has 16 of its own. Cached rows are cut into at most 64 slices, as many
    as keep the processors busy.

    Args:
        shape: the layer and its requests.
        pairs: requests x KV heads.
        capacity: most cached rows that a row may see.
        processors: number of the device's processors.
        half: numbers are multiplied in 16 bits.
    """
    rows = min(shape.longest, max(1, 64 // shape.group))
    queries = power(rows * shape.group)
    narrow = max(power(shape.d), power(shape.dv)) <= 128
    programs = pairs * -(-shape.longest // rows)
    most, wanted = capacity // _MIN_SPLIT, _WAVES * processors // max(1, programs)
    splits = _floor_power(min(most, wanted, 64))
    few = programs * splits <= 2 * processors
    if few and half and narrow:
        # The length of a step counts: it is shortest on blocks of 64 queries, with four warps.
        return AttnTile(rows, max(64, queries), _CACHED_KEYS, 4, 4, splits)
    warps = min(8, queries // 16 * (1 if narrow else 2) * (2 if few else 1))
    return AttnTile(rows, queries, _CACHED_KEYS, warps, 3, splits)


def _floor_power(value: int) -> int:
    """Return the greatest power of two that is at most ``value``, and at least 1."""
    return 1 << (max(1, value).bit_length() - 1)


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
        """Return the tile of a call.

        The number of slices follows from the most rows that a row may see.
        """
        args, shape = call.args, call.shape
        capacity = args.block_table.shape[1] * shape.block_size
        if args.sliding_window is not None:
            capacity = min(capacity, args.sliding_window)
        pairs, half = call.layout.num_requests * shape.heads, call.compute is not tl.float32
        return tile_for(shape, pairs, capacity, self._processors, half=half)

    def _launch(self, call: AttnCall, tile: AttnTile, output: Tensor, lse: Tensor | None) -> None:
        """Launch ``paged_attention``, which writes ``output``, and ``lse`` if there is one.

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
        """Return ``_cache_arguments`` of a layer; computed again if another layer has its name."""
        found = self._caches.get(ref.name)
        if found is None or found[0] is not ref:
            found = self._caches[ref.name] = (ref, _cache_arguments(ref, self._unread))
        return found[1]

    def _combine(self, parts: Tensor, lse: Tensor, output: Tensor) -> None:
        """Merge the slices' results into ``output``, by their log-sum-exp."""
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
    """Return the kernel's arguments about cached rows, by name; equal in every window.

    ``unread`` is passed in the place of scales where a side has none.
    """
    found: dict[str, Any] = {"num_blocks": ref.planes[0].cells.shape[0]}
    for side, name in enumerate("kv"):
        plane, scale = ref.planes[side], scales_of(ref, side, unread)
        block, slot, head, step = plane.cells.stride()
        found |= {
            f"{name}_cache": typed(plane),
            f"{name}_cache_block": block,
            f"{name}_cache_slot": slot,
            f"{name}_cache_head": head,
            f"{name.upper()}_CACHE_STEP": step,
            f"{name}_scale": scale.numbers,
            f"{name}_scale_block": scale.strides[0],
            f"{name}_scale_slot": scale.strides[1],
            f"{name}_scale_head": scale.strides[2],
            f"{name.upper()}_SCALES": scale.count,
        }
    return found
