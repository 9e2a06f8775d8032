"""``LedgerState``: what the parts of a ledger share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import attrs
import torch
from torch import Tensor

from ..host_values import to_device
from . import books as book
from .books import Books
from .byte_books import ByteBooks
from .digest import UNWRITTEN
from .passes import Passes
from .request_table import RequestTable
from .rows import Batch, ragged, word_at
from .step import Step
from .step_input import StepInput
from .violation import NOBODY

#: Numbers that the scheduler has.
Ints = Sequence[int] | Tensor

#: Requests are as they are.
_AS_THEY_ARE: Final = nullcontext()


@attrs.define(eq=False)
class LedgerState:
    """The books of a ledger, the code that works on them, and the step under way.

    Attributes:
        books: the books.
        passes: the device code.
        input: prepares an engine's numbers.
        requests: the admitted requests.
        bytes: the books of a scrub; None without one.
        step: the last step, until it is resolved.
        unread: that step was not given to ``check`` yet.
        later: lines of requests that have begun since it was written.
        epoch: the age of a row that is as old as the ledger; see ``epochs``.
    """

    books: Final[Books]
    passes: Final[Passes]
    input: Final[StepInput]
    requests: Final[RequestTable]
    bytes: ByteBooks | None = None
    step: Step | None = None
    unread: bool = False
    later: list[int] = attrs.field(factory=list)
    epoch: int = 0

    @property
    def device(self) -> torch.device:
        """The device of the books."""
        return self.books.words.device

    @property
    def seals(self) -> Tensor | None:
        """The checksums that a scrub has sealed, int64 ``[num_words]``; None without a scrub."""
        return None if self.bytes is None else self.bytes.seals

    def begin(self, step: Step) -> None:
        """Note the step under way: it was not checked yet, and has no later requests."""
        self.step, self.unread = step, True
        self.later.clear()

    def end(self) -> None:
        """Note that no step is under way."""
        self.step, self.unread = None, False
        self.later.clear()

    def as_written(self) -> AbstractContextManager[None]:
        """Hide, during a ``with`` block, the requests that came since the open step was written.

        They may have lines of requests of the step that were released since.
        """
        return self._hide_later() if self.later else _AS_THEY_ARE

    @contextmanager
    def _hide_later(self) -> Iterator[None]:
        """Take the serial numbers of the lines in ``later`` away, and put them back at the end."""
        serials, lines = self.books.facts[book.SERIAL], self.upload(self.later)
        theirs = serials.index_select(0, lines)
        serials.index_fill_(0, lines, NOBODY)
        try:
            yield
        finally:
            serials.index_copy_(0, lines, theirs)

    def unwrite(self, step: Step) -> None:
        """Mark each row and state that a step writes as unwritten, and not sealed.

        Requests of the step under way are where they were before it: when the step is run again,
        they do not begin anew, so a violation of theirs is not reported once more.
        """
        batch, facts = Batch.of(self.books, step, released=True), self.books.facts
        if step is self.step:
            with self.as_written():
                mine = batch.live & (facts[book.SERIAL][batch.lines.clamp(min=0)] >= 0)
                lines = batch.lines[mine]
                facts[book.DURABLE][lines] = facts[book.DURABLE][lines].minimum(batch.first[mine])
        owner, within = ragged(batch.counts)
        row = batch.starts[owner] + within
        for name, slots in step.slots.items():
            place, slot = self.books.layout.places[name], slots[row].long()
            where = word_at(place, slot[(slot >= 0) & (slot < place.num_slots)])
            for words in (self.books.words, self.seals):
                if words is not None:
                    words[where] = UNWRITTEN

    def upload(self, numbers: Ints) -> Tensor:
        """Return numbers as int64 on the device, without waiting for it."""
        if isinstance(numbers, Tensor) and not numbers.is_cpu:
            return numbers.long()
        return to_device(numbers, self.device, torch.int64)

    def append(self, entries: Tensor) -> None:
        """Append entries to the journal, int64 ``[n, JOURNAL_PLACES + num_groups]``; count them.

        They take the place of the oldest ones.
        """
        books, rows, size = self.books, len(entries), self.books.sizes.journal
        number = books.counters[book.JOURNALLED] + torch.arange(rows, device=self.device)
        books.journal[number[-size:] % size] = entries[-size:]
        books.counters[book.JOURNALLED] += rows
