"""Requests that come to a ledger and leave it, and blocks that are handed out to them.

An engine knows all of them before a step's forward. ``RequestChanges.change`` takes them together:
they reach the device in one copy, and one pass puts them in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor

from . import checks
from .admission import Admission, admissions_of, own_words
from .arguments import listed, mapped
from .epochs import Epochs
from .groups import Place
from .ledger_state import Ints, LedgerState
from .new_requests import Change, NewRequests

#: No requests.
NONE: Final = ()


class RequestChanges:
    """The requests and blocks of a ledger that change before a step.

    Args:
        state: the ledger's state.
        epochs: keeps what requests that end have read.
    """

    def __init__(self, state: LedgerState, epochs: Epochs) -> None:
        self._state: Final = state
        self._epochs: Final = epochs
        self._books: Final = state.books

    def change(
        self,
        gone: Iterable[str] = NONE,
        admissions: Iterable[Admission] = NONE,
        given: Mapping[str, Ints] | None = None,
    ) -> list[int]:
        """Release requests, admit others, mark blocks as unwritten; see ``Ledger.change``.

        Everything is checked before anything is changed. Returns the lines of ``admissions``, in
        order.
        """
        if gone is NONE and admissions is NONE:  # the usual change: requests get blocks
            if given is not None and (blocks := self._blocks(given)):
                self._state.passes.change(Change((), blocks, None, self._state.seals))
            return []
        gone = listed("release", "gone", gone, "a list of names")
        checks.check_names("release", gone)
        admissions = admissions_of("change", admissions)
        names = [each.request for each in admissions]
        checks.check_names("admit", names, distinct=True)
        owns = [own_words(self._books, each) for each in admissions]
        blocks = [] if given is None else self._blocks(given)
        lines, left, new = self._roll(gone, names, owns)
        if left or blocks or new is not None:
            self._state.passes.change(Change(left, blocks, new, self._state.seals))
        return lines

    def _blocks(self, given: Mapping[str, Ints]) -> list[tuple[Place, list[int]]]:
        """Check the blocks that are handed out, and return them by a group of their pool.

        Groups without blocks are left out.

        Raises:
            ConfigError: a group is unknown, or a block is not one of its blocks.
        """
        found: list[tuple[Place, list[int]]] = []
        every = mapped("change", "given", given, "by name of a group, blocks")
        for name, numbers in every.items():
            place = checks.place_of("hand_out", self._books, name)
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
    ) -> tuple[list[int], list[int], NewRequests | None]:
        """Take requests out of the table and others in, if all of them find room.

        What the ones that leave have read is kept, and the seeds of the others. Under an open step
        the lines of those that come count as later ones.

        Returns:
            The line of each request of ``names``; the lines that nobody has any more; and the
            requests of ``names`` as the passes take them, None if there are none.

        Raises:
            CapacityError: no line is left for one of them; nothing was changed.
        """
        table = self._state.requests
        leaving = [name for name in gone if name in table]
        table.require_room(names, leaving)
        left = [line for line in map(table.release, leaving) if line is not None]
        self._epochs.keep(left)
        if not names:
            return [], left, None
        again = [name in table for name in names]
        entries = table.admit(names)
        for (_, serial), (_, seed) in zip(entries, owns, strict=True):
            table.remember_seed(serial, seed)
        lines = [line for line, _ in entries]
        if self._state.step is not None:
            self._state.later += lines
        if left:
            left = [line for line in left if line not in lines]
        return lines, left, NewRequests.of(entries, owns, again)
