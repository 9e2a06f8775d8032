"""``StepBuffers``: the numbers of a step in an engine's own buffers, or in copies of them."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError

_HINT: Final = "give the buffers that the engine fills for its forward; nothing was copied"


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
    _check(source, target, first, drafts, number)
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


def _check(
    source: StepBuffers, target: StepBuffers, first: Tensor, drafts: Tensor, number: int
) -> None:
    """Refuse a step that does not lie inside all of its buffers."""
    several = [*source.tables, *target.tables, *(each for each in source.lengths if len(each))]
    room = min(
        *(len(source.starts) - 1, len(target.starts) - 1),
        *(len(each) for each in (first, drafts, *several)),
    )
    if number > room:
        raise ConfigError(
            "copy_step", "a buffer has fewer requests than the step",
            expected=f"at most {room}", got=number, hint=_HINT,
        )  # fmt: skip
    ours = [tuple(each.shape[1:]) for each in target.tables]
    theirs = [tuple(each.shape[1:]) for each in source.tables]
    if ours != theirs:
        raise ConfigError(
            "copy_step", "a table has another width than the ledger's own",
            expected=ours, got=theirs, hint=_HINT,
        )  # fmt: skip
    rows = min(
        len(each)
        for buffers in (source, target)
        for each in (buffers.positions, buffers.tokens, *buffers.slots)
    )
    starts = source.starts[: number + 1].tolist()
    inside = starts[0] >= 0 and starts == sorted(starts) and starts[-1] <= rows
    if not inside or any(start >= rows for start in starts[:-1]):  # a first row has a position
        raise ConfigError(
            "copy_step", "the first rows of the requests are not those of a step",
            expected=f"ascending numbers of rows, from 0 to {rows}", got=starts, hint=_HINT,
        )  # fmt: skip
