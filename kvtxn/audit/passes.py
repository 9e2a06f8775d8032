"""``Passes``: the interface of the device code that a ledger runs in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch
from torch import Tensor

from .books import Books
from .byte_books import ByteBooks
from .byte_passes import BytePasses, TorchBytePasses
from .new_requests import Change
from .step import Step, Stretch
from .step_input import StepInput

#: A run of wrong rows ends where a block ends, and at every multiple of this many positions.
RUN: Final = 1024

#: Two odd numbers. A group's fingerprint after a step is the one before it times ``STEP_FACTOR``
#: plus, over the step's rows, the sum of the digest and of ``PLACE_FACTOR`` times the index of the
#: row's word; the index is -1 for a row without a slot. All modulo 2^64.
PLACE_FACTOR: Final = 0x2545F4914F6CDD1D
STEP_FACTOR: Final = 0x5851F42D4C957F2D


class Passes(ABC):
    """The passes over the books that a step makes.

    No pass waits for the device, allocates memory that outlives the pass, or chooses its launches
    by the values of a tensor; so every pass can be captured in a CUDA graph. (The torch
    implementation promises none of this: it is the specification, and it is for CPUs.)

    Args:
        books: the books that the passes read and write.
    """

    name: ClassVar[str]

    def __init__(self, books: Books) -> None:
        self.books: Final = books

    @classmethod
    @abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Say why this implementation cannot run on a device; return None if it can."""

    @abstractmethod
    def change(self, change: Change) -> None:
        """Put in place what a step changes before its forward.

        Lines that were released are nobody's. The rows of blocks that are handed out are unwritten,
        and not sealed. Requests begin: the digests of their first 0 to n tokens, and their facts,
        are put in place. ``KNOWN`` is the number of tokens. ``DURABLE`` is the same, or what it was
        if that is less and the request was admitted before: rows do not become drafts, nor drafts
        durable, because tokens are given anew. Of what was kept nothing is known.

        Args:
            change: lines and blocks inside the books, no line of a request that begins twice.
        """

    @abstractmethod
    def write(self, step: Step) -> None:
        """Begin a step: compare the states that it reads, then record the rows that it writes.

        In this order: ``Books.first`` is filled, for a step without ``Step.first``; all sources and
        told counts are compared; the digests of all rows, of the positions that they are computed
        for, are put into their slots and the journal, and those of the positions that they stand
        for into the requests' own digests from ``KNOWN`` on; then ``KNOWN`` and ``DURABLE`` are
        raised to cover the rows before the drafts. The requests that have drafts are counted as
        ``OPEN``; those of a step before it that was not resolved are added to ``UNRESOLVED``.

        A slot outside its group is skipped, like -1. If two rows of one request have one slot
        of a ring, the later row stands.

        Of drafts that are trees, the digests are of the tokens on the way to each; ``KNOWN`` ends
        before them. See ``draft_trees``.
        """

    @abstractmethod
    def check(self, step: Step) -> None:
        """Compare every row that the step's queries read with the reader's own digests.

        The rows are counted, stale ones by age. A run of wrong rows is recorded as one violation;
        see ``RUN``.
        """

    @abstractmethod
    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """End a step: mark the rows and states of rejected drafts.

        Requests that were released since are among them, unless drafts are trees. None of the
        requests is ``OPEN`` any more. Of those that are still admitted ``KEPT`` is the number of
        drafts that stay; ``DURABLE`` and ``KNOWN`` reach to the end of these drafts, and ``KNOWN``
        over the sampled token after them.

        Args:
            step: the step last given to ``write``.
            accepted: int ``[num_requests]``, drafts accepted; clamped to the number of drafts.
                -1: nothing was sampled, and no draft accepted.
            sampled: int ``[num_requests, n]``, tokens sampled: first the accepted drafts, then
                one more, which from now on counts as the request's own; -1 stands for no token.
                A draft whose row is of another token counts as rejected, and so does every draft
                after it. Of a tree, the drafts that are kept are of these tokens, each behind the
                last; all others are rejected.
            besides: tokens that ``accepted`` counts beside drafts.
        """

    def input(self) -> StepInput:
        """Return the code that prepares an engine's numbers for these passes; here in torch."""
        return StepInput(self.books)

    def byte_passes(self, books: ByteBooks) -> BytePasses:
        """Return the device code of a scrub over the same ledger; here torch's."""
        return TorchBytePasses(books)

    @abstractmethod
    def inspect(self, stretch: Stretch) -> None:
        """Compare rows that are published, exported or imported, and record wrong ones.

        Of rows to be exported, those of open drafts are recorded, too.
        """
