"""Digests of token prefixes: a keyed sum over positions, 64 bits wide.

The digest of tokens ``t[0..p]`` is ``seed + term(t[0], 0) + ... + term(t[p], p)`` modulo 2^64. A
term is a keyed *permutation* of the 64-bit word (position, token), so

- two prefixes of one length that differ in one token never have one digest;
- any other two prefixes have one digest with a chance of about 2^-64 for each pair compared, over
  the choice of the key. A run that compares 10^9 wrong rows misses one of them with a chance of
  5 x 10^-11;
- the same token at another position is another term, so order counts;
- a term can be undone with the key: a report names tokens without storing any.

The key is drawn once per engine and never leaves it. It keeps users from building two prompts
of one digest; it mixes well, but it is not cryptography.

The word of a slot is the digest plus a salt of its group, so that a row of another group is never
taken for one of this group, plus the age of the row: see ``epochs``. Three words are reserved; see
``UNWRITTEN``.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..errors import ConfigError

#: The word of a slot that nobody has written since its block was handed out.
UNWRITTEN: Final = 0
#: The word of a slot that holds the row of a draft that was taken back.
REJECTED: Final = 1
RESERVED: Final = 2

#: What one epoch of some weights adds to the age of a row, and so to its word.
EPOCH: Final[Mapping[str, int]] = {"target": 1, "drafter": 1 << 32}
#: The bits of an age that count epochs of the target; those above count the drafter's.
TARGET_AGE: Final = (1 << 32) - 1

#: A term's word has the token in its low bits and the position above them.
TOKEN_BITS: Final = 40
MAX_POSITION: Final = 1 << (64 - TOKEN_BITS - 1)
#: Ids from here on stand for positions without a token, such as part of an image: ``embedded_ids``.
EMBEDDED: Final = 1 << (TOKEN_BITS - 1)

_MASK: Final = (1 << 64) - 1
#: (shift, odd factor) of the two rounds, and the last shift: constants of splitmix64.
ROUNDS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT: Final = 31


def signed(word: int) -> int:
    """Return the int64 with the bits of ``word``, an int in ``[-2^63, 2^64)``."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


@attrs.frozen
class Key:
    """The secret of one engine; all its ranks have the same one.

    Attributes:
        words: four 64-bit words: the first three mix terms, from the fourth come salts.

    Raises:
        ConfigError: the words are something else.
    """

    words: tuple[int, int, int, int] = attrs.field(repr=False)

    @words.validator
    def _four_words(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        """Refuse, with a ConfigError, words that are no tuple of four ints from 0 to 2^64 - 1."""
        whole = isinstance(value, tuple) and len(value) == 4
        if not whole or any(type(word) is not int or not 0 <= word <= _MASK for word in value):
            raise ConfigError(
                "Key", "the words are not valid", expected="four ints from 0 to 2^64 - 1",
                got=type(value).__name__, hint="draw a key by Key.new()",
            )  # fmt: skip

    @classmethod
    def new(cls) -> Key:
        """Return a new key, drawn at random."""
        return cls(tuple(secrets.randbits(64) for _ in range(4)))  # type: ignore[arg-type]

    @classmethod
    def derived(cls, secret: str) -> Key:
        """Return the key that belongs to a secret, for ranks that cannot hand a key around.

        Args:
            secret: text that all ranks of an engine know and its users do not, such as a random
                id that the engine drew when it started.

        Raises:
            ConfigError: the secret is no text, or one that UTF-8 cannot encode.
        """
        if not isinstance(secret, str) or not is_encodable(secret):
            raise ConfigError(
                "Key.derived", "the secret is not valid",
                expected="a str without lone surrogates",
                got="one with some" if isinstance(secret, str) else type(secret).__name__,
                hint="give all ranks of an engine one text",
            )  # fmt: skip
        raw = hashlib.blake2b(secret.encode(), digest_size=32, person=b"kvtxn audit key").digest()
        words = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, 32, 8)]
        return cls(tuple(words))  # type: ignore[arg-type]

    def salt(self, name: str) -> int:
        """Return the salt of a group, int64, from the text of its name."""
        total = self.words[3]
        for index, byte in enumerate(name.encode()):
            total += self.term(byte, index + 1) * 2 + 1
        return signed(self._permute(total & _MASK))

    def term(self, token: int, position: int) -> int:
        """Return the term of one token, int64, from its id below 2^40 and its position."""
        return signed(self._permute(position << TOKEN_BITS | token))

    def _permute(self, word: int) -> int:
        """Return the keyed permutation of a word, both ints from 0 to 2^64 - 1; see ``permute``."""
        word ^= self.words[0]
        for (shift, factor), key in zip(ROUNDS, self.words[1:3], strict=True):
            word = ((word ^ (word >> shift)) * factor + key) & _MASK
        return word ^ (word >> LAST_SHIFT)

    def token_of(self, term: int) -> tuple[int, int]:
        """Undo ``term``.

        Args:
            term: a term, as ``Key.term`` returns it.

        Returns:
            The token and the position.
        """
        word = _unshift(term & _MASK, LAST_SHIFT)
        for (shift, factor), key in zip(ROUNDS[::-1], self.words[2:0:-1], strict=True):
            word = ((word - key) * pow(factor, -1, 1 << 64)) & _MASK
            word = _unshift(word, shift)
        word ^= self.words[0]
        return word & ((1 << TOKEN_BITS) - 1), word >> TOKEN_BITS

    def embedded_ids(self, contents: Tensor, index: Tensor) -> Tensor:
        """Return ids for positions that hold parts of some content instead of a token.

        A step feeds vectors there, so its token is not compared; the id says which content the
        rows after it depend on. Two contents share an id with a chance of 2^-39 per position.

        Args:
            contents: int64 ``[n]``, a hash of an image, a sound, or anything else that is embedded.
            index: int64 ``[n]``, the number of each position among those of its content.

        Returns:
            int64 ``[n]``, from ``EMBEDDED`` on.
        """
        mixed = self.permute(self.permute(contents) + index)
        return EMBEDDED | _shifted(mixed, 64 - TOKEN_BITS + 1)

    def seed(self, extras: Iterable[int] = ()) -> int:
        """Return the digest of the empty prefix, int64; 0 without extras, whose order counts.

        Args:
            extras: numbers that change every K and V of a request, such as the id of its LoRA.
        """
        total = 0
        for index, extra in enumerate(extras):
            total += self._permute((self._permute(extra & _MASK) + index) & _MASK)
        return signed(total)

    def constants(self, device: torch.device) -> Tensor:
        """Return the words that mix terms, int64 ``[3]``, on a device."""
        return torch.tensor([signed(w) for w in self.words[:3]], device=device)

    def terms(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the terms of many tokens, int64, in the shape of ``tokens``.

        Args:
            tokens: int, in ``[0, 2^40)``.
            positions: int, of the same shape.
        """
        return self.permute((positions.to(torch.int64) << TOKEN_BITS) | tokens.to(torch.int64))

    def permute(self, word: Tensor) -> Tensor:
        """Return the keyed permutation of each int64 word; ``_permute`` does the same with ints."""
        word = word ^ signed(self.words[0])
        for (shift, factor), key in zip(ROUNDS, self.words[1:3], strict=True):
            word = (word ^ _shifted(word, shift)) * signed(factor) + signed(key)
        return word ^ _shifted(word, LAST_SHIFT)

    def tokens_of(self, terms: Tensor) -> Tensor:
        """Return the token ids that ``terms`` were made of, int64, without their positions."""
        word = _unshifted(terms, LAST_SHIFT)
        for (shift, factor), key in zip(ROUNDS[::-1], self.words[2:0:-1], strict=True):
            word = (word - signed(key)) * signed(pow(factor, -1, 1 << 64))
            word = _unshifted(word, shift)
        return (word ^ signed(self.words[0])) & ((1 << TOKEN_BITS) - 1)


def is_encodable(text: str) -> bool:
    """Tell whether UTF-8 can encode a text; it cannot encode half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def as_word(digest: Tensor) -> Tensor:
    """Return digests, salt included, as words of slots; a reserved word is replaced by another."""
    return digest + RESERVED * ((digest >= 0) & (digest < RESERVED))


def age_of(word: Tensor, expected: Tensor, epoch: Tensor) -> Tensor:
    """Return the age of each row, int64; 0 for a row that is new, or is none of these tokens.

    Args:
        word: int64, the words that are there.
        expected: int64, of the same shape, the words of the readers' tokens at age 0.
        epoch: int64, the age of the oldest row that there can be.
    """
    age = word - expected
    known = (age > 0) & ((age & TARGET_AGE) <= (epoch & TARGET_AGE)) & (age >> 32 <= epoch >> 32)
    return torch.where(known, age, 0)


def older(word: Tensor, age: int) -> Tensor:
    """Return the words of rows that are older by an age, int64; reserved words stay.

    Without an age they are the words themselves, not a copy.
    """
    return word + age * ((word < 0) | (word >= RESERVED)) if age else word


def _shifted(word: Tensor, shift: int) -> Tensor:
    """Shift int64 right, filling with zeros."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)


def _unshifted(word: Tensor, shift: int) -> Tensor:
    """Undo ``word ^ (word >> shift)``; three rounds are enough for shifts above 21."""
    return word ^ _shifted(word, shift) ^ _shifted(word, 2 * shift)


def _unshift(word: int, shift: int) -> int:
    """Undo ``word ^ (word >> shift)`` for an int of 64 bits, as ``_unshifted`` does for tensors."""
    return word ^ (word >> shift) ^ (word >> (2 * shift))
