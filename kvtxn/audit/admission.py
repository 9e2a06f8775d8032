"""Requests that a ledger admits, and the words of the books that say so.

All requests that come with one step are computed on the host together and reach the device in one
copy: an admission of its own for each would launch a dozen small kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import CapacityError, ConfigError
from . import books as book
from . import checks
from .arguments import listed
from .books import NUM_FACTS, Books
from .digest import EMBEDDED

#: The least and the most number of 64 bits, given with a sign or without.
_WORDS: Final = (-(1 << 63), (1 << 64) - 1)


@attrs.frozen
class Admission:
    """A request that begins, or whose tokens are given again; see ``Ledger.admit``.

    Attributes:
        request: the request's name.
        tokens: int ``[n]``, all tokens that are the request's own, from its first.
        extras: ints of 64 bits that stand for anything that changes all its K and V.
        embedded: by position, a hash of the content embedded there in place of a token.
    """

    request: str
    tokens: Sequence[int] | Tensor
    extras: Iterable[int] = ()
    embedded: Mapping[int, int] | None = None


def own_words(books: Books, given: Admission) -> tuple[Tensor, int]:
    """Return a request's tokens, and the digest of no tokens, from which its digests go on.

    Args:
        books: the ledger's.
        given: the request.

    Returns:
        int64 ``[n]`` on the host, with a hash in place of the token where content is embedded, and
        an int64.

    Raises:
        CapacityError: there are more tokens than a line of the books holds.
        ConfigError: the tokens are no token ids, ``extras`` no ints, or ``embedded`` is not of
            the tokens' positions.
    """
    key, longest = books.key, books.sizes.max_length
    own = _own_tokens(given.tokens, given.embedded, longest)
    if len(own) > longest:
        raise CapacityError(
            "admit", f"request {given.request!r} has too many tokens",
            expected=f"at most {longest}", got=len(own), hint="raise max_length",
        )  # fmt: skip
    seed = key.seed(_own_extras(given.extras))
    own = own.clone() if given.embedded else own
    for position, content in (given.embedded or {}).items():
        own[position] = key.embedded_id(content, position)
    return own, seed


def _own_tokens(tokens: Any, embedded: Mapping[int, int] | None, max_length: int) -> Tensor:
    """Return a request's tokens, int64 ``[n]`` on the host; see ``Ledger.admit``."""
    if isinstance(tokens, Tensor) and not tokens.is_meta:
        tokens = tokens.cpu()
    own = checks.bounded("admit", "tokens", tokens, EMBEDDED)
    if embedded is not None and not isinstance(embedded, Mapping):
        raise ConfigError(
            "admit", "embedded is not valid", expected="by position, a hash", got=repr(embedded),
            hint="pass a dict, or leave it out; nothing was changed",
        )  # fmt: skip
    for position, content in (embedded or {}).items():
        checks.whole("admit", "a position of embedded", position, 0, min(len(own), max_length) - 1)
        checks.whole("admit", "a hash of embedded", content, *_WORDS)
    return own


def _own_extras(extras: Any) -> list[int]:
    """Return the ``extras`` of a request; see ``Ledger.admit``."""
    given = listed("admit", "extras", extras, "a sequence of ints; their order counts")
    return [checks.whole("admit", "a number of extras", each, *_WORDS) for each in given]


@attrs.frozen(eq=False)
class Beginning:
    """The lines of several requests in ``Books``, as they begin.

    Attributes:
        places: int64 ``[m]`` on the host, indices into ``Books.own`` as one row of words.
        digests: int64 ``[m]``, the words there: digests of each request's first 0 to n tokens.
        lines: int64 ``[num_requests]``.
        facts: int64 ``[NUM_FACTS, num_requests]``, columns of ``Books.facts``.
        again: bool ``[num_requests]``, the request was admitted before.
    """

    places: Tensor
    digests: Tensor
    lines: Tensor
    facts: Tensor
    again: Tensor

    @classmethod
    def of(
        cls,
        books: Books,
        entries: Sequence[tuple[int, int]],
        owns: Sequence[tuple[Tensor, int]],
        again: Sequence[bool],
    ) -> Beginning:
        """Compute the words of requests.

        Args:
            books: the ledger's.
            entries: line and serial number of each request, no line twice.
            owns: its tokens, int64 on the host, and its seed, see ``own_words``.
            again: whether it was admitted before.
        """
        lines, serials = torch.tensor(entries, dtype=torch.int64).unbind(1)
        counts = torch.tensor([len(own) for own, _ in owns])
        seeds = torch.tensor([seed for _, seed in owns])
        tokens = torch.cat([own for own, _ in owns])
        whose, begins = torch.repeat_interleave(counts), counts.cumsum(0) - counts
        position = torch.arange(len(tokens)) - begins[whose]
        sums = torch.zeros(len(tokens) + 1, dtype=torch.int64)
        torch.cumsum(books.key.terms(tokens, position), 0, out=sums[1:])
        facts = torch.full((NUM_FACTS, len(entries)), -1)
        facts[book.SERIAL], facts[book.OUTSIDE] = serials, 0
        facts[book.KNOWN] = facts[book.DURABLE] = counts
        first = lines * books.own.shape[1]
        return cls(
            places=torch.cat([first, first[whose] + position + 1]),
            digests=torch.cat([seeds, sums[1:] + (seeds - sums[begins])[whose]]),
            lines=lines,
            facts=facts,
            again=torch.tensor(again),
        )

    def write(self, books: Books, there: Tensor) -> None:
        """Write the words into the books.

        Args:
            books: the ledger's.
            there: ``packed``, on the device of the books.
        """
        words, number = len(self.places), len(self.lines)
        places, digests, rest = there[:words], there[words : 2 * words], there[2 * words :]
        lines, facts = rest[:number], rest[number:].view(NUM_FACTS, number)
        if self.again.any():
            # Rows do not become drafts because a request's tokens are given anew.
            known = books.facts[book.DURABLE].index_select(0, lines).minimum(facts[book.KNOWN])
            again = self.again.to(there.device, non_blocking=True)
            facts[book.DURABLE].copy_(torch.where(again, known, facts[book.DURABLE]))
        books.own.view(-1).index_copy_(0, places, digests)
        books.facts.index_copy_(1, lines, facts)

    @property
    def packed(self) -> Tensor:
        """All words in one tensor, so that one copy brings them to a device."""
        return torch.cat([self.places, self.digests, self.lines, self.facts.flatten()])
