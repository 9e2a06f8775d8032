"""The window kernel, launched: which of its two forms, and what it reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_shapes import Call, Keep, Prefix, refuse_scales, window_form
from .row_scales import scales_of, typed
from .triton_short import short_attention
from .triton_window import window_attention


def launch_window(
    call: Call,
    fresh: tuple[Tensor, ...],
    prefix: Prefix,
    keep: Keep | None,
    output: Tensor,
    unused: Tensor,
    processors: int,
) -> None:
    """Launch the window kernel.

    Args:
        call: what attends.
        fresh: keys and values as the cache stores them.
        prefix: attention over what came before.
        keep: what to write beside the output.
        output: where to.
        unused: what is passed where there are no scales.
        processors: of the device.
    """
    layout, ref, query = call.layout, call.ref, call.query
    args, shape = call.args, call.shape
    key, value = ref.planes[:2]
    if keep is not None:
        refuse_scales(ref)
    k, v = fresh[:2]
    write = keep is not None and keep.slots is not None
    copies = keep.buffers if keep is not None else None
    k_scale, v_scale = (scales_of(ref, side, unused, fresh) for side in (0, 1))
    starts, tree = shape.requests.starts, layout.tree
    kernel, grid, own = _kernel(call, prefix.out.shape[0], processors)
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


def _kernel(
    call: Call, splits: int, processors: int
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    """The window kernel for this shape, its grid, and what it alone is given."""
    shape, num_rows = call.shape, call.query.shape[0]
    form = window_form(shape, num_rows, processors)
    own: dict[str, Any] = {
        "BLOCK_M": form.queries,
        "BLOCK_N": form.keys,
        "COMPUTE": call.compute,
        "MORE": splits > 1,
        "num_warps": form.warps,
    }
    longest = shape.requests.longest
    if form.rows == 1:
        return short_attention, (num_rows, shape.heads), own
    own |= {"BLOCK_R": form.rows, "ONCE": longest <= form.keys}
    grid = (call.layout.num_requests, shape.heads, -(-longest // form.rows))
    return window_attention, grid, own
