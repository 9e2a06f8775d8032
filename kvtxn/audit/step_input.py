"""``StepInput``: an engine's numbers, brought into the form in which a ledger takes a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import to_device
from .books import Books
from .rows import first_of
from .step import Step

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


class StepInput:
    """The work on an engine's numbers before and after the ledger gets them.

    Args:
        books: the ledger's.
    """

    def __init__(self, books: Books) -> None:
        self._books: Final = books

    def put(self, target: Tensor, numbers: Sequence[int] | Tensor) -> None:
        """Copy numbers of the host into a tensor on the device, without waiting for it.

        Args:
            target: int ``[n]``, contiguous.
            numbers: as many.
        """
        target.copy_(to_device(numbers, target.device, target.dtype))

    def copy_step(
        self,
        source: StepBuffers,
        target: StepBuffers,
        first: Tensor,
        drafts: Tensor,
        number: int,
    ) -> bool:
        """Copy a step out of an engine's buffers, which it may write into again; for CPUs.

        Args:
            source: the engine's.
            target: the ledger's own, with tables as wide as the engine's.
            first: int64 ``[max_requests]``, filled with the position of each request's first row.
            drafts: int64 ``[max_requests]``, drafts of each request; cut to the rows that it has.
            number: of requests.

        Returns:
            True if all known ``source.lengths`` are the positions after the requests' last rows.

        Raises:
            ConfigError: the step does not lie inside all of the buffers; nothing was copied.
        """
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

    def takes(
        self,
        step: Step,
        accepted: Tensor | None = None,
        besides: int = 0,
        *,
        released: bool = False,
    ) -> bool:
        """Tell quickly that a step of the right shapes is well-formed; for CPUs. Here: never.

        A subclass may tell. It fills ``Books.first`` as in ``Passes.write``, unless the result is
        False or ``released`` is set.

        Args:
            step: the step.
            accepted: int ``[num_requests]``; these counts of accepted drafts are possible, too.
            besides: tokens that ``accepted`` counts beside drafts.
            released: as for ``Batch.of``.

        Returns:
            False if it is not, or if this implementation cannot tell quickly; it has to be examined
            then, as ``checks`` does.
        """
        return False

    def reaches(self, step: Step, ends: Tensor) -> bool:
        """Tell whether any request's rows before its drafts end at its position or after; for CPUs.

        Args:
            step: the step that was written last; its requests are admitted ones.
            ends: int64 ``[num_lines]``, the position by line.
        """
        settled = first_of(self._books, step) + step.starts.diff()
        settled = settled if step.drafts is None else settled - step.drafts
        return bool((settled >= ends[step.lines]).any())

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Count the tokens that were sampled for each request, and put the others out.

        Args:
            ids: int ``[num_requests, n]``; an id below 0 or from ``end`` on is no token.
            left_out: bool or int ``[num_requests]`` at least: requests for which nothing counts.
            end: the size of the vocabulary.
            counts: int64 ``[num_requests]``, filled with the number of tokens.
            kept: int64 ``[num_requests, n]``, filled with ``ids``, and -1 for what is no token.
            drafts: int64 ``[num_requests]``; no request counts more tokens than these and one.
        """
        real = (ids >= 0) & (ids < end) & ~left_out[: len(ids)].bool()[:, None]
        number = real.sum(1)
        counts.copy_(number if drafts is None else number.minimum(drafts + 1))
        kept.copy_(torch.where(real, ids, -1))


def _check(
    source: StepBuffers, target: StepBuffers, first: Tensor, drafts: Tensor, number: int
) -> None:
    """Refuse, with a ConfigError, a step that does not lie inside all of its buffers.

    Tables of another width than the ledger's own are refused, too.
    """
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
