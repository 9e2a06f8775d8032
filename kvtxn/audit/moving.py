"""States that an engine copies, or writes once drafts are decided, where the device alone knows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from . import books as book
from . import checks
from .changing import Changing
from .digest import as_word
from .groups import Place
from .rows import word_at
from .violation import NOBODY


class Moving(Changing):
    """The calls of a ledger about states that come to their blocks by no row of a step."""

    def carry(self, group: str, source: Tensor, target: Tensor) -> None:
        """Record that the engine copied states, where the device alone knows which; never waits.

        Args:
            group: the group of the states.
            source: int ``[n]`` on the ledger's device, the blocks copied from; -1 for none.
            target: int ``[n]`` on it, the blocks copied to, all different; -1 for none.

        Raises:
            ConfigError: the group is unknown or has no states, or source and target do not fit.
        """
        place = checks.place_of("carry", self.books, group, states=True)
        given = checks.ints("carry", "source", source, "[n]")
        wanted = checks.ints("carry", "target", target, "[n]")
        if given.shape != wanted.shape or {given.device, wanted.device} != {self.device}:
            raise ConfigError(
                "carry", "source and target do not fit",
                expected=f"two tensors of one length on {self.device}",
                got=f"{list(given.shape)} on {given.device}, {list(wanted.shape)} on "
                f"{wanted.device}",
                hint="give a target for each source; nothing was changed",
            )  # fmt: skip
        self.passes.settle()
        one, other, end = given.long(), wanted.long(), place.group.num_blocks
        copied = (one >= 0) & (one < end) & (one != other)
        words = self.books.words[word_at(place, torch.where(copied, one, 0))]
        self._put_states(place, other, copied, words, torch.full_like(one, NOBODY))

    def leave(
        self, lines: Tensor, blocks: Mapping[str, Tensor], lengths: Tensor | None = None
    ) -> None:
        """Record states that the engine has written once it knew which drafts stay; never waits.

        Call it after ``resolve``, for an engine that writes one state per request then, and none
        per draft. The step's ``slots`` have -1 for the rows of such requests.

        Args:
            lines: int ``[num_requests]``, those of the step.
            blocks: by group of states, int ``[num_requests]`` on the ledger's device, the block
                that got the state; -1 for none.
            lengths: int ``[num_requests]``, the tokens that each state has taken in; where that is
                more than were kept, there is none. None: after each request's last kept row.

        Raises:
            ConfigError: a group is unknown or has no states, or blocks do not fit the lines.
        """
        line, serials = lines.long().clamp(min=0), self.books.facts[book.SERIAL]
        serial, chosen = serials[line], lines >= 0
        kept = self.books.facts[book.DURABLE][line].clamp(min=0)
        if lengths is not None:
            chosen &= lengths <= kept
            kept = torch.where(chosen, lengths.long(), 0)
        for name, given in blocks.items():
            place = checks.place_of("leave", self.books, name, states=True)
            block = checks.ints("leave", f"blocks[{name!r}]", given, "[num_requests]").long()
            if block.shape != line.shape or block.device != self.device:
                raise ConfigError(
                    "leave", "blocks do not fit the lines",
                    expected=f"{list(line.shape)} on {self.device}",
                    got=f"{list(block.shape)} on {block.device}", hint="give one for each request",
                )  # fmt: skip
            words = as_word(self.books.own[line, kept] + self.books.salts[name])
            self._put_states(place, block, chosen & (serial >= 0), words, serial)

    def _put_states(
        self, place: Place, block: Tensor, chosen: Tensor, words: Tensor, owners: Tensor
    ) -> None:
        """Note the words and owners of chosen blocks of states, none of which is sealed now."""
        there = chosen & (block >= 0) & (block < place.group.num_blocks)
        block = torch.where(there, block, 0)
        where = word_at(place, block)
        # Sums modulo 2^64: what is not chosen adds nothing, wherever it points to.
        for known, at, new in (
            (self.books.words, where, words),
            (self.books.owners, place.owners + block, owners),
            (self._seals(), where, torch.zeros_like(block)),
        ):
            if known is not None:
                known.index_add_(0, at, torch.where(there, new - known[at], 0))
