"""``StepBuffers``: the numbers of a step in an engine's own buffers, or in copies of them."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class StepBuffers:
    """Buffers on a CPU that have room for every step of an engine.

    Attributes:
        starts: int ``[max_requests + 1]``, each request's first row, and the end.
        positions: int ``[max_rows]``, the position that each row is computed for.
        tokens: int ``[max_rows]``, the token id of each row.
        slots: for each group, int ``[max_rows]``, the slot that each row is written to.
        tables: for each group, int ``[max_requests, blocks]``, the blocks of each request.
        lengths: for each group, int ``[max_requests]``, the rows that each request's attention
            reads; empty for a group of which that is not known.
    """

    starts: Tensor
    positions: Tensor
    tokens: Tensor
    slots: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...] = ()


def copy_step(
    source: StepBuffers, target: StepBuffers, first: Tensor, drafts: Tensor, number: int
) -> bool:
    """Copy a step, as ``Passes.copy_step`` describes."""
    target.starts[: number + 1] = source.starts[: number + 1]
    starts = target.starts[: number + 1]
    total = int(starts[number])
    target.positions[:total] = source.positions[:total]
    target.tokens[:total] = source.tokens[:total]
    first[:number] = target.positions[starts[:number]]
    drafts[:number] = drafts[:number].minimum(starts.diff())
    for theirs, own in zip(source.slots, target.slots, strict=True):
        own[:total] = theirs[:total]
    for theirs, own in zip(source.tables, target.tables, strict=True):
        own[:number] = theirs[:number]
    ends = first[:number] + starts.diff()
    return all(torch.equal(each[:number].long(), ends) for each in source.lengths if len(each))
