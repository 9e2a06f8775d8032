"""Requests that a ledger admits.

All requests that come with one step reach the device in one copy, where one pass begins them: an
admission of its own for each would launch a dozen small kernels.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import CapacityError, ConfigError
from . import checks
from .arguments import listed
from .books import Books
from .digest import EMBEDDED

#: The least and the most number of 64 bits, given with a sign or without.
_WORDS: Final = (-(1 << 63), (1 << 64) - 1)
_NOTHING: Final = torch.zeros(0, dtype=torch.int64, device="cpu")
#: The type and the bytes of an array's numbers that are token ids, whichever they are.
_UINT32: Final = ("I", 4)


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
    tokens: Sequence[int] | Tensor = attrs.field(repr=False)
    extras: Iterable[int] = ()
    embedded: Mapping[int, int] | None = attrs.field(default=None, repr=False)


def admissions_of(operation: str, given: Any) -> list[Admission]:
    """Check the requests that come, and return them as a list: callers iterate more than once.

    Args:
        operation: the call, for the message.
        given: any iterable of ``Admission``, read once.

    Raises:
        ConfigError: it is no iterable, or one of them is no ``Admission``.
    """
    wrong, there = "admissions is not valid", []
    try:
        items = iter(given)
    except TypeError:
        got = type(given).__name__
    else:
        there = list(items)  # not in the ``try``: an error of a generator's own is the caller's
        strange = next((n for n, each in enumerate(there) if not isinstance(each, Admission)), -1)
        if strange < 0:
            return there
        wrong, got = f"admission {strange} is not valid", type(there[strange]).__name__
    raise ConfigError(
        operation, wrong, expected="an iterable of kvtxn.audit.Admission", got=got,
        hint="describe each request as Admission(name, tokens); nothing was changed",
    )  # fmt: skip


def own_words(books: Books, given: Admission) -> tuple[Tensor, int]:
    """Return a request's tokens, and the digest of no tokens, from which its digests go on.

    Args:
        books: the ledger's.
        given: the request.

    Returns:
        int64 or uint32 ``[n]`` on the host, with a hash in place of the token where content is
        embedded, and an int64.

    Raises:
        CapacityError: there are more tokens than a line of the books holds.
        ConfigError: the tokens are no token ids, ``extras`` no ints, or ``embedded`` is not of
            the tokens' positions.
    """
    key, longest = books.key, books.sizes.max_length
    own = _own_tokens(given.tokens)
    positions, contents = _own_embedded(given.embedded, min(own.shape[0], longest))
    if own.shape[0] > longest:
        raise CapacityError(
            "admit", f"request {given.request!r} has too many tokens",
            expected=f"at most {longest}", got=own.shape[0], hint="raise max_length",
        )  # fmt: skip
    seed = key.seed(_own_extras(given.extras))
    if len(positions):
        own = own.long().clone()
        own[positions] = key.embedded_ids(contents, positions)
    return own, seed


def _own_tokens(tokens: Any) -> Tensor:
    """Return token ids on the host, int64 or uint32 ``[n]``; waits for those of a GPU.

    Raises:
        ConfigError: they are no token ids; the message names ``Ledger.admit``.
    """
    if isinstance(tokens, Tensor) and not tokens.is_meta:
        tokens = tokens.cpu()
    if type(tokens) is array and (tokens.typecode, tokens.itemsize) == _UINT32 and tokens:
        return torch.frombuffer(tokens, dtype=torch.uint32)  # none is below 0 or from EMBEDDED on
    return checks.bounded("admit", "tokens", tokens, EMBEDDED)


def _own_embedded(embedded: Any, end: int) -> tuple[Tensor, Tensor]:
    """Return the positions below ``end`` and the contents of ``embedded``, int64 ``[n]`` each.

    They are empty for None. A prompt may be embedded as a whole, so the usual case calls nothing
    for each position.

    Raises:
        ConfigError: it is no mapping, has a position outside, or a hash that is no int of 64 bits.
    """
    if embedded is not None and not isinstance(embedded, Mapping):
        raise ConfigError(
            "admit", "embedded is not valid", expected="by position, a hash",
            got=type(embedded).__name__, hint="pass a dict, or leave it out; nothing was changed",
        )  # fmt: skip
    if not embedded:
        return _NOTHING, _NOTHING
    found = _quickly(embedded, end)
    if found is None:
        at, hashes, (low, high) = array("q"), array("Q"), _WORDS
        for position, content in embedded.items():
            at.append(checks.whole("admit", "a position of embedded", position, 0, end - 1))
            whole = checks.whole("admit", "a hash of embedded", content, low, high)
            hashes.append(whole & high)
        found = at, hashes
    positions, contents = (torch.frombuffer(each, dtype=torch.int64) for each in found)
    return positions, contents


def _quickly(embedded: Mapping[int, int], end: int) -> tuple[array[int], array[int]] | None:
    """Return positions below ``end`` and contents of 64 bits without a sign, if all are such ints.

    None otherwise.
    """
    positions, contents = [*embedded], [*embedded.values()]
    if {*map(type, positions), *map(type, contents)} != {int}:
        return None
    try:
        found = array("q", positions), array("Q", contents)
    except OverflowError:
        return None
    low, high = (int(number) for number in torch.frombuffer(found[0], dtype=torch.int64).aminmax())
    return found if low >= 0 and high < end else None


def _own_extras(extras: Any) -> list[int]:
    """Return the extras of a request as ints; an empty list for none.

    Raises:
        ConfigError: they are no sequence of ints of 64 bits.
    """
    if type(extras) in (list, tuple) and not extras:
        return []  # the usual case, told quickly
    given = listed("admit", "extras", extras, "a sequence of ints; their order counts")
    return [checks.whole("admit", "a number of extras", each, *_WORDS) for each in given]
