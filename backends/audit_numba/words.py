"""The arithmetic of ``kvtxn.audit.digest``, compiled: terms, tokens and words of slots.

All numbers are int64, whose sums and products wrap around as they do in torch.
"""

from __future__ import annotations

from typing import Final

from ...audit import digest
from .machine_code import compiled

TOKEN_BITS: Final = digest.TOKEN_BITS
TOKEN_MASK: Final = (1 << TOKEN_BITS) - 1
EMBEDDED: Final = digest.EMBEDDED
#: The bits by which tokens of a step are compared.
PLAIN: Final = EMBEDDED - 1
RESERVED: Final = digest.RESERVED
(SHIFT_0, _), (SHIFT_1, _) = digest.ROUNDS
FACTOR_0, FACTOR_1 = (digest.signed(factor) for _, factor in digest.ROUNDS)
INVERSE_0, INVERSE_1 = (digest.signed(pow(factor, -1, 1 << 64)) for _, factor in digest.ROUNDS)
LAST_SHIFT: Final = digest.LAST_SHIFT


@compiled
def shifted(word, shift):
    """Shift a word right by ``shift`` bits, filling with zeros."""
    return (word >> shift) & ((1 << (64 - shift)) - 1)


@compiled
def permuted(word, key):
    """Return the keyed permutation of a word; ``key`` is int64 ``[3]``."""
    word = word ^ key[0]
    word = (word ^ shifted(word, SHIFT_0)) * FACTOR_0 + key[1]
    word = (word ^ shifted(word, SHIFT_1)) * FACTOR_1 + key[2]
    return word ^ shifted(word, LAST_SHIFT)


@compiled
def term(token, position, key):
    """Return the term of a token at a position."""
    return permuted((position << TOKEN_BITS) | token, key)


@compiled
def token_of(word, key):
    """Return the token that a term was made of, whatever its position."""
    word = word ^ shifted(word, LAST_SHIFT) ^ shifted(word, 2 * LAST_SHIFT)
    word = (word - key[2]) * INVERSE_1
    word = word ^ shifted(word, SHIFT_1) ^ shifted(word, 2 * SHIFT_1)
    word = (word - key[1]) * INVERSE_0
    word = word ^ shifted(word, SHIFT_0) ^ shifted(word, 2 * SHIFT_0)
    return (word ^ key[0]) & TOKEN_MASK


@compiled
def as_word(digest):
    """Return a digest, salt included, as the word of a slot.

    ``RESERVED`` more if it lies below that. A negative digest stays as it is.
    """
    return digest + RESERVED if 0 <= digest < RESERVED else digest
