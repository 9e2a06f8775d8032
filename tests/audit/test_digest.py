"""Digests: what they tell apart, and that torch and plain integers agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtxn.audit.digest import EMBEDDED, MAX_POSITION, RESERVED, Key, as_word

KEY = Key((0x0123456789ABCDEF, 0xFEDCBA9876543210, 0xDEADBEEFCAFEF00D, 0x5555AAAA5555AAAA))
TOKENS = st.integers(0, 2**40 - 1)
POSITIONS = st.integers(0, MAX_POSITION - 1)


@given(TOKENS, POSITIONS)
def test_a_term_can_be_undone(token, position):
    assert KEY.token_of(KEY.term(token, position)) == (token, position)


@given(st.lists(st.tuples(TOKENS, POSITIONS), min_size=1, max_size=20))
def test_torch_and_integers_agree(pairs):
    tokens, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    terms = KEY.terms(tokens, positions)
    assert terms.tolist() == [KEY.term(*pair) for pair in pairs]
    assert torch.equal(KEY.tokens_of(terms), tokens)


def test_the_key_matters_and_is_not_shown():
    one, other = Key.new(), Key.new()
    assert one.term(5, 7) != other.term(5, 7)
    assert str(one.words[0]) not in repr(one)


def test_prefixes_differ():
    """A change, an exchange, a shift and a repetition each change the sum."""
    tokens = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(64)

    def digest(changed: torch.Tensor, at: torch.Tensor = positions) -> int:
        return int(KEY.terms(changed, at).sum())

    exchanged = tokens.clone()
    exchanged[[3, 9]] = tokens[[9, 3]]
    changed = tokens.clone()
    changed[5] += 1
    assert (
        len({digest(tokens), digest(exchanged), digest(changed), digest(tokens, positions + 1)})
        == 4
    )


def test_terms_look_random():
    """Neighbouring tokens and positions share about half of their bits."""
    terms = KEY.terms(torch.arange(4096), torch.arange(4096) // 64)
    flipped = terms[1:] ^ terms[:-1]
    bits = torch.stack([(flipped >> bit) & 1 for bit in range(64)]).double().mean(1)
    assert bits.min() > 0.45
    assert bits.max() < 0.55


def test_salts_and_seeds():
    """Each group has its own salt; extras and their order are part of the seed."""
    assert len({KEY.salt(name) for name in ("a", "b", "ab", "ba", "")}) == 5
    assert KEY.seed() == 0
    assert len({KEY.seed(extras) for extras in ((), (1,), (2,), (1, 2), (2, 1), (0,))}) == 6


def test_embedded_ids_are_no_tokens():
    contents, index = torch.tensor([1, -1]).repeat_interleave(8), torch.arange(8).repeat(2)
    ids = {*KEY.embedded_ids(contents, index).tolist()}
    assert len(ids) == 16
    assert all(EMBEDDED <= each < 2 * EMBEDDED for each in ids)


def test_words_are_never_reserved():
    digests = torch.tensor([-1, 0, 1, 2, 3, 2**62])
    words = as_word(digests)
    assert not ((words >= 0) & (words < RESERVED)).any()
    assert words[[0, 4, 5]].tolist() == digests[[0, 4, 5]].tolist()


@pytest.mark.parametrize("name", ["", "model.layers.0", "é"])
def test_a_salt_is_an_int64(name):
    assert -(2**63) <= KEY.salt(name) < 2**63
