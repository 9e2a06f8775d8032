"""``Passes``: the interface of the device code that a ledger runs in every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import attrs
import torch
from torch import Tensor

from ..host_values import to_device
from .beginning import Beginning
from .books import SERIAL, Books
from .byte_books import ByteBooks
from .byte_passes import BytePasses, TorchBytePasses
from .changes import Change
from .digest import UNWRITTEN
from .goes_on import GoesOn
from .groups import Place
from .rows import first_of
from .step import Step
from .step_buffers import StepBuffers, copy_step
from .violation import NOBODY

#: A run of wrong rows ends where a block ends, and at every multiple of this many positions.
RUN: Final = 1024

#: Two odd numbers. A group's fingerprint after a step is the one before it times ``STEP_FACTOR``
#: plus, over the step's rows, the sum of the digest and of ``PLACE_FACTOR`` times the index of the
#: row's word; the index is -1 for a row without a slot. All modulo 2^64.
PLACE_FACTOR: Final = 0x2545F4914F6CDD1D
STEP_FACTOR: Final = 0x5851F42D4C957F2D

#: The kinds of violations that an inspected row can be.
STRETCH_KINDS: Final = ("published", "exported", "imported")


@attrs.frozen(eq=False)
class Stretch:
    """Rows to inspect when a block is published, or when rows leave the engine.

    Attributes:
        lines: int ``[num_requests]``, the line of each request; -1 is padding.
        first: int ``[num_requests]``, the position of each request's first row.
        end: int ``[num_requests]``, the position after each request's last row.
        tables: by group, int ``[num_requests, blocks]``.
        kind: one of ``STRETCH_KINDS``; exported rows must also be durable.
    """

    lines: Tensor
    first: Tensor
    end: Tensor
    tables: Mapping[str, Tensor]
    kind: str


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

    def takes(
        self,
        step: Step,
        accepted: Tensor | None = None,
        besides: int = 0,
        *,
        released: bool = False,
    ) -> bool:
        """Tell quickly that a step of the right shapes is well-formed; for CPUs.

        ``Books.first`` is filled as in ``write``, unless the result is False or ``released`` is
        set.

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

    @abstractmethod
    def begin(self, beginning: Beginning) -> None:
        """Begin requests: put the digests of their first 0 to n tokens, and their facts, in place.

        ``KNOWN`` is the number of tokens. ``DURABLE`` is the same, or what it was if that is less
        and the request was admitted before: rows do not become drafts, nor drafts durable, because
        tokens are given anew. Of what was kept nothing is known.

        Args:
            beginning: at least one request, on the device of the books, no line twice.
        """

    def change(self, change: Change) -> None:
        """Put in place what a step changes before its forward.

        Lines that were released are nobody's. The rows of blocks that are handed out are unwritten,
        and not sealed. Requests begin as in ``begin``.

        Args:
            change: lines and blocks inside the books.
        """
        books = self.books
        device = books.words.device
        if change.released:
            lines = to_device(change.released, device, torch.int64)
            books.facts[SERIAL].index_fill_(0, lines, NOBODY)
        for place, blocks in change.given:
            there = to_device(blocks, device, torch.int64)
            for words in (books.words,) if change.seals is None else (books.words, change.seals):
                place.pool_of(words).index_fill_(0, there, UNWRITTEN)
        if change.coming is not None:
            self.begin(change.coming.beginning(device))

    def hand_out_later(self, given: Sequence[tuple[Place, Sequence[int]]]) -> bool:
        """Hand out blocks with the next step, as ``change`` does without ``seals``, if it can wait.

        It is done before that step is written, by a graph that begins with ``launch_step`` or by
        ``write``, and before any other pass and ``settle``.

        Args:
            given: as for ``Change``.

        Returns:
            False if it cannot wait; ``change`` has to do it then.
        """
        return False

    def resolve_later(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Do ``resolve`` with the next step, if it can wait.

        It is done before blocks that wait are handed out, and when ``hand_out_later`` says.

        Args:
            step: as for ``resolve``.
            accepted: anything; a tensor holds the same numbers until then.
            sampled: likewise.
            besides: an int.

        Returns:
            False if it cannot wait, or if the arguments are of unknown forms; nothing was done.
        """
        return False

    def can_wait(self, step: Step, accepted: Tensor, sampled: Tensor) -> bool:
        """Tell whether ``resolve_later`` takes an outcome, until anything else comes.

        Ask when all launches of the step were made.

        Args:
            step: as for ``resolve_later``.
            accepted: likewise.
            sampled: likewise.
        """
        return False

    def going_on(
        self, accepted: Tensor, sampled: Tensor, besides: int, places: Sequence[Place | None]
    ) -> GoesOn | None:
        """Return a call that ends the last step, and hears that a graph writes it again.

        Args:
            accepted: of an outcome that can wait, of the form that the call will be given; as for
                ``resolve_later``.
            sampled: likewise.
            besides: likewise.
            places: for each group by which the call is given blocks its place; None for a group
                of nobody's.

        Returns:
            The call; None: ``resolve_later``, ``hand_out_later`` and ``replayed`` have to be made.
        """
        return None

    def put_later(self, target: Tensor, numbers: Sequence[int]) -> bool:
        """Do ``put`` with the next step, if it can wait, as ``hand_out_later`` says.

        Args:
            target: int64 ``[n]`` or longer, contiguous; it lives as long as the books.
            numbers: n.

        Returns:
            False if it cannot wait; ``put`` has to do it then.
        """
        return False

    def settle(self) -> None:
        """Do what waits for the next step: resolve the last one, hand out blocks, put numbers."""
        return

    def launch_step(self, step: Step) -> None:
        """Do what waits for a step, ``write`` it and ``check`` it, for a graph.

        Args:
            step: the step.
        """
        self.write(step)
        self.check(step)

    def replayed(self, step: Step | None) -> None:
        """Hear that a graph is replayed which begins with ``launch_step``, once each time.

        Args:
            step: what it writes; None: padding alone.
        """
        return

    @property
    def num_steps(self) -> int | None:
        """The steps that were written since the last ``restart``; None if nobody counts them."""
        return None

    def restart(self) -> None:
        """Begin anew; the books have been cleared."""
        return

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
        return copy_step(source, target, first, drafts, number)

    def reaches(self, step: Step, ends: Tensor) -> bool:
        """Tell whether a request's rows before its drafts reach a position; for CPUs.

        Args:
            step: the step that was written last; its requests are admitted ones.
            ends: int64 ``[num_lines]``, the position by line.
        """
        settled = first_of(self.books, step) + step.starts.diff()
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
        """

    @abstractmethod
    def check(self, step: Step) -> None:
        """Compare every row that the step's queries read with the reader's own digests."""

    def write_and_check(self, step: Step) -> bool:
        """Do ``write`` and ``check``, if ``takes`` says that the step is well-formed; for CPUs.

        Returns:
            Whether that was done; if not, nothing has changed but ``Books.first``.
        """
        if not self.takes(step):
            return False
        self.write(step)
        self.check(step)
        return True

    def resolve_taken(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> bool:
        """Do ``resolve``, if ``takes`` says that the outcome is possible; for CPUs.

        Returns:
            Whether that was done; if not, nothing has changed.
        """
        if not self.takes(step, accepted, besides, released=True):
            return False
        self.resolve(step, accepted, sampled, besides)
        return True

    def resolve_again(self, step: Step, accepted: Any, sampled: Any, besides: int) -> bool:
        """Do ``resolve`` for arguments of the forms that it was given for this step before.

        Args:
            step: as for ``resolve``.
            accepted: anything.
            sampled: anything.
            besides: an int.

        Returns:
            Whether that was done. False if the forms are not known, or not remembered; they have to
            be examined then.
        """
        return False

    @abstractmethod
    def resolve(
        self, step: Step, accepted: Tensor, sampled: Tensor | None, besides: int = 0
    ) -> None:
        """End a step: mark the rows and states of rejected drafts, unless they were reported.

        None of its requests is ``OPEN`` any more.

        Args:
            step: the step last given to ``write``.
            accepted: int ``[num_requests]``, drafts accepted; clamped to the number of drafts.
                -1: nothing was sampled, and no draft accepted.
            sampled: int ``[num_requests, n]``, tokens sampled: first the accepted drafts, then
                one more, which from now on counts as the request's own; -1 stands for no token.
                A draft whose row is of another token counts as rejected, and so do those after it.
            besides: tokens that ``accepted`` counts beside drafts.
        """

    def byte_passes(self, books: ByteBooks) -> BytePasses:
        """Return the device code of a scrub over the same ledger."""
        return TorchBytePasses(books)

    @abstractmethod
    def inspect(self, stretch: Stretch) -> None:
        """Compare rows that are published or exported, not read by a step."""
