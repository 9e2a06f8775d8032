"""Requests that come to a ledger and leave it, and blocks that are handed out to them.

An engine knows all of them before a step's forward. ``Changing.change`` takes them together: they
reach the device in one copy, and one pass puts them in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ..host_values import to_device
from . import checks
from .admission import Admission, admissions_of, own_words
from .arguments import listed, mapped
from .beginning import Coming
from .books import Books
from .byte_books import ByteBooks
from .changes import Change
from .digest import UNWRITTEN
from .groups import Place
from .passes import Passes
from .roster import Roster
from .rows import Batch, ragged, word_at
from .step import Step

#: No requests.
_NONE: Final = ()
#: Numbers that the scheduler has.
Ints = Sequence[int] | Tensor


class Changing:
    """The calls of a ledger that say who comes and goes.

    Args:
        books: the ledger's books.
        passes: the device code.
        roster: the admitted requests.
    """

    def __init__(self, books: Books, passes: Passes, roster: Roster) -> None:
        self.books: Final = books
        self.passes: Final = passes
        self.graphs: Final = passes.graph_steps(passes)
        self.input: Final = passes.step_input(passes)
        self._roster: Final = roster
        self.device: Final = books.words.device
        self._bytes: ByteBooks | None = None
        self._open: Step | None = None
        self._later: list[int] = []  # lines of requests that have begun since it was written

    def watch_bytes(self, books: ByteBooks) -> None:
        """Keep the books of a scrub up to date when blocks change hands."""
        self.graphs.settle()
        self._bytes = books

    @property
    def has_bytes(self) -> bool:
        """True if a scrub keeps checksums beside this ledger."""
        return self._bytes is not None

    def __contains__(self, request: object) -> bool:
        return isinstance(request, str) and request in self._roster

    def line(self, request: str, *, operation: str = "line") -> int:
        """Return the line of a request.

        Args:
            request: the request's name.
            operation: the call that needs the line, for the message.

        Raises:
            ConfigError: the request was not admitted, or was released.
        """
        return self._roster.line(request, operation)

    def lines_of(self, requests: Sequence[str]) -> list[int] | None:
        """Return the lines of requests; None if one of them is not admitted.

        Raises:
            ConfigError: these are no names.
        """
        return self._roster.lines_of(requests)

    def admit(
        self,
        request: str,
        tokens: Sequence[int] | Tensor,
        *,
        extras: Iterable[int] = (),
        embedded: Mapping[int, int] | None = None,
    ) -> int:
        """Begin a request, or give a resumed or continued request's tokens again.

        Args:
            request: the request's name.
            tokens: int ``[n]``, all tokens that are the request's own, from its first: the prompt,
                and the tokens generated before. They replace the tokens given earlier.
            extras: ints of 64 bits that stand for anything that changes all its K and V, such as a
                LoRA; their order counts.
            embedded: by position, a hash of the content embedded there in place of a token.

        Returns:
            The request's line, for ``Step.lines``; it keeps the line until it is released.

        Raises:
            CapacityError: no line is left, or the request is too long.
            ConfigError: the tokens are no token ids, ``extras`` no ints, or ``embedded`` is not of
                the tokens' positions.
        """
        return self.admit_all([Admission(request, tokens, extras, embedded)])[0]

    def admit_all(self, admissions: Iterable[Admission]) -> list[int]:
        """Begin several requests, or give their tokens again, in one copy to the device.

        Args:
            admissions: the requests, none of them twice; see ``admit``. An iterator is read once.

        Returns:
            The line of each.

        Raises:
            CapacityError: as in ``admit``; nothing was changed.
            ConfigError: as in ``admit``, a request is named twice, or one is no ``Admission``;
                nothing was changed.
        """
        return self.change(admissions=admissions_of("admit_all", admissions))

    def release(self, request: str) -> None:
        """End a request that finished, was aborted, or was preempted; an unknown name is harmless.

        The rows of the request stay, and are right for any request with the same tokens.

        Raises:
            ConfigError: the name is no text.
        """
        self.change([request])

    def hand_out(self, group: str, blocks: Ints) -> None:
        """Mark the rows of blocks as unwritten, because the engine gives the blocks to a request.

        Args:
            group: any group of the pool that the blocks come from.
            blocks: int ``[n]`` on the host, without blocks that a prefix cache hands over with
                their rows.

        Raises:
            ConfigError: the group is unknown, or a block is not one of its blocks.
        """
        checks.place_of("hand_out", self.books, group)
        self.change(given={group: blocks})

    def change(
        self,
        gone: Iterable[str] = _NONE,
        admissions: Iterable[Admission] = _NONE,
        given: Mapping[str, Ints] | None = None,
    ) -> list[int]:
        """Do all that a step changes before its forward: ``release``, ``admit_all``, ``hand_out``.

        It does not wait for the device.

        Args:
            gone: names of the requests that ended; a request may be among those that come, too.
            admissions: the requests that come, as for ``admit_all``.
            given: the blocks that are handed out, by group, as for ``hand_out``.

        Returns:
            The line of each request that comes.

        Raises:
            CapacityError: as in ``admit``; nothing was changed.
            ConfigError: as in the three calls; nothing was changed.
        """
        if gone is _NONE and admissions is _NONE:  # the usual change: requests get blocks
            if given is not None and (blocks := self._blocks(given)):
                waits = self._bytes is None and self.graphs.hand_out(blocks)
                if not waits:
                    self.passes.change(Change((), blocks, None, self._seals()))
            return []
        gone = listed("release", "gone", gone, "a list of names")
        checks.check_names("release", gone)
        admissions = admissions_of("change", admissions)
        names = [each.request for each in admissions]
        checks.check_names("admit", names, distinct=True)
        owns = [own_words(self.books, each) for each in admissions]
        blocks = [] if given is None else self._blocks(given)
        lines, left, coming = self._roll(gone, names, owns)
        if left or blocks or coming is not None:
            self.passes.change(Change(left, blocks, coming, self._seals()))
        return lines

    def _seals(self) -> Tensor | None:
        """Return what a scrub has sealed; None without a scrub."""
        return None if self._bytes is None else self._bytes.seals

    def _blocks(self, given: Mapping[str, Ints]) -> list[tuple[Place, list[int]]]:
        """Return the blocks that are handed out, by a group of their pool."""
        found: list[tuple[Place, list[int]]] = []
        every = mapped("change", "given", given, "by name of a group, blocks")
        for name, numbers in every.items():
            place = checks.place_of("hand_out", self.books, name)
            end = place.group.num_blocks
            if isinstance(numbers, list) and {*map(type, numbers)} == {int}:
                if min(numbers) < 0 or max(numbers) >= end:
                    checks.bounded("hand_out", "blocks", numbers, end)
                found.append((place, numbers))  # the usual case, told quickly
                continue
            blocks = checks.bounded("hand_out", "blocks", numbers, end)
            if len(blocks):
                found.append((place, blocks.tolist()))
        return found

    def _roll(
        self, gone: Sequence[str], names: Sequence[str], owns: Sequence[tuple[Tensor, int]]
    ) -> tuple[list[int], list[int], Coming | None]:
        """Return the lines of those that come, those that nobody has now, and who comes."""
        roster = self._roster
        leaving = [name for name in gone if name in roster]
        roster.require_room(names, leaving)
        left = [line for line in map(roster.release, leaving) if line is not None]
        if not names:
            return [], left, None
        again = [name in roster for name in names]
        entries = roster.admit(names)
        for (_, serial), (_, seed) in zip(entries, owns, strict=True):
            roster.remember_seed(serial, seed)
        lines = [line for line, _ in entries]
        if self._open is not None:
            self._later += lines
        if left:
            left = [line for line in left if line not in lines]
        return lines, left, Coming.of(entries, owns, again)

    def _unwrite(self, step: Step) -> None:
        """Mark each row and state that a step writes as unwritten, and not sealed."""
        batch = Batch.of(self.books, step, released=True)
        owner, within = ragged(batch.counts)
        row = batch.starts[owner] + within
        for name, slots in step.slots.items():
            place, slot = self.books.layout.places[name], slots[row].long()
            where = word_at(place, slot[(slot >= 0) & (slot < place.num_slots)])
            for words in (self.books.words, self._seals()):
                if words is not None:
                    words[where] = UNWRITTEN

    def _upload(self, numbers: Ints) -> Tensor:
        """Return numbers as int64 on the device, without waiting for it."""
        if isinstance(numbers, Tensor) and not numbers.is_cpu:
            return numbers.long()
        return to_device(numbers, self.device, torch.int64)
