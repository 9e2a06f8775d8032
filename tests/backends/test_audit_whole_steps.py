"""Steps on a CPU whose buffers come again: compiled passes do what those in torch do."""

from __future__ import annotations

import random

import attrs
import pytest
import torch
from kvtxn.backends.audit_numba import NumbaPasses
from ledger_kit.life import new_ledger

from kvtxn.audit import Step
from kvtxn.audit.step_input import StepBuffers
from kvtxn.audit.torch_passes import TorchPasses
from kvtxn.errors import AcceptanceError, ConfigError

PROMPT = [5, 6, 7, 8, 9, 10]


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


@pytest.fixture
def pair():
    """Make two ledgers of one key, each with a step of two requests: in torch, and compiled."""
    torch_one = new_ledger("plain", backend="torch", journal=128)
    key = torch_one.books.key
    ledgers = [torch_one, new_ledger("plain", backend=NumbaPasses, key=key, journal=128)]
    for ledger in ledgers:
        ledger.admit("a", PROMPT)
        ledger.admit("b", PROMPT)
    return [(ledger, same_buffers(ledger)) for ledger in ledgers]


def same_buffers(ledger):
    """A step of both requests whose values are filled in anew each time."""
    return Step(
        lines=torch.tensor([ledger.line("a"), ledger.line("b")]),
        starts=zeros(3),
        first=None,
        tokens=zeros(24),
        slots={"full": zeros(24)},
        tables={"full": torch.zeros(2, 6, dtype=torch.int32)},
        drafts=zeros(2),
        positions=zeros(24),
    )


def fill(step, first, counts, drafts, seed=0):
    """Put rows of both requests into a step's buffers; blocks 1 to 6 and 7 to 12 are theirs."""
    chance, rows = random.Random(seed), []
    for index, (begin, count) in enumerate(zip(first, counts, strict=True)):
        for at in range(begin, begin + count):
            token = PROMPT[at] if at < len(PROMPT) else chance.randrange(900)
            rows.append((token, at, 4 * (6 * index + 1) + at))
    step.starts.copy_(torch.tensor([0, counts[0], sum(counts)]))
    step.drafts.copy_(torch.tensor(drafts))
    for column, tensor in enumerate((step.tokens, step.positions, step.slots["full"])):
        tensor[: len(rows)] = torch.tensor([row[column] for row in rows])
    step.tables["full"].copy_(torch.arange(6)[None] + torch.tensor([[1], [7]]))


def assert_equal(pair):
    """Compare the ledgers' books and what they found; return that."""
    (one, _), (other, _) = pair
    for field in ("words", "facts", "counters", "fingerprints", "own", "journal"):
        assert torch.equal(getattr(one.books, field), getattr(other.books, field)), field
    found = [[str(violation) for violation in ledger.violations()] for ledger, _ in pair]
    assert found[0] == found[1]
    return found[0]


def live(ledger, step, steps, tamper=lambda number, step: None):
    """Both prompts, then steps with drafts; ``tamper`` changes each step before it is told."""
    fill(step, (0, 0), (6, 6), (0, 0))
    ledger.write_and_check(step)
    ledger.resolve(torch.tensor([1, 1]), torch.tensor([[11], [12]]), besides=1)
    at = [6, 6]
    for number in range(steps):
        fill(step, at, (3, 2), (2, 1), seed=number)
        step.tokens[0], step.tokens[3] = 11 + 3 * number, 12 + 3 * number
        tamper(number, step)
        ledger.write_and_check(step)
        kept = [number % 3, number % 2]
        drafts = [step.tokens[1:3].tolist(), step.tokens[4:5].tolist()]
        ids = torch.full((2, 3), -1)
        for index, count in enumerate(kept):
            new = [*drafts[index][:count], 11 + index + 3 * (number + 1)]
            ids[index, : len(new)] = torch.tensor(new)
            at[index] += count + 1
        ledger.resolve(torch.tensor(kept) + 1, ids, besides=1)


def test_healthy_steps_leave_the_same_books(pair):
    for ledger, step in pair:
        live(ledger, step, 6)
    assert assert_equal(pair) == []
    counts = pair[1][0].counters()
    assert counts["kvtxn_audit_steps_total"] == 7
    assert counts["kvtxn_audit_rows_checked_total"] > 100


@pytest.mark.parametrize("what", ["table", "slot", "position", "token"])
def test_wrong_steps_are_reported_alike(pair, what):
    def tamper(number, step):
        if number == 2 and what == "table":
            step.tables["full"][0] = step.tables["full"][1]
        elif number == 2 and what == "slot":
            step.slots["full"][0] += 1
        elif number == 2 and what == "position":
            step.positions[4] += 5
        elif number == 2:
            step.tokens[0] += 1

    for ledger, step in pair:
        live(ledger, step, 4, tamper)
    assert assert_equal(pair)


def test_a_step_that_is_malformed_later_changes_nothing(pair):
    """Its buffers were right before; so were the counts of what was accepted."""
    for ledger, step in pair:
        live(ledger, step, 1)
        words = ledger.books.words.clone()
        fill(step, (8, 8), (3, 2), (2, 9))
        with pytest.raises(ConfigError, match="drafts of request 1 are not among its rows"):
            ledger.write_and_check(step)
        fill(step, (8, 500), (3, 2), (2, 1))
        with pytest.raises(ConfigError, match="malformed"):
            ledger.write_and_check(step)
        assert torch.equal(words, ledger.books.words)
        fill(step, (7, 7), (3, 2), (2, 1))
        ledger.write_and_check(step)
        words = ledger.books.words.clone()
        with pytest.raises(AcceptanceError, match="out of range for request 1"):
            ledger.resolve(torch.tensor([1, 3]), besides=1)
        assert torch.equal(words, ledger.books.words)
        ledger.resolve(torch.tensor([1, 2]), besides=1)
    assert_equal(pair)


def test_blocks_that_are_filled_are_told_from_others(pair):
    for ledger, step in pair:
        fill(step, (0, 0), (6, 5), (0, 2))
        ledger.write_and_check(step)
        ends = torch.full((ledger.books.facts.shape[1],), 99)
        line_a, line_b = step.lines.tolist()
        for a, b, reached in ((7, 4, False), (6, 4, True), (7, 3, True), (5, 9, True)):
            ends[line_a], ends[line_b] = a, b
            assert ledger.input.reaches(step, ends) is reached, (a, b)


@pytest.mark.parametrize("passes", [TorchPasses, NumbaPasses])
@pytest.mark.parametrize("alike", [True, False])
def test_a_step_is_copied_out_of_an_engines_buffers(passes, alike):
    """Of other dtypes and shapes in memory, alike in all groups or not."""
    ledger = new_ledger("plain", backend=passes)
    dtype = torch.int64 if alike else torch.int32
    wide = torch.arange(40, dtype=torch.int32).view(4, 10)
    theirs = StepBuffers(
        starts=torch.tensor([0, 3, 5, 77], dtype=torch.int32),
        positions=torch.tensor([4, 5, 6, 0, 1, 99]),
        tokens=torch.tensor([7, 8, 9, 10, 11, 99], dtype=torch.int32),
        slots=(
            torch.tensor([1, 2, 3, 4, 5, 99]),
            torch.arange(6, dtype=dtype),
        ),
        tables=(wide[:, :3], wide[:, ::5] if alike else wide[:, ::5].clone()),
        lengths=(torch.tensor([7, 2, 0], dtype=torch.int32), torch.zeros(0, dtype=torch.int32)),
    )
    own = StepBuffers(
        *(zeros(4), zeros(6), zeros(6)),
        slots=(zeros(6), zeros(6)),
        tables=(wide.new_zeros(4, 3), wide.new_zeros(4, 2)),
    )
    first, drafts = zeros(3), torch.tensor([1, 9, 50])
    for _ in range(2):
        assert ledger.input.copy_step(theirs, own, first, drafts, 2)
        assert own.starts.tolist() == [0, 3, 5, 0]
        assert own.positions.tolist() == [4, 5, 6, 0, 1, 0]
        assert own.tokens.tolist() == [7, 8, 9, 10, 11, 0]
        assert [each.tolist() for each in own.slots] == [[1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 0]]
        assert [each[:2].tolist() for each in own.tables] == [
            [[0, 1, 2], [10, 11, 12]],
            [[0, 5], [10, 15]],
        ]
        assert (first.tolist(), drafts.tolist()) == ([4, 0, 0], [1, 2, 50])
    theirs.lengths[0][1] = 3
    assert not ledger.input.copy_step(theirs, own, first, drafts, 2)
    unknown = attrs.evolve(theirs, lengths=theirs.lengths[1:] * 2)
    assert ledger.input.copy_step(unknown, own, first, drafts, 2)
    theirs.lengths[0][1], theirs.tokens[0] = 2, 70
    assert ledger.input.copy_step(theirs, own, first, drafts, 2)
    assert own.tokens[0] == 70


def engine_buffers(dtype):
    """Buffers of four requests and six rows, of which two requests have two rows each."""
    return StepBuffers(
        starts=torch.tensor([0, 2, 4, 4, 4], dtype=dtype),
        positions=torch.tensor([4, 5, 0, 1, 0, 0]),
        tokens=torch.arange(6, dtype=dtype),
        slots=(torch.arange(6),),
        tables=(torch.zeros(4, 3, dtype=torch.int32),),
        lengths=(torch.tensor([6, 2, 0, 0], dtype=torch.int32),),
    )


@pytest.mark.parametrize("passes", [TorchPasses, NumbaPasses])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"starts": [0, 2, 8_000_000]}, r"got \[0, 2, 8000000\]"),
        ({"starts": [0, 8_000_000, 4]}, "ascending numbers of rows, from 0 to 6"),
        ({"starts": [-3, 2, 4]}, "ascending numbers of rows, from 0 to 6"),
        ({"starts": [0, 6, 6]}, "ascending numbers of rows, from 0 to 6"),
        ({"starts": [0, 2]}, "fewer requests than the step; expected at most 1, got 2"),
        ({"positions": [4, 5, 0]}, "from 0 to 3"),
        ({"tokens": [7, 8, 9]}, "from 0 to 3"),
        ({"slots": ([1, 2, 3],)}, "from 0 to 3"),
        ({"tables": ([[1, 2, 3]],)}, "fewer requests than the step; expected at most 1, got 2"),
        ({"tables": ([[1], [2]],)}, "a table has another width"),
        ({"tables": ([[1] * 9, [2] * 9],)}, "a table has another width"),
        ({"lengths": ([6],)}, "fewer requests than the step; expected at most 1, got 2"),
    ],
)
def test_a_step_outside_its_buffers_is_refused(passes, broken, message):
    """Nothing is read or written outside of them, and nothing is copied."""
    ledger = new_ledger("plain", backend=passes)
    theirs, own = engine_buffers(torch.int32), engine_buffers(torch.int64)
    own = attrs.evolve(own, tokens=zeros(6), lengths=())
    first, drafts = zeros(4), zeros(4)
    assert ledger.input.copy_step(theirs, own, first, drafts, 2)
    for name, given in broken.items():
        real = getattr(theirs, name)
        if isinstance(given, tuple):
            tampered = tuple(torch.tensor(each, dtype=real[0].dtype) for each in given)
        else:
            tampered = torch.tensor(given, dtype=real.dtype)
        theirs = attrs.evolve(theirs, **{name: tampered})
    own.tokens.fill_(-5)
    with pytest.raises(ConfigError, match=f"copy_step: .*{message}.*nothing was copied"):
        ledger.input.copy_step(theirs, own, first, drafts, 2)
    assert (own.tokens == -5).all()
    with pytest.raises(ConfigError, match="fewer requests than the step"):
        ledger.input.copy_step(engine_buffers(torch.int32), own, first, drafts, 5)
