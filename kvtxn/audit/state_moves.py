"""States that an engine copies, or writes once drafts are decided, where the device alone knows."""

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
from .digest import as_word
from .ledger_state import LedgerState
from .violation import NOBODY


@attrs.frozen(eq=False)
class _Groups:
    """Addresses of the words of some groups of states, int64 ``[num_groups, 1]`` on the device.

    ``column`` is where a journal entry has the place of the group's word.
    """

    column: Tensor
    base: Tensor
    stride: Tensor
    owners: Tensor
    blocks: Tensor
    salts: Tensor


class StateMoves:
    """States that come to their blocks by no row of a step.

    Args:
        state: the ledger's state.
    """

    def __init__(self, state: LedgerState) -> None:
        self._state: Final = state
        self._books: Final = state.books
        self._known_groups: dict[tuple[str, ...], _Groups] = {}

    def carry(self, copies: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Do what ``Ledger.carry`` says."""
        pairs = mapped("carry", "copies", copies, "by name of the group, two tensors")
        if not pairs:
            return
        groups = self._groups_of("carry", [*pairs])
        for name, pair in pairs.items():
            if isinstance(pair, Tensor) or len(listed("carry", name, pair, "two tensors")) != 2:
                raise ConfigError(
                    "carry", f"the copies of {name!r} are not valid", expected="two tensors",
                    got=type(pair).__name__, hint="give blocks copied from, and blocks copied to",
                )  # fmt: skip
        tensors = {f"{name}, source": pair[0] for name, pair in pairs.items()}
        tensors |= {f"{name}, target": pair[1] for name, pair in pairs.items()}
        found = self._stacked("carry", tensors)
        one, other = found.chunk(2)
        copied = (one >= 0) & (one < groups.blocks) & (one != other)
        words = self._books.words[groups.base + torch.where(copied, one, 0) * groups.stride]
        self._put_states(groups, other, copied, words, torch.full_like(one, NOBODY), None)

    def leave(
        self, lines: Tensor, blocks: Mapping[str, Tensor], lengths: Tensor | None = None
    ) -> None:
        """Do what ``Ledger.leave`` says."""
        given = mapped("leave", "blocks", blocks, "by name of the group, a tensor")
        if not given:
            return
        groups, facts = self._groups_of("leave", [*given]), self._books.facts
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
        self._put_states(groups, found, chosen, words, serial.expand_as(found), writer)

    def _written_by(self, line: Tensor, serial: Tensor, kept: Tensor) -> Tensor:
        """Return what journal entries say of states after the ``kept`` first tokens of requests.

        Returns:
            int64 ``[num_requests, JOURNAL_PLACES]``.
        """
        own = self._books.own
        ends = [(kept - back).clamp(min=0) for back in range(4)]
        terms = [own[line, one] - own[line, other] for one, other in pairwise(ends)]
        step = self._books.counters[book.STEP].expand_as(line)
        return torch.stack([step, serial, kept - 1, *terms], 1)

    def _groups_of(self, operation: str, names: Sequence[str]) -> _Groups:
        """Return what the words of groups lie by; it is sent to the device once."""
        key = tuple(names)
        if key not in self._known_groups:
            places = [checks.place_of(operation, self._books, name, states=True) for name in names]
            columns = [
                [book.JOURNAL_PLACES + place.index for place in places],
                [place.base for place in places],
                [place.stride for place in places],
                [place.owners for place in places],
                [place.group.num_blocks for place in places],
                [self._books.salts[name] for name in names],
            ]
            with torch.inference_mode(False):
                numbers = to_device(torch.tensor(columns), self._state.device, torch.int64)
            self._known_groups[key] = _Groups(*(column[:, None] for column in numbers))
        return self._known_groups[key]

    def _stacked(self, operation: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return tensors of one length on the device as one, int64 ``[len(tensors), n]``."""
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

    def _put_states(
        self,
        groups: _Groups,
        block: Tensor,
        chosen: Tensor,
        words: Tensor,
        owners: Tensor,
        writer: Tensor | None,
    ) -> None:
        """Note the words, owners and writers of chosen blocks of states; none is sealed now.

        Args:
            groups: the groups.
            block: int64 ``[num_groups, n]``.
            chosen: bool, which of them.
            words: int64, what the blocks hold now.
            owners: int64, serial numbers of requests.
            writer: int64 ``[n, JOURNAL_PLACES]``, see ``books``; None if the writer is not known.
        """
        there = chosen & (block >= 0) & (block < groups.blocks)
        block = torch.where(there, block, 0)
        where = groups.base + block * groups.stride
        # Sums modulo 2^64: what is not chosen adds nothing, wherever it points to.
        for known, at, new in (
            (self._books.words, where, words),
            (self._books.owners, groups.owners + block, owners),
            (self._state.seals, where, torch.zeros_like(block)),
        ):
            if known is not None:
                more = torch.where(there, new - known[at], 0)
                known.index_add_(0, at.flatten(), more.flatten())
        self._journal_states(groups, torch.where(there, where, NOBODY), writer)

    def _journal_states(self, groups: _Groups, places: Tensor, writer: Tensor | None) -> None:
        """Write a journal entry for each block: a report names whoever wrote there last."""
        width = self._books.journal.shape[1]
        entries = places.new_full((*places.shape, width), NOBODY)
        if writer is not None:
            entries[..., : book.JOURNAL_PLACES] = writer
        column = groups.column[..., None].expand(*places.shape, 1)
        self._state.append(entries.scatter_(2, column, places[..., None]).flatten(0, 1))
