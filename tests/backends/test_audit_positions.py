"""Rows that are computed for other positions than they stand for: all passes find the same."""

from __future__ import annotations

import attrs
import pytest
import torch
from ledger_kit.life import new_ledger
from ledger_pairs import DEVICE, assert_equal_books, pair

from kvtxn import ConfigError
from kvtxn.audit import Step
from kvtxn.audit.rows import first_of

__all__ = ["pair"]

PROMPT = [1, 2, 3, 4, 5, 6]
#: Of the rows of a prompt and of a decode with two drafts: what is given, then the first wrong
#: position, and the position that its row was written for.
CASES = {
    "later rows of a prompt": ([0, 1, 2, 10, 11, 12], [6, 7, 8], 3, 10),
    "one row of a prompt, the next ones right": ([0, 1, 2, 9, 4, 5], [6, 7, 8], 3, 9),
    "two that sum up": ([0, 1, 9, -4, 4, 5], [6, 7, 8], 2, 9),
    "the drafts": ([0, 1, 2, 3, 4, 5], [6, 10, 11], 7, 10),
    "no position": ([0, 1, 2, 3, 4, 5], [6, -7, 8], 7, None),
    "far outside": ([0, 1, 2, 3, 4, 5], [6, 7 + (1 << 24), 8 + (1 << 40)], 7, None),
    "where vectors are embedded": ([0, 2, 3, 3, 4, 5], [6, 7, 8], 1, 2),
}


def numbers(*values, dtype=torch.int64):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def life(ledger, prompt, decode, dtype=torch.int64, *, says_first=False):
    """Compute a prompt, decode with two drafts of which one stays, and decode again."""
    line = numbers(ledger.admit("a", PROMPT, embedded={1: 77, 2: 77}))
    tables = {"full": numbers([1, 2, 3], dtype=torch.int32)}
    for given, tokens, drafts, ids in (
        (prompt, [1, 0, 0, 4, 5, 6], 0, [7, -1, -1]),
        (decode, [7, 8, 9], 2, [8, 20, -1]),
        ([8], [20], 0, [21, -1, -1]),
    ):
        first, count = {6: 0, 3: 6, 1: 8}[len(tokens)], len(tokens)
        step = Step(
            lines=line,
            starts=numbers(0, count),
            first=numbers(first) if says_first else None,
            tokens=numbers(*tokens),
            slots={"full": numbers(*range(4 + first, 4 + first + count))},
            tables=tables,
            drafts=numbers(drafts),
            positions=numbers(*given, dtype=dtype),
        )
        ledger.write(step)
        assert first_of(ledger.books, step).tolist() == [first]
        ledger.check(step)
        ledger.resolve(numbers(1 if drafts else 0), numbers(ids))
    return ledger.violations()


@pytest.mark.parametrize("says_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_they_are_foreign_at_their_first_read(pair, case, says_first):
    prompt, decode, position, written_for = CASES[case]
    ledgers = pair("plain")
    one, other = (life(ledger, prompt, decode, says_first=says_first) for ledger in ledgers)
    assert [*map(str, one)] == [*map(str, other)]
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)
    assert torch.equal(ledgers[0].books.journal, ledgers[1].books.journal)
    first, wrote = one[0], 1 if position < 6 else 2
    assert (first.kind, first.request, first.position) == ("foreign", "a", position)
    assert (first.slot, first.step, first.written_step) == (4 + position, wrote, wrote)
    assert first.written_position == written_for
    assert {v.kind for v in one} == {"foreign"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_at_their_positions_are_right(pair, dtype):
    """With vectors in place of tokens, and with positions of any width."""
    ledgers = pair("plain")
    for ledger in ledgers:
        assert life(ledger, [*range(6)], [6, 7, 8], dtype) == []
    assert_equal_books(*ledgers)


def test_a_first_row_at_a_wrong_position_moves_nobody(pair):
    """``first`` says where a request stands; it stays as it is, and so does the request."""
    ledgers, said = pair("plain"), []
    for ledger in ledgers:
        line = numbers(ledger.admit("a", PROMPT))
        tables = {"full": numbers([1, 2, 3], dtype=torch.int32)}
        for first, given in ((0, range(5)), (5, [6]), (6, [6])):
            step = Step(
                lines=line,
                starts=numbers(0, len(given)),
                first=numbers(first),
                tokens=numbers(*[*PROMPT, 7][first : first + len(given)]),
                slots={"full": numbers(*range(4 + first, 4 + first + len(given)))},
                tables=tables,
                positions=numbers(*given),
            )
            before = {name: each.clone() for name, each in tensors_of(step).items()}
            ledger.write_and_check(step)
            ledger.resolve(numbers(0), numbers([7 if first == 5 else -1]))
            for name, each in tensors_of(step).items():
                assert torch.equal(each, before[name]), name
        (found,) = ledger.violations()
        assert (found.kind, found.position, found.written_position) == ("foreign", 5, 6)
        assert (found.slot, found.step, found.written_step) == (9, 2, 2)
        said.append(str(found))
    assert said[0] == said[1]
    assert_equal_books(*ledgers)


def tensors_of(step):
    """Return all tensors of a step by name."""
    named = {**attrs.asdict(step, recurse=False)}
    for name in ("slots", "tables", "sources", "block_maps"):
        named |= {f"{name} of {group}": each for group, each in named.pop(name).items()}
    return {name: each for name, each in named.items() if each is not None}


@pytest.mark.parametrize("wrong", [{"positions": None}, {"lines": numbers(*[-1] * 99)}])
def test_a_step_says_where_its_requests_begin(pair, wrong):
    for ledger in pair("plain"):
        line = numbers(ledger.admit("a", PROMPT))
        step = Step(line, numbers(*range(100)), None, numbers(1), {}, positions=numbers(0))
        with pytest.raises(ConfigError, match="nothing says where the requests of the step begin"):
            ledger.write(attrs.evolve(step, **wrong))


def test_what_comes_after_a_wrong_row_is_computed_of_it(pair):
    """A row at its own position is foreign, too, if a row before it was not at its own."""
    for ledger in pair("plain"):
        right = new_ledger("plain", device=DEVICE, backend="torch", key=ledger.books.key)
        life(right, [*range(6)], [6, 7, 8])
        life(ledger, [0, 1, 2, 9, 4, 5], [6, 7, 8])
        other = ledger.books.words != right.books.words
        assert int(other.sum()) == 3  # of positions 3, 4 and 5; later steps go on rightly
