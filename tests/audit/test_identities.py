"""The table of identities: what it remembers, forgets, and takes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.overrides import TorchFunctionMode

from kvtxn import ConfigError
from kvtxn.audit import Key, Ledger, RowGroup
from kvtxn.audit.identity_table import CAPACITY, WAYS, Identity, IdentityTable

KEY = Key.new()
words = st.integers(2, 5)
#: Pairs of checksums, few enough to meet again, and more than a small table has places for.
contents = st.tuples(st.integers(-6, 6), st.integers(0, 1))


def identity(word, *, serial=3, step=7):
    return Identity(step, serial, word // 2 + 9, (10, 11, -12), word)


def remember(table, *pairs):
    """Put contents with their identities."""
    rows = [[i.step, i.serial, i.first, *i.terms, i.last] for _, i in pairs]
    table.remember(torch.tensor([content for content, _ in pairs]), torch.tensor(rows))


def lookup(table, *contents):
    return table.lookup(torch.tensor(contents))


def test_bytes_lead_to_whose_they_are():
    table = IdentityTable(64)
    first, second = identity(-(1 << 63)), identity((1 << 63) - 1, step=1 << 30, serial=1 << 31)
    remember(table, ((1, 2), first), ((-3, 1 << 62), second))
    assert lookup(table, (1, 2), (1, 3), (-3, 1 << 62)) == [[first], [], [second]]
    assert len(table) == 2
    table.clear()
    assert lookup(table, (1, 2)) == [[]]


def test_identities_have_the_words_of_their_rows():
    ledger = Ledger([RowGroup("full", 4, 10)], max_requests=2, max_length=32, backend="torch")
    ledger.admit("a", range(20, 32))
    ledger.hand_out("full", [1, 2])
    ledger.import_rows("a", "full", [1, 2], 0, 8)
    identities = ledger.identities("full", ["a", "a"], [0, 4], [1, 2])
    words = ledger.expected("a", "full", 0, 8).tolist()
    assert identities[:, (2, -1)].tolist() == [[words[0], words[3]], [words[4], words[7]]]


def origin_of(ledger, request, first, block):
    """The origin of a block's rows, by their identity."""
    table = IdentityTable(8)
    table.remember(torch.tensor([[5, 6]]), ledger.identities("full", [request], [first], [block]))
    ((known,),) = lookup(table, (5, 6))
    return known.origin(ledger.books.key)


def two_writers():
    """A ledger in which "b" is about to get blocks of two writers, and their words and origins."""
    group = RowGroup("full", 4, 10)
    ledger = Ledger([group], max_requests=4, max_length=32, backend="torch", key=KEY)
    words, origins = [], []
    for name, block, tokens in (("a", 1, range(20, 32)), ("c", 2, range(40, 52))):
        ledger.admit(name, tokens)
        ledger.hand_out("full", [block])
        ledger.import_rows(name, "full", [block, block], 4 * block - 4, 4 * block)
        words.append(ledger.expected(name, "full", 4 * block - 4, 4 * block))
        origins.append(origin_of(ledger, name, 4 * block - 4, block))
    ledger.admit("b", range(20, 32))
    ledger.hand_out("full", [5, 6])
    return ledger, words, origins


def test_blocks_of_several_writers_come_in_one_call():
    """The rows, who stored them, and what is said of it are those of a call for each block."""
    several, words, origins = two_writers()
    for number, (some, origin) in enumerate(zip(words, origins, strict=True)):
        several.import_rows("b", "full", [5, 6], 4 * number, 4 * number + 4, some, origin)
    one, words, origins = two_writers()
    one.import_rows("b", "full", [5, 6], 0, 7, torch.cat(words)[:7], torch.stack(origins))
    for ledger in (one, several):
        (violation,) = ledger.violations()
        assert (violation.kind, violation.position, violation.block) == ("imported", 4, 6)
        assert (violation.written_request, violation.written_position) == ("c", 4)
        assert violation.written_for == (42, 43, 44)
    mine, theirs = (ledger.books.journal[:15].tolist() for ledger in (one, several))
    assert mine == theirs


@pytest.mark.parametrize(
    ("first", "runs"), [(0, 1), (0, 3), (1, 2)], ids=["too few", "too many", "inside of a block"]
)
def test_origins_are_those_of_blocks(first, runs):
    ledger, words, origins = two_writers()
    given = torch.stack([*origins, origins[0]][:runs])
    with pytest.raises(ConfigError, match="origin is not that of the rows"):
        ledger.import_rows("b", "full", [5, 6], first, 8, torch.cat(words)[first:], given)
    assert ledger.violations() == []


def test_identities_and_words_of_many_requests():
    """A block that is none has no rows; each call wants as many requests as numbers."""
    ledger, _, _ = two_writers()
    found = ledger.identities("full", ["a", "c", "a", "a"], [0, 4, 4, 0], [1, 2, 2, -1])
    (known,) = (ledger.identities("full", ["c"], [4], [2]),)
    assert found[1].tolist() == known[0].tolist()
    assert found[2:, (2, -1)].tolist() == [[0, 0], [0, 0]]
    words = ledger.own_words("full", ["a", "c"], [3, 7])
    assert words.tolist() == found[:2, -1].tolist()
    for call in (
        lambda: ledger.own_words("full", ["a"], [0, 1]),
        lambda: ledger.own_words("full", ["a"], [33]),
        lambda: ledger.identities("full", ["nobody"], [0], [1]),
        lambda: ledger.identities("other", ["a"], [0], [1]),
    ):
        with pytest.raises(ConfigError, match=r"own_words|identities"):
            call()


def test_the_same_bytes_may_be_of_several_prefixes():
    table = IdentityTable(64)
    remember(table, ((1, 2), identity(8)), ((1, 2), identity(9)))
    remember(table, ((1, 2), identity(8, serial=5)))  # written again: the last writer counts
    (found,) = lookup(table, (1, 2))
    assert sorted(found, key=lambda each: each.last) == [identity(8, serial=5), identity(9)]


def test_it_tells_whether_bytes_have_been_of_several_prefixes():
    table = IdentityTable(64)
    remember(table, ((1, 2), identity(8)), ((1, 3), identity(9)), ((1, 2), identity(8)))
    assert not table.repeats
    remember(table, ((1, 2), identity(9)))
    assert table.repeats
    table.clear()
    assert not table.repeats


def test_what_nobody_has_written_is_left_out():
    table = IdentityTable(64)
    remember(table, ((1, 2), identity(0)), ((3, 4), identity(1)))
    assert len(table) == 0


def test_nothing_of_nothing():
    table = IdentityTable(64)
    table.remember(torch.empty((0, 2), dtype=torch.int64), torch.empty((0, 7), dtype=torch.int64))
    assert table.lookup(torch.empty((0, 2), dtype=torch.int64)) == []


def test_a_full_table_forgets_the_oldest():
    table = IdentityTable(WAYS)
    for number in range(WAYS + 3):
        remember(table, ((number, 0), identity(number + 2)))
    found = lookup(table, *((number, 0) for number in range(WAYS + 3)))
    assert found == [[]] * 3 + [[identity(number + 2)] for number in range(3, WAYS + 3)]
    assert (len(table), table.forgotten) == (WAYS, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(contents, words), min_size=1, max_size=30), max_size=6))
def test_against_a_model_that_forgets_nothing(batches):
    """What the table knows is right; what it does not know any more it has counted."""
    table, model = IdentityTable(2 * WAYS), {}
    for batch in batches:
        remember(table, *((content, identity(word)) for content, word in batch))
        for content, word in batch:
            model.setdefault(content, set()).add(word)
        known = 0
        for content, found in zip(model, lookup(table, *model), strict=True):
            have = [each.last for each in found]
            assert len(set(have)) == len(have)
            assert set(have) <= model[content]
            assert all(each == identity(each.last) for each in found)
            known += len(have)
        assert len(table) == known
        assert known <= 2 * WAYS
        missing = sum(map(len, model.values())) - known
        assert missing <= table.forgotten
        assert (missing == 0) == (table.forgotten == 0)


def test_what_a_million_blocks_take():
    """As the guide says."""
    assert CAPACITY == 1 << 20
    assert IdentityTable().num_bytes <= 65 << 20


@pytest.mark.parametrize("capacity", [0, -1, 2.0, None, True])
def test_a_capacity_that_is_none(capacity):
    with pytest.raises(ConfigError, match="capacity"):
        IdentityTable(capacity)


@pytest.mark.parametrize("wrong", [
    torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64),
    [[1, 2]], torch.zeros((1, 2), dtype=torch.int64, device="meta"),
])  # fmt: skip
def test_tensors_that_do_not_fit(wrong):
    table = IdentityTable(8)
    with pytest.raises(ConfigError, match="one row per block"):
        table.lookup(wrong)
    with pytest.raises(ConfigError, match="one row per block"):
        table.remember(torch.zeros((1, 2), dtype=torch.int64), wrong)
    assert len(table) == 0


def test_no_rows_come_with_an_origin():
    ledger, words, origins = two_writers()
    ledger.import_rows("b", "full", [5, 6], 4, 4, words[0][:0], origins[0])
    ledger.import_rows("b", "full", [5, 6], 4, 4, words[0][:0], torch.stack(origins)[:0])
    assert ledger.violations() == []


class Indices(TorchFunctionMode):
    """Refuses lists of ints as indices: torch copies them to a GPU, and waits for it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(each, list | tuple) for each in index), index
        return func(*args, **(kwargs or {}))


def test_identities_are_found_without_waiting_for_a_gpu():
    ledger, _, _ = two_writers()
    blocks = torch.tensor([1, 2])
    with Indices():
        ledger.identities("full", ["a", "c"], [0, 4], blocks)
        ledger.own_words("full", ["a", "c"], [3, 7])
        with pytest.raises(AssertionError, match=r"\(0, -1\)"):
            blocks[None][:, (0, -1)]
