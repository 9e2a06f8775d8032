"""The passes of a scrub as Triton kernels: one lists the slots of a step, one reads their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from ...audit.byte_books import ByteBooks
from ...audit.byte_passes import BytePasses
from ...audit.rows import first_of
from ...audit.step import Step
from . import byte_lists, byte_work
from .byte_plan import BytePlan
from .launches import Launches
from .plan import contiguous

#: The most slots that one pass compares, or seals and fills; further ones are left out.
CAPACITY: Final = 1 << 16
#: Rows that a program lists at a time.
_ROWS: Final = 128
#: Words of a row at a time.
_WORDS: Final = 128
#: Numbers of an output at a time, and journal entries, where something was found.
_NUMBERS: Final = 1024

#: Returns the table of a step's tensors: what they are, the tensors by group, their dtype.
Table = Callable[..., Tensor]
#: Tells whether the last table of a sort has the addresses of these tensors themselves.
Recurs = Callable[[str, Mapping[str, Tensor]], bool]


class TritonBytePasses(BytePasses):
    """The passes of a scrub over one ledger's books, as launches of Triton kernels.

    Args:
        books: on a GPU.
        groups: int64 ``[num_groups, FIELDS]``, see ``kvtxn.audit.group_lines``.
        key: int64 ``[3]``.
        table: makes tables of a step's tensors, for kernels.
        recurs: tells whether the table made last has the addresses of the tensors themselves.

    Attributes:
        splits: programs that share one request's rows of one group.
        programs: programs that share the listed slots, for each layer.
    """

    splits: ClassVar[int] = 8
    programs: ClassVar[int] = 64

    def __init__(
        self, books: ByteBooks, groups: Tensor, key: Tensor, table: Table, recurs: Recurs
    ) -> None:
        super().__init__(books)
        self._recurs: Final = recurs
        self._groups: Final = groups
        self._key: Final = key
        own = books.books
        lines, columns = own.own.shape
        #: As in ``TritonPasses``: what kernels have to know of the books.
        self._sizes: Final = (columns, lines, len(own.journal), len(own.found))
        self._table: Final = table
        self._plan: Final = BytePlan.of(books)
        device = books.seals.device
        entries = CAPACITY * byte_lists.ENTRY.value
        self._work: Final = torch.zeros(entries, dtype=torch.int64, device=device)
        self._counts: Final = torch.zeros(2, dtype=torch.int64, device=device)
        self._none: Final = torch.zeros(1, dtype=torch.int64, device=device)
        self._listing_reads: Final = Launches(byte_lists.list_reads, 2, device)
        self._listing_written: Final = Launches(byte_lists.list_written, 2, device)
        self._doing: Final = Launches(byte_work.do_work, 4, device)
        self._finding: Final = Launches(byte_work.find_nan, 3, device)
        self._any_step: Final = Step(self._none, self._none, self._none, self._none, {})

    def compare(self, step: Step) -> None:
        """Of the sealed slots that a step will read, compare the bytes of those whose turn it is.

        Slots that changed are reported, and are not sealed any more; at most ``CAPACITY`` are
        compared. See ``BytePasses.compare``.
        """
        if not self._listing_reads.again(step):
            self._list_reads(step)
        self._do()

    def _list_reads(self, step: Step) -> None:
        """Launch ``list_reads`` for a step given for the first time.

        Remember the launch if it can recur.
        """
        step = contiguous(step)
        books = self.books.books
        tables = self._table("tables", step.tables, torch.int32, step)
        sources = self._table("sources", step.sources, torch.int64)
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_none(step.positions), tables,
            sources, self._groups, self._plan.groups, books.words, self.books.seals, books.facts,
            books.counters, self._work, self._counts, self.books.compared, step.num_rows,
            *self._sizes[:2], self.books.every, CAPACITY, step.first is None, self.splits,
        )  # fmt: skip
        recurs = self._recurs("tables", step.tables) and self._recurs("sources", step.sources)
        grid = (len(step.lines), len(self._groups), self.splits)
        self._listing_reads.first(step, grid, arguments, recurs=recurs)

    def seal(self, step: Step, accepted: Tensor, besides: int = 0) -> None:
        """Take the checksums of the slots that a step leaves, and fill what is dead with NaN.

        At most ``CAPACITY`` slots are sealed and filled. See ``BytePasses.seal``.
        """
        if not self._listing_written.again(step, (accepted,), besides):
            self._list_written(step, accepted, besides)
        self._do()

    def _list_written(self, step: Step, accepted: Tensor, besides: int) -> None:
        """Launch ``list_written`` for a step given for the first time.

        Remember the launch if it can recur.
        """
        step = contiguous(step)
        books = self.books.books
        arguments = (
            step.lines, step.starts, first_of(books, step), self._or_none(step.drafts), accepted,
            self._table("slots", step.slots, torch.int64), self._groups, self._plan.groups,
            books.words, self.books.seals, books.facts, books.counters, self._work, self._counts,
            step.num_rows, *self._sizes[:2], self.books.every, CAPACITY, besides,
            step.drafts is not None, _ROWS,
        )  # fmt: skip
        recurs, grid = self._recurs("slots", step.slots), (len(step.lines), len(self._groups), 1)
        self._listing_written.first(
            step, grid, arguments, (accepted,), besides, at=4, recurs=recurs
        )

    def _do(self) -> None:
        """Compare, seal or fill the slots that were listed, in every layer, and clear the list.

        Nothing is launched without layers.
        """
        if not self._plan.num_layers or self._doing.again(self._any_step):
            return
        books = self.books.books
        arguments = (
            self._plan.layers, self._plan.planes, self._key, self.books.seals, self._work,
            self._counts, books.own, books.facts, books.journal, books.found, books.counters,
            *self._sizes, CAPACITY, len(self._groups), self.programs, _NUMBERS, _WORDS,
        )  # fmt: skip
        grid = (self.programs, self._plan.num_layers, 1)
        self._doing.first(self._any_step, grid, arguments, recurs=True)

    def _or_none(self, tensor: Tensor | None) -> Tensor:
        """Return the tensor, or one int64 element that a kernel does not read in place of None."""
        return self._none if tensor is None else tensor

    def trace(self, step: Step, outputs: Tensor, rows: Tensor) -> None:
        """Report each request that has a NaN in one of its ``outputs``, once.

        Without outputs nothing is launched. See ``BytePasses.trace``.
        """
        books, flat = self.books.books, outputs.flatten(1).contiguous()
        if not len(flat):
            return
        step = contiguous(step)
        arguments = (
            flat, rows.long().contiguous(), step.lines, step.starts, first_of(books, step),
            self._table("tables", step.tables, torch.int32, step), self._groups,
            self._plan.groups, books.words, self.books.nans, books.own, books.facts, books.journal,
            books.found, books.counters, len(step.lines), step.num_rows, flat.shape[1],
            *self._sizes, len(self._groups), _NUMBERS, _NUMBERS,
        )  # fmt: skip
        self._finding.launch((len(flat), 1, 1), arguments)
