"""``PendingChanges``: what waits for the next step, and the launches that take it in.

They are made at the beginning of a graph, before those that write and check its step. The outcome
of the last step can wait because all that it needs of that step's tensors, in which an engine
prepares the next one, was saved when the step was written.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ...audit.books import Books
from ...audit.step import Step
from . import change_kernel, resolve_kernel
from .launches import Launches
from .next_step import MOST, NextStep

#: Words of a block that are written at a time.
_WORDS: Final = 512
#: Requests that a program resolves.
_REQUESTS: Final = 32
#: Dtypes of an outcome that can wait.
_INTS: Final = (torch.int32, torch.int64)


class PendingChanges:
    """The changes that wait for the next step of one ledger.

    Args:
        books: the ledger's books.
        key: the key's constants, int64 ``[3]``, on the device.

    Attributes:
        next: the records that graphs look at.
        saved: what ``save_request`` writes into; None until there is a graph.
        graphs_save: each graph saves the step that it writes.
    """

    def __init__(self, books: Books, key: Tensor) -> None:
        device = books.words.device
        self._books: Final = books
        self._key: Final = key
        self._number: Final = books.words.get_device()
        self.next: Final = NextStep(device)
        self.saved: tuple[Tensor, Tensor] | None = None
        self.graphs_save = True
        self._last: Step | None = None  # the last step, if it was saved
        self._judged: tuple[Step, bool] | None = None  # what ``saves`` said last
        self._taking: Final = Launches(change_kernel.take_record, 1, device)
        self._resolving: Final = Launches(resolve_kernel.resolve_last, 2, device)
        # A step that stands for the launches of ``resolve_last``, all of which are alike.
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._any: Final = Step(none, none, none, none, {})

    def restart(self) -> None:
        """Forget what waits; the books have been cleared."""
        self.next.restart()
        self._last = None

    def use(self, step: Step) -> None:
        """Hear that a graph is about to be made that begins with ``take`` and writes this step."""
        if self.saved is None:
            self.make_room(step.num_rows)
        self.next.used = True
        self.graphs_save &= self.saves(step)
        self._last = None  # the launches that are tried before a capture save over it

    def make_room(self, rows: int) -> None:
        """Allocate room for what is saved of a step of at most so many rows."""
        width = resolve_kernel.TOKENS + len(self._books.layout.places)
        shapes = (self._books.sizes.max_requests, len(resolve_kernel.SAVED)), (max(rows, 1), width)
        with torch.inference_mode(False):
            saved, places = (
                torch.zeros(shape, dtype=torch.int64, device=self._books.words.device)
                for shape in shapes
            )
        self.saved, self._judged = (saved, places), None

    def saves(self, step: Step) -> bool:
        """Tell whether a step is saved when it is written, so that its outcome can wait."""
        if self._judged is None or self._judged[0] is not step:
            fits = self.saved is not None and (
                step.lines.shape[0] <= self.saved[0].shape[0]
                and step.num_rows <= self.saved[1].shape[0]
            )
            self._judged = step, fits
        return self._judged[1]

    def written(self, step: Step) -> None:
        """Hear that a step was written by a launch of its own."""
        self._last = step if self.saves(step) else None

    def replayed(self, step: Step | None) -> None:
        """Hear that a graph writes a step, as ``GraphSteps.replayed`` describes."""
        self.next.launched()
        saves = step is not None and self.graphs_save and self.saves(step)
        self._last = step if saves else None

    def repeated(self, step: Step) -> None:
        """Record that the captured graph of the next step saves this step itself."""
        self._last = step

    def resolve_later(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Let an outcome wait, as ``GraphSteps.resolve`` describes."""
        record = self.next
        if step is not self._last or record.blocks or record.lines:
            return False
        if not self._can_read(step, accepted, sampled):
            return False
        if not record.resolve(accepted, sampled, besides):
            return False
        self._last = None
        return True

    def can_wait(self, step: Step, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether the outcome of a step can wait, as ``GraphSteps.can_wait`` describes."""
        record = self.next
        if step is not self._last or record.blocks or record.lines:
            return False
        return self._can_read(step, accepted, sampled) and record.may_fill()

    def _can_read(self, step: Step, accepted: Any, sampled: Any) -> bool:
        """Tell whether an outcome of a step can be read from its addresses."""
        number = step.lines.shape[0]
        fits = self._fits(accepted, 1, number)
        return fits and (sampled is None or self._fits(sampled, 2, number))

    def _fits(self, outcome: Any, dimensions: int, number: int) -> bool:
        """Tell whether a part of an outcome can be read from its address."""
        return (
            type(outcome) is Tensor
            and outcome.dtype in _INTS
            and outcome.ndim == dimensions
            and outcome.shape[0] == number
            and outcome.get_device() == self._number
            and outcome.is_contiguous()
        )

    def take(self) -> None:
        """Launch what takes in the next step's record."""
        self.resolve_last()
        books = self._books
        arguments = (self.next.records, books.counters, books.words, _WORDS)
        self._taking.launch((MOST, 1, 1), arguments)

    def resolve_last(self) -> None:
        """Launch what resolves the last step, if its outcome waits; a second time does nothing."""
        if self._resolving.again(self._any):
            return
        assert self.saved is not None
        books, requests = self._books, self.saved[0].shape[0]
        lines, columns = books.own.shape
        arguments = (
            self.next.records, *self.saved, self._key, books.words, books.own, books.facts,
            books.counters, columns, lines, requests, len(books.layout.places), _REQUESTS,
        )  # fmt: skip
        grid = (-(-requests // _REQUESTS), 1, 1)
        self._resolving.first(self._any, grid, arguments, recurs=True)
