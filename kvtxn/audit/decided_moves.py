"""Rows and states that an engine moves or writes once drafts are decided, as the device knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import to_device
from . import books as book
from . import checks
from .arguments import listed, mapped
from .digest import TARGET_AGE, as_word, older
from .ledger_state import LedgerState
from .rows import set_chosen
from .violation import NOBODY

#: Of a row that is moved it is known who wrote it if that is among so many of the latest rows.
_RECENT: Final = 1 << 12


@attrs.frozen(eq=False)
class _Groups:
    """Addresses of the words of some groups, int64 ``[num_groups, 1]`` on the device.

    ``column`` is where a journal entry has the place of the group's word.
    """

    are_states: bool
    column: Tensor
    base: Tensor
    stride: Tensor
    size: Tensor
    owners: Tensor
    slots: Tensor
    salts: Tensor

    def word_at(self, slot: Tensor) -> Tensor:
        """Return the index in ``Books.words`` of slots, int64 ``[num_groups, n]``."""
        if self.are_states:
            return self.base + slot * self.stride
        return self.base + slot // self.size * self.stride + slot % self.size


class Moves:
    """Rows and states that come to their slots by no row of a step.

    A state's slot is its block.

    Args:
        state: the ledger's state.
    """

    def __init__(self, state: LedgerState) -> None:
        self._state: Final = state
        self._books: Final = state.books
        self._known_groups: dict[tuple[object, ...], _Groups] = {}

    def carry(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Give copied slots the words and writers of the slots that they are copies of.

        A copied state may be read by any request. See ``Ledger.carry`` for the argument.

        Raises:
            ConfigError: a group is unknown, or not two tensors of one length are given for it.
        """
        pairs = mapped("carry", "copies", copies, "by name of the group, two tensors")
        if not pairs:
            return
        places = {name: checks.place_of("carry", self._books, name) for name in pairs}
        for name, pair in pairs.items():
            if isinstance(pair, Tensor) or len(listed("carry", name, pair, "two tensors")) != 2:
                raise ConfigError(
                    "carry", f"the copies of {name!r} are not valid", expected="two tensors",
                    got=type(pair).__name__, hint="give slots copied from, and slots copied to",
                )  # fmt: skip
        states = [name for name, place in places.items() if place.group.is_state]
        rows = [name for name in pairs if name not in states]
        tensors = {f"{name}, source": pairs[name][0] for name in (*states, *rows)}
        tensors |= {f"{name}, target": pairs[name][1] for name in (*states, *rows)}
        one, other = self._stacked("carry", tensors).chunk(2)
        for names, here in ((states, slice(len(states))), (rows, slice(len(states), None))):
            if names:
                groups = self._groups_of("carry", names, states=names is states)
                self._carry(groups, one[here], other[here])

    def _carry(self, groups: _Groups, source: Tensor, target: Tensor) -> None:
        """Put the words and writers of source slots into target slots; a copied state has no owner.

        A slot that is copied to itself, or from or to a slot outside its group, is skipped.

        Args:
            groups: the groups, of rows or of states.
            source: int64 ``[num_groups, n]``, a group's slots per line.
            target: int64 ``[num_groups, n]``.
        """
        copied = (source >= 0) & (source < groups.slots) & (source != target)
        where = groups.word_at(torch.where(copied, source, 0))
        writers = None if groups.are_states else self._writers(groups, where)
        owners = torch.full_like(source, NOBODY)
        self._put(groups, target, copied, self._books.words[where], owners, writers)

    def _writers(self, groups: _Groups, where: Tensor) -> Tensor:
        """Return what the ``_RECENT`` latest journal entries say of rows, else ``NOBODY``.

        Args:
            groups: the rows' groups.
            where: int64 ``[num_groups, n]``, the indices of their words.

        Returns:
            int64 ``[num_groups, n, JOURNAL_PLACES]``.
        """
        journal, newest = self._books.journal, self._books.counters[book.JOURNALLED] - 1
        number = min(_RECENT, len(journal))
        entry = (newest - torch.arange(number, device=where.device)) % len(journal)
        written, order = journal[entry, groups.column].sort(stable=True)
        at = torch.searchsorted(written, where).clamp(max=number - 1)  # of equal ones the newest
        said = journal[entry[order.gather(1, at)], : book.JOURNAL_PLACES]
        return torch.where((written.gather(1, at) == where)[..., None], said, NOBODY)

    def age(self, slots: Mapping[str, Tensor], epochs: int) -> None:
        """Make the words of rows older by some epochs; see ``Ledger.age``. Skip slots outside.

        Raises:
            ConfigError: a group is unknown or has states, the slots do not fit together, or the age
                is none.
        """
        given = mapped("age", "slots", slots, "by name of the group, a tensor")
        checks.whole("age", "epochs", epochs, 0, TARGET_AGE)
        if not given:
            return
        groups, slot = self._groups_of("age", [*given], states=False), self._stacked("age", given)
        there = (slot >= 0) & (slot < groups.slots)
        where, words = groups.word_at(torch.where(there, slot, 0)), self._books.words
        set_chosen(words, where, there, older(words[where], epochs))

    def leave(
        self, lines: Tensor, blocks: Mapping[str, Tensor], lengths: Tensor | None = None
    ) -> None:
        """Give blocks the words of the states that requests have left there; see ``Ledger.leave``.

        A request that is not admitted, or has fewer durable rows than its length, is left out.

        Raises:
            ConfigError: a group is unknown or has no states, or blocks do not fit the lines.
        """
        given = mapped("leave", "blocks", blocks, "by name of the group, a tensor")
        if not given:
            return
        groups, facts = self._groups_of("leave", [*given], states=True), self._books.facts
        told = {"lines": lines} if lengths is None else {"lines": lines, "lengths": lengths}
        stacked = self._stacked("leave", {**told, **given})
        found = stacked[len(told) :]
        known = (stacked[0] >= 0) & (stacked[0] < self._books.sizes.max_requests)
        line = torch.where(known, stacked[0], 0)
        serial, kept = facts[book.SERIAL][line], facts[book.DURABLE][line].clamp(min=0)
        chosen = known & (serial >= 0)
        if lengths is not None:
            chosen &= (stacked[1] >= 0) & (stacked[1] <= kept)
            kept = torch.where(chosen, stacked[1], 0)
        words = as_word(self._books.own[line, kept] + groups.salts)
        writer = self._written_by(line, serial, kept)
        self._put(groups, found, chosen, words, serial.expand_as(found), writer)

    def _written_by(self, line: Tensor, serial: Tensor, kept: Tensor) -> Tensor:
        """Return journal entries of states that requests left after their ``kept`` first tokens.

        Args:
            line: int64 ``[num_requests]``.
            serial: int64 ``[num_requests]``, the requests' serial numbers.
            kept: int64 ``[num_requests]``.

        Returns:
            int64 ``[num_requests, JOURNAL_PLACES]``, of the present step; nothing is written yet.
        """
        own = self._books.own
        ends = [(kept - back).clamp(min=0) for back in range(4)]
        terms = [own[line, one] - own[line, other] for one, other in pairwise(ends)]
        step = self._books.counters[book.STEP].expand_as(line)
        return torch.stack([step, serial, kept - 1, *terms], 1)

    def _groups_of(self, operation: str, names: Sequence[str], states: bool) -> _Groups:
        """Return the addresses of the words of groups, all of rows or all of states.

        They are sent to the device once, for as many calls as name the same groups.

        Raises:
            ConfigError: a group is unknown, or of the other kind.
        """
        key = states, *names
        if key not in self._known_groups:
            places = [
                checks.place_of(operation, self._books, name, states=states) for name in names
            ]
            columns = [
                [book.JOURNAL_PLACES + place.index for place in places],
                [place.base for place in places],
                [place.stride for place in places],
                [place.group.block_size for place in places],
                [place.owners for place in places],
                [place.num_slots for place in places],
                [self._books.salts[name] for name in names],
            ]
            with torch.inference_mode(False):
                numbers = to_device(torch.tensor(columns), self._state.device, torch.int64)
            found = [column[:, None] for column in numbers]
            self._known_groups[key] = _Groups(states, *found)
        return self._known_groups[key]

    def _stacked(self, operation: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return tensors of one length on the device as one, int64 ``[len(tensors), n]``.

        Raises:
            ConfigError: one is no ints, or has another length or device.
        """
        every = [checks.ints(operation, name, each, "[n]") for name, each in tensors.items()]
        if (
            len({(each.shape, each.device) for each in every}) > 1
            or every[0].device != self._state.device
        ):
            raise ConfigError(
                operation, "tensors do not fit together",
                expected=f"tensors of one length on {self._state.device}",
                got=", ".join(f"{list(each.shape)} on {each.device}" for each in every),
                hint="give a number for each request, -1 for none; nothing was changed",
            )  # fmt: skip
        return torch.stack([each.long() for each in every])

    def _put(
        self,
        groups: _Groups,
        slot: Tensor,
        chosen: Tensor,
        words: Tensor,
        owners: Tensor,
        writer: Tensor | None,
    ) -> None:
        """Set the words, owners and writers of chosen slots, and take their seals.

        Slots outside their group are skipped.

        Args:
            groups: the groups.
            slot: int64 ``[num_groups, n]``.
            chosen: bool, which of them.
            words: int64, what the slots hold now.
            owners: int64, serial numbers of requests; unread unless these are states.
            writer: int64 ``[n, JOURNAL_PLACES]``, see ``books``, or as many for each group; None if
                the writer is not known.
        """
        there = chosen & (slot >= 0) & (slot < groups.slots)
        slot = torch.where(there, slot, 0)
        where = groups.word_at(slot)
        put = [(self._books.words, where, words)]
        if groups.are_states:
            put.append((self._books.owners, groups.owners + slot, owners))
        if self._state.seals is not None:
            put.append((self._state.seals, where, torch.zeros_like(slot)))
        for known, at, new in put:
            set_chosen(known, at, there, new)
        self._journal(groups, torch.where(there, where, NOBODY), writer)

    def _journal(self, groups: _Groups, places: Tensor, writer: Tensor | None) -> None:
        """Append a journal entry for each slot: a report names whoever wrote there last.

        Args:
            groups: the groups.
            places: int64 ``[num_groups, n]``, the indices of the slots' words; -1 for none.
            writer: as for ``_put``.
        """
        width = self._books.journal.shape[1]
        entries = places.new_full((*places.shape, width), NOBODY)
        if writer is not None:
            entries[..., : book.JOURNAL_PLACES] = writer
        column = groups.column[..., None].expand(*places.shape, 1)
        self._state.append(entries.scatter_(2, column, places[..., None]).flatten(0, 1))
