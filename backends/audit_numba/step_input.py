"""``NumbaStepInput``: an engine's numbers, copied, examined and counted by compiled code."""

from __future__ import annotations

from operator import is_
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from ...audit.books import Books
from ...audit.step import Step
from ...audit.step_input import StepBuffers, StepInput
from .engine_input import OUTSIDE_BUFFERS, copy_step, count_tokens, reaches
from .requests import well_formed
from .step_arrays import NONE, StepReader, ints

#: Arrays of tensors that are remembered; beyond, all are forgotten.
_MAX_REMEMBERED: Final = 2048


class NumbaStepInput(StepInput):
    """An engine's numbers, by compiled functions; they are compiled when this is made.

    Args:
        books: the ledger's.
        reader: finds the arrays of steps.
    """

    def __init__(self, books: Books, reader: StepReader) -> None:
        super().__init__(books)
        self._reader: Final = reader
        self._own: Final = books.own.numpy()
        self._facts: Final = books.facts.numpy()
        self._seen: Final = numpy.zeros(books.facts.shape[1], numpy.bool_)
        self._copied: tuple[object, ...] = (None,) * 4
        self._copies: tuple[Any, ...] = ()
        self._arrays: dict[int, tuple[Tensor, Any]] = {}
        self._compile()

    def _compile(self) -> None:
        """Compile every function, by calling it for a step without requests."""
        none, starts = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        step = Step(none, starts, None, none, {}, told=none, positions=none)
        self.takes(step, none)
        self.reaches(step, none)
        no_ids = torch.zeros(0, 1, dtype=torch.int32)
        self.count(no_ids, torch.zeros(0, dtype=torch.bool), 0, none, no_ids.long())

    def takes(
        self,
        step: Step,
        accepted: Tensor | None = None,
        besides: int = 0,
        *,
        released: bool = False,
    ) -> bool:
        """Tell whether a step is well-formed, and ``accepted`` possible; see ``StepInput.takes``.

        Unless ``released``, ``Books.first`` is filled where the step has no ``first``.
        """
        read = self._reader.read(step) if released else self._reader.filled(step)
        right: bool = well_formed(
            read.requests, ints(accepted), besides, self._facts, self._own.shape[1],
            read.num_rows, released, self._seen,
        )  # fmt: skip
        return right

    def copy_step(
        self,
        source: StepBuffers,
        target: StepBuffers,
        first: Tensor,
        drafts: Tensor,
        number: int,
    ) -> bool:
        """Copy a step out of an engine's buffers; tell whether its known lengths are right.

        Arguments and errors are those of ``StepInput.copy_step``. Buffers that come again are not
        examined again; groups with arrays of several kinds are left to torch.
        """
        given = source, target, first, drafts
        if not all(map(is_, given, self._copied)):
            self._copied = given
            self._copies = _copies_of(*given)
        if not self._copies:
            return super().copy_step(source, target, first, drafts, number)
        right: int = copy_step(*self._copies, number)
        if right == OUTSIDE_BUFFERS:
            return super().copy_step(source, target, first, drafts, number)  # says what is wrong
        return bool(right)

    def reaches(self, step: Step, ends: Tensor) -> bool:
        """Tell whether a request's rows before its drafts reach its line's position in ``ends``."""
        read = self._reader.read(step)
        found: bool = reaches(read.requests, self._array_of(ends))
        return found

    def count(
        self,
        ids: Tensor,
        left_out: Tensor,
        end: int,
        counts: Tensor,
        kept: Tensor,
        drafts: Tensor | None = None,
    ) -> None:
        """Count the sampled tokens of each request into ``counts``; ``kept`` gets them.

        And -1 for an id that is no token. Arguments are those of ``StepInput.count``.
        """
        most = NONE if drafts is None else self._array_of(drafts)
        found = self._array_of(counts), self._array_of(kept)
        count_tokens(ids.numpy(), self._array_of(left_out), most, end, *found)

    def _array_of(self, tensor: Tensor) -> Any:
        """Return the array of a tensor that comes again and again.

        Both are kept for the next call.
        """
        known = self._arrays.get(id(tensor))
        if known is None:
            if len(self._arrays) >= _MAX_REMEMBERED:
                self._arrays.clear()
            known = self._arrays[id(tensor)] = tensor, tensor.numpy()  # its id stays its own
        return known[1]


def _copies_of(
    source: StepBuffers, target: StepBuffers, first: Tensor, drafts: Tensor
) -> tuple[Any, ...]:
    """Return the arrays that ``engine_input.copy_step`` gets; they share the tensors' memory.

    Empty without groups, and if the groups' arrays differ in dtype or layout: nothing is compiled
    for that.
    """

    def arrays(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Return the arrays of some tensors."""
        return tuple(each.numpy() for each in tensors)

    several = [arrays(many) for many in (source.slots, source.tables, source.lengths)]
    mine = [arrays(many) for many in (target.slots, target.tables)]
    kinds = [{(each.dtype, each.flags.c_contiguous) for each in many} for many in several]
    if any(len(kind) != 1 for kind in kinds):
        return ()
    theirs = arrays((source.starts, source.positions, source.tokens))
    own = arrays((target.starts, target.positions, target.tokens))
    return *theirs, *several, *own, *mine, *arrays((first, drafts))
