"""Routing of mixtures of experts in torch, where vLLM's package came without its operators.

Qwen3-Next is a mixture in at least one layer. A package that was cut to be smaller may lack
``_moe_C``; the experts' own kernels are Triton's, so the choice of experts, the order of their rows
and the sum are all that is missing. Nothing waits for the device, so graphs may capture it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def topk_softmax(
    weights: Tensor,
    chosen: Tensor,
    sources: Tensor,
    gates: Tensor,
    renormalize: bool = False,
    bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> None:
    """Choose the experts of each row.

    Args:
        weights: float32 ``[rows, top]``, written.
        chosen: int ``[rows, top]``, written.
        sources: int32 ``[rows, top]``, written: ``place * rows + row``, as vLLM's does.
        gates: ``[rows, experts]``.
        renormalize: let the weights of a row add up to 1.
        bias: is added for the choice alone; None is none.
        is_padding: rows that count as any others here.
    """
    shares = gates.float().softmax(-1)
    ranked = shares if bias is None else shares + bias
    places = ranked.topk(weights.shape[1], dim=-1).indices
    found = shares.gather(-1, places)
    if renormalize:
        found = found / found.sum(-1, keepdim=True)
    weights.copy_(found)
    chosen.copy_(places)
    rows, top = weights.shape
    order = torch.arange(top, device=gates.device)[None] * rows
    sources.copy_(order + torch.arange(rows, device=gates.device)[:, None])


def moe_align_block_size(
    chosen: Tensor,
    experts: int,
    block: int,
    rows_of: Tensor,
    expert_of: Tensor,
    total: Tensor,
    expert_map: Tensor | None = None,
    scatter_idx: Tensor | None = None,
) -> None:
    """Order the chosen rows by expert, each expert's padded to whole blocks.

    Args:
        chosen: int ``[rows, top]``.
        experts: their number.
        block: rows of a block.
        rows_of: int32, written: the flat places in ``chosen``, by expert; ``rows * top`` pads.
        expert_of: int32 ``[blocks]``, written: the expert of each block.
        total: int32 ``[1]``, written: the padded number of rows.
        expert_map: of parallel experts, which are not known here.
        scatter_idx: not known here.
    """
    assert expert_map is None
    assert scatter_idx is None
    flat = chosen.flatten().long()
    count = (flat[:, None] == torch.arange(experts, device=flat.device)).sum(0)
    padded = (count + block - 1) // block * block
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    mine = flat[order]
    place = torch.arange(flat.shape[0], device=flat.device) - (count.cumsum(0) - count)[mine]
    rows_of.fill_(flat.shape[0])
    rows_of.scatter_(0, (ends - padded)[mine] + place, order.to(rows_of.dtype))
    first = torch.arange(expert_of.shape[0], device=flat.device) * block
    expert_of.copy_(torch.searchsorted(ends, first, right=True).clamp(max=experts - 1))
    total.copy_(ends[-1:])


def moe_sum(
    parts: Tensor, out: Tensor, chosen: Tensor | None = None, expert_map: Tensor | None = None
) -> None:
    """Add up the parts of each row.

    Args:
        parts: ``[rows, top, size]``.
        out: ``[rows, size]``, written.
        chosen: the experts of the parts, all of which are here.
        expert_map: of parallel experts, which are not known here.
    """
    assert expert_map is None
    out.copy_(parts.float().sum(1))


def stand_in() -> bool:
    """Take the place of vLLM's operators if they are missing; tells whether they are."""
    from vllm import _custom_ops as own

    operators: Any = getattr(torch.ops, "_moe_C", None)
    if operators is not None and hasattr(operators, "topk_softmax"):
        return False
    for function in (topk_softmax, moe_align_block_size, moe_sum):
        setattr(own, function.__name__, function)
    return True
