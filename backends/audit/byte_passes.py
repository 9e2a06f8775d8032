"""The passes of a scrub as Triton kernels: one lists the slots of a step, one reads their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

import torch
from torch import Tensor

from ...audit.byte_books import ByteBooks
from ...audit.byte_passes import BytePasses
from ...audit.step import Step
from . import byte_lists, byte_work
from .byte_plan import BytePlan
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


class TritonBytePasses(BytePasses):
    """The passes of a scrub over one ledger's books, as launches of Triton kernels.

    Args:
        books: on a GPU.
        groups: int64 ``[num_groups, FIELDS]``, see ``kvtxn.audit.group_lines``.
        key: int64 ``[3]``.
        table: makes tables of a step's tensors, for kernels.

    Attributes:
        splits: programs that share one request's rows of one group.
        programs: programs that share the listed slots, for each layer.
    """

    splits: ClassVar[int] = 8
    programs: ClassVar[int] = 64

    def __init__(self, books: ByteBooks, groups: Tensor, key: Tensor, table: Table) -> None:
        super().__init__(books)
        self._groups: Final = groups
        self._key: Final = key
        self._table: Final = table
        self._plan: Final = BytePlan.of(books)
        device = books.seals.device
        entries = CAPACITY * byte_lists.ENTRY.value
        self._work: Final = torch.zeros(entries, dtype=torch.int64, device=device)
        self._counts: Final = torch.zeros(1, dtype=torch.int64, device=device)
        self._none: Final = torch.zeros(1, dtype=torch.int64, device=device)

    def compare(self, step: Step) -> None:
        """Compare a sample of what a step will read, as ``BytePasses.compare`` describes."""
        books, step = self.books.books, contiguous(step)
        self._counts.zero_()
        grid = (len(step.lines), len(self._groups), self.splits)
        byte_lists.list_reads[grid](
            step.lines, step.starts, step.first, self._table("tables", step.tables, torch.int32),
            self._table("sources", step.sources, torch.int64), self._groups, self._plan.groups,
            books.words, self.books.seals, books.facts, books.counters, self._work, self._counts,
            self.books.compared, step.num_rows, *self._sizes()[:2], self.books.every, CAPACITY,
            SPLITS=self.splits,
        )  # fmt: skip
        self._do()

    def seal(self, step: Step, accepted: Tensor) -> None:
        """Seal what a step leaves and fill what is dead, as ``BytePasses.seal`` describes."""
        books, step = self.books.books, contiguous(step)
        self._counts.zero_()
        byte_lists.list_written[(len(step.lines), len(self._groups))](
            step.lines, step.starts, step.first, self._none if step.drafts is None else step.drafts,
            accepted, self._table("slots", step.slots, torch.int64), self._groups,
            self._plan.groups, books.words, self.books.seals, books.facts, books.counters,
            self._work, self._counts, step.num_rows, *self._sizes()[:2], self.books.every,
            CAPACITY, DRAFTS=step.drafts is not None, TILE=_ROWS,
        )  # fmt: skip
        self._do()

    def _do(self) -> None:
        """Do what the listed entries say."""
        if not self._plan.num_layers:
            return
        books = self.books.books
        byte_work.do_work[(self.programs, self._plan.num_layers)](
            self._plan.layers, self._plan.planes, self._key, self.books.seals, self._work,
            self._counts, books.own, books.facts, books.journal, books.found, books.counters,
            *self._sizes(), CAPACITY, GROUPS=len(self._groups), PROGRAMS=self.programs,
            ENTRIES=_NUMBERS, TILE=_WORDS,
        )  # fmt: skip

    def trace(self, step: Step, outputs: Tensor, rows: Tensor) -> None:
        """Report requests with a NaN, as ``BytePasses.trace`` describes."""
        books, flat = self.books.books, outputs.flatten(1).contiguous()
        if not len(flat):
            return
        step = contiguous(step)
        byte_work.find_nan[(len(flat),)](
            flat, rows.long().contiguous(), step.lines, step.starts, step.first,
            self._table("tables", step.tables, torch.int32), self._groups, books.words,
            self.books.nans, books.own, books.facts, books.journal, books.found, books.counters,
            len(step.lines), step.num_rows, flat.shape[1], *self._sizes(),
            GROUPS=len(self._groups), ENTRIES=_NUMBERS, TILE=_NUMBERS,
        )  # fmt: skip

    def _sizes(self) -> tuple[int, int, int, int]:
        """Return columns of ``own``, lines, journal entries, and violations that can wait."""
        books = self.books.books
        return (*reversed(books.own.shape), len(books.journal), len(books.found))  # type: ignore[return-value]
