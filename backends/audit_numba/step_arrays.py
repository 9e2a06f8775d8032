"""The tensors of a step as numpy arrays, for compiled functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from weakref import WeakKeyDictionary

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...audit.books import Books
from ...audit.rows import first_of
from ...audit.step import Step
from .requests import fill_first

#: Arrays of int64.
Ints = NDArray[numpy.int64]

#: For what is not there.
NONE: Final[Ints] = numpy.zeros(0, numpy.int64)
_NO_TABLE: Final = numpy.zeros((0, 0), numpy.int32)


@attrs.frozen(eq=False)
class StepArrays:
    """The arrays of a step; they share its memory where a tensor has the right dtype.

    Attributes:
        lines: int64 ``[num_requests]``.
        starts: int64 ``[num_requests + 1]``.
        first: int64 ``[num_requests]`` or longer; of a step without ``Step.first`` that of the
            books.
        tokens: int64 ``[num_rows]``.
        drafts: int64 ``[num_requests]``; empty without drafts.
        slots: by number of the group, int64 ``[num_rows]``; empty if nothing is written there.
        tables: by number of the group, int32 ``[num_requests, blocks]``; without lines if the group
            is not read.
        table_lines: int64 ``[num_requests]``, each request's line of the tables; empty if these
            have the requests in their order.
        block_maps: by number of the group, int64 ``[n]``, the block that each number in its table
            stands for; empty: itself.
        sources: by number of the group, int64 ``[num_requests]``; empty if none is continued.
        told: int64 ``[num_requests]``; empty if the engine never says.
        positions: int64 ``[num_rows]``; empty if the engine does not say.
        parents: int64 ``[num_rows]``; empty if drafts are no trees.
        num_rows: rows for which the tensors have room.
        shared: all arrays are the tensors themselves, and none is a copy.
    """

    lines: Ints
    starts: Ints
    first: Ints
    tokens: Ints
    drafts: Ints
    slots: tuple[Ints, ...]
    tables: tuple[NDArray[numpy.int32], ...]
    table_lines: Ints
    block_maps: tuple[Ints, ...]
    sources: tuple[Ints, ...]
    told: Ints
    positions: Ints
    parents: Ints
    num_rows: int
    shared: bool

    @property
    def requests(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The lines, starts, first positions and drafts."""
        return self.lines, self.starts, self.first, self.drafts


def ints(tensor: Tensor | None) -> Ints:
    """Return a tensor as int64, contiguous; an empty array for None.

    The array shares the tensor's memory if that is int64 and contiguous.
    """
    if tensor is None:
        return NONE
    found: Ints = tensor.to(torch.int64).contiguous().numpy()  # the tensor itself, as a rule
    return found


def table(tensor: Tensor) -> NDArray[numpy.int32]:
    """Return a block table as int32, contiguous; it shares the tensor's memory if that is so.

    Numbers that int32 has no room for are no blocks; they become -1.
    """
    if tensor.dtype is torch.int64:
        tensor = torch.where(tensor == tensor.to(torch.int32), tensor, -1)
    found: NDArray[numpy.int32] = tensor.to(torch.int32).contiguous().numpy()
    return found


class StepReader:
    """Makes and remembers the arrays of steps.

    An engine that gives the same ``Step`` again gives the same tensors, with other values. Their
    arrays are found again, if they share the tensors' memory.

    Args:
        books: the ledger's books.
    """

    def __init__(self, books: Books) -> None:
        self._books: Final = books
        self._groups: Final = tuple(books.layout.places)
        self._known: WeakKeyDictionary[Step, StepArrays] = WeakKeyDictionary()

    def read(self, step: Step) -> StepArrays:
        """Return the arrays of a step.

        The same ones again if they all share the tensors' memory.
        """
        found = self._known.get(step)
        if found is None:
            found = self._arrays(step)
            if found.shared:
                self._known[step] = found
        return found

    def filled(self, step: Step) -> StepArrays:
        """Return the arrays of a step; without ``Step.first`` fill ``Books.first`` before."""
        read = self.read(step)
        if step.first is None:
            fill_first(read.starts, read.positions, read.first[: len(read.lines)], read.num_rows)
        return read

    def tables(self, tables: Mapping[str, Tensor]) -> tuple[NDArray[numpy.int32], ...]:
        """Return the block tables of all groups, by their numbers.

        Without lines where there is none.
        """
        return tuple(table(tables[name]) if name in tables else _NO_TABLE for name in self._groups)

    def by_group(self, tensors: Mapping[str, Tensor]) -> tuple[Ints, ...]:
        """Return the arrays of all groups, by their numbers; empty where there is no tensor."""
        return tuple(ints(tensors.get(name)) for name in self._groups)

    def _arrays(self, step: Step) -> StepArrays:
        """Make the arrays of a step, by the ``StepArrays`` that they are returned in."""
        return StepArrays(
            lines=ints(step.lines),
            starts=ints(step.starts),
            first=ints(first_of(self._books, step)),
            tokens=ints(step.tokens),
            drafts=ints(step.drafts),
            slots=self.by_group(step.slots),
            tables=self.tables(step.tables),
            table_lines=ints(step.table_lines),
            block_maps=self.by_group(step.block_maps),
            sources=self.by_group(step.sources),
            told=ints(step.told),
            positions=ints(step.positions),
            parents=ints(step.parents),
            num_rows=step.num_rows,
            shared=_share_memory(step),
        )


def _share_memory(step: Step) -> bool:
    """Tell whether the arrays of a step are its tensors themselves, and none is a copy.

    They are if all are contiguous, tables of int32 and all others of int64.
    """
    maybe = (step.first, step.drafts, step.told, step.positions, step.table_lines, step.parents)
    several = (*step.slots.values(), *step.sources.values(), *step.block_maps.values())
    numbers = (step.lines, step.starts, step.tokens, *several)
    numbers += tuple(tensor for tensor in maybe if tensor is not None)
    return all(
        tensor.dtype is dtype and tensor.is_contiguous()
        for dtype, tensors in ((torch.int64, numbers), (torch.int32, step.tables.values()))
        for tensor in tensors
    )
