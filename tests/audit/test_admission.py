"""Requests that come together are admitted in one copy to the device."""

from __future__ import annotations

import sys

import numpy
import pytest
import torch

from kvtxn import CapacityError, ConfigError
from kvtxn.audit import Admission, Key, Ledger, RowGroup
from kvtxn.audit import books as book
from kvtxn.audit.digest import EMBEDDED, TOKEN_BITS


def test_requests_admitted_together_are_as_those_admitted_one_by_one():
    """Empty ones, embedded content, extras, and tokens given again while rows are drafts."""
    key = Key.new()

    def books(together):
        group = RowGroup("rows", num_blocks=8, block_size=4)
        ledger = Ledger([group], max_requests=4, max_length=16, key=key)
        line = ledger.admit("known", [5, 6])
        ledger.books.facts[book.DURABLE, line] = 1
        given = [
            Admission("new", [1, 2, 3], extras=[7]),
            Admission("known", [5, 6, 9]),
            Admission("empty", []),
            Admission("image", torch.tensor([4, 4, 4]), embedded={1: -3}),
        ]
        if together:
            lines = ledger.admit_all(given)
        else:
            lines = [
                ledger.admit(e.request, e.tokens, extras=e.extras, embedded=e.embedded)
                for e in given
            ]
        assert lines == [ledger.line(each.request) for each in given]
        return ledger.books

    one, other = books(together=True), books(together=False)
    assert torch.equal(one.own, other.own)
    assert torch.equal(one.facts, other.facts)
    assert sorted(one.facts[book.KNOWN].tolist()) == [0, 3, 3, 3]
    assert 1 in one.facts[book.DURABLE].tolist()


def test_a_prompt_that_is_embedded_as_a_whole_is_admitted_in_few_calls():
    """Its positions are looked at together, as tokens are."""
    length = 20_000
    ledger = Ledger([RowGroup("rows", 4, 8)], max_requests=2, max_length=length, backend="torch")
    contents = [(1 << 64) - 1 - at % 7 for at in range(length)]

    def calls(**embedded):
        made = []
        sys.setprofile(lambda frame, event, arg: made.append(event) if "call" in event else None)
        try:
            ledger.admit("a", [5] * length, **embedded)
        finally:
            sys.setprofile(None)
        return len(made)

    calls()
    few = calls()
    assert calls(embedded=dict(enumerate(contents))) < few + 200
    own, key = ledger.books.own[ledger.line("a")], ledger.books.key
    for at in (0, 1, 7, length - 1):
        token = key.token_of(int(own[at + 1] - own[at]))
        assert token == (id_of(key, contents[at], at), at)


def id_of(key, content, position):
    """Return the id of one position, as ``Key.embedded_ids`` does, in Python's own numbers."""
    mask, word = (1 << 64) - 1, content
    for more in (0, position):
        word = (word + more) & mask
        word = key.term(word & ((1 << TOKEN_BITS) - 1), word >> TOKEN_BITS) & mask
    return EMBEDDED | word >> (64 - TOKEN_BITS + 1)


@pytest.mark.parametrize("content", [-3, (1 << 64) - 3, numpy.int64(-3)])
def test_a_hash_is_known_by_its_bits(content):
    ledger = Ledger([RowGroup("rows", 4, 8)], max_requests=2, max_length=8)
    ledger.admit("a", [5, 5], embedded={1: content})
    own, key = ledger.books.own[ledger.line("a")], ledger.books.key
    assert key.token_of(int(own[2] - own[1])) == (id_of(key, -3, 1), 1)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (Admission("b", [1, -1]), ConfigError, "tokens is not valid"),
        (Admission("b", [1] * 17), CapacityError, "too many tokens"),
        (Admission("a", [1]), ConfigError, "a request is named twice"),
        (Admission(3, [1]), ConfigError, "a name is not a str"),
        (Admission("c", [1]), CapacityError, "request 'c' does not fit"),
    ],
)
def test_of_several_requests_none_is_admitted_if_one_is_refused(wrong, error, says):
    group = RowGroup("rows", num_blocks=8, block_size=4)
    ledger = Ledger([group], max_requests=2, max_length=16)
    ledger.admit("there", [1])
    before = ledger.books.own.clone(), ledger.books.facts.clone()
    with pytest.raises(error, match=says):
        ledger.admit_all([Admission("a", [1, 2]), wrong])
    assert "a" not in ledger
    assert torch.equal(ledger.books.own, before[0])
    assert torch.equal(ledger.books.facts, before[1])
    assert ledger.admit_all([]) == []
