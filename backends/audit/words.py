"""Digests in Triton: the same words as ``kvtxn.audit.digest``, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import digest

TOKEN_BITS = tl.constexpr(digest.TOKEN_BITS)
TOKEN_MASK = tl.constexpr((1 << digest.TOKEN_BITS) - 1)
#: The bits of a token that is not embedded.
PLAIN = tl.constexpr(digest.EMBEDDED - 1)
EMBEDDED = tl.constexpr(digest.EMBEDDED)
MAX_POSITION = tl.constexpr(digest.MAX_POSITION)
UNWRITTEN = tl.constexpr(digest.UNWRITTEN)
REJECTED = tl.constexpr(digest.REJECTED)
RESERVED = tl.constexpr(digest.RESERVED)
TARGET_AGE = tl.constexpr(digest.TARGET_AGE)

_FIRST, _SECOND = digest.ROUNDS
SHIFT_1 = tl.constexpr(_FIRST[0])
SHIFT_2 = tl.constexpr(_SECOND[0])
SHIFT_3 = tl.constexpr(digest.LAST_SHIFT)
FACTOR_1 = tl.constexpr(digest.signed(_FIRST[1]))
FACTOR_2 = tl.constexpr(digest.signed(_SECOND[1]))
INVERSE_1 = tl.constexpr(digest.signed(pow(_FIRST[1], -1, 1 << 64)))
INVERSE_2 = tl.constexpr(digest.signed(pow(_SECOND[1], -1, 1 << 64)))


@triton.jit
def shifted(word: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    """Shift int64 right by ``BY`` bits, zeros coming in."""
    return (word.to(tl.uint64, bitcast=True) >> BY).to(tl.int64, bitcast=True)


@triton.jit
def permute(word: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return the keyed permutation of int64 words; ``key`` is int64 ``[3]``."""
    word = word ^ tl.load(key)
    word = (word ^ shifted(word, SHIFT_1)) * FACTOR_1 + tl.load(key + 1)
    word = (word ^ shifted(word, SHIFT_2)) * FACTOR_2 + tl.load(key + 2)
    return word ^ shifted(word, SHIFT_3)


@triton.jit
def term(token: tl.tensor, position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return the terms of tokens at positions, int64; ``key`` is int64 ``[3]``."""
    return permute((position.to(tl.int64) << TOKEN_BITS) | token.to(tl.int64), key)


@triton.jit
def token_of(word: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return the tokens whose ``term`` words are, whatever their positions."""
    word = word ^ shifted(word, SHIFT_3) ^ shifted(word, 2 * SHIFT_3)
    word = (word - tl.load(key + 2)) * INVERSE_2
    word = word ^ shifted(word, SHIFT_2) ^ shifted(word, 2 * SHIFT_2)
    word = (word - tl.load(key + 1)) * INVERSE_1
    word = word ^ shifted(word, SHIFT_1) ^ shifted(word, 2 * SHIFT_1)
    return (word ^ tl.load(key)) & TOKEN_MASK


@triton.jit
def age_of(apart: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    """Return the ages of rows whose words are ``apart`` from those expected; 0 for all other rows.

    An age has the target model's epochs in its lower half, and the drafter's in its upper one;
    neither is more than that of ``epoch``.
    """
    known = (apart > 0) & ((apart & TARGET_AGE) <= (epoch & TARGET_AGE))
    return tl.where(known & ((apart >> 32) <= (epoch >> 32)), apart, 0)


@triton.jit
def as_word(digest: tl.tensor) -> tl.tensor:
    """Return digests, salt included, as words of slots.

    Never below ``RESERVED`` unless negative.
    """
    return tl.where((digest >= 0) & (digest < RESERVED), digest + RESERVED, digest)
