"""``Ledger.carry`` and ``leave``: what moves, or is written, as the device alone knows."""

from __future__ import annotations

import pytest
import torch

from kvtxn import ConfigError, LayerRef
from kvtxn.audit import Ledger, RecordingLedger, RowGroup, Scrub, StateGroup, Step

GROUPS = (RowGroup("a", 4, 8, pool="p"), StateGroup("s", 8, pool="p"))


def step_of(ledger, name, first, source, target, token=None):
    return Step(
        lines=torch.tensor([ledger.line(name)]),
        starts=torch.tensor([0, 1]),
        first=torch.tensor([first]),
        tokens=torch.tensor([[5, 6, 7][first] if token is None else token]),
        slots={"s": torch.tensor([target])},
        sources={"s": torch.tensor([source])},
    )


def begun(backend="auto"):
    """Request "r" has left the state after its first token in block 3."""
    ledger = Ledger(GROUPS, max_requests=4, max_length=30, backend=backend)
    for name, tokens in (("r", [5, 6, 7]), ("t", [5, 6, 7]), ("u", [4, 6, 7])):
        ledger.admit(name, tokens)
    ledger.write(step_of(ledger, "r", 0, -1, 3))
    return ledger


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(("name", "wrong"), [("r", []), ("t", []), ("u", ["foreign"])])
def test_a_copy_is_the_state_that_it_was(backend, name, wrong):
    """Of whoever has the same tokens; what is not copied stays, wherever else it points to."""
    ledger = begun(backend)
    before = ledger.books.words.clone()
    ledger.carry({"s": (ints(-1, 3, 2, 9, 6), ints(0, 5, -1, 6, 6))})
    changed = (ledger.books.words != before).nonzero().flatten().tolist()
    assert changed == [5 * 4]
    ledger.write(step_of(ledger, name, 1, 5, 5))
    assert [v.found for v in ledger.violations()] == wrong


def test_a_state_that_nobody_wrote_is_unwritten_where_it_is_copied_to():
    ledger = begun()
    ledger.carry({"s": (ints(4), ints(3))})
    ledger.write(step_of(ledger, "r", 1, 3, 3))
    assert [v.found for v in ledger.violations()] == ["unwritten"]


def test_the_checksum_of_what_was_there_is_gone():
    ledger = begun()
    scrub = Scrub(ledger, [LayerRef.recurrent("layer", torch.ones(8, 3), group="s")], every=1)
    for block in (3, 5):
        step = step_of(ledger, "r", 0, -1, block)
        ledger.write(step)
        scrub.seal(step)
    ledger.carry({"s": (ints(3), ints(5))})
    assert scrub.books.seals[[12, 20]].ne(0).tolist() == [True, False]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"b": (ints(1), ints(2))}, "is not a group of the ledger"),
        ({"a": (ints(1, 2), ints(2, 3)), "s": (ints(1), ints(2))}, "do not fit"),
        ({"s": (ints(1), ints(2, 3))}, "do not fit"),
        ({"s": (torch.tensor([1.0]), ints(2))}, "source"),
        ([], "copies"),
    ],
)
def test_what_does_not_fit_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        begun().carry(given)


def rows_of(ledger, name, first, tokens, slots, table):
    """Write and check a step of rows alone."""
    step = Step(
        lines=torch.tensor([ledger.line(name)]),
        starts=torch.tensor([0, len(tokens)]),
        first=torch.tensor([first]),
        tokens=torch.tensor(tokens),
        slots={"a": torch.tensor(slots)},
        tables={"a": torch.tensor([table], dtype=torch.int32)},
    )
    ledger.write_and_check(step)
    return [
        (v.kind, v.position, v.slot, v.written_request, v.written_position)
        for v in ledger.violations()
    ]


def of_rows(backend="auto", kind=Ledger, **named):
    """Request "r" has its first four rows in block 2, and "u" has in block 5."""
    ledger = kind(GROUPS, max_requests=4, max_length=30, backend=backend, **named)
    for name, tokens, block in (("r", [5, 6, 7, 8], 2), ("u", [4, 6, 7, 8], 5)):
        ledger.admit(name, [*tokens, 9])
        slots = range(4 * block, 4 * block + 4)
        assert rows_of(ledger, name, 0, tokens, slots, [block]) == []
    return ledger


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_rows_are_the_rows_that_they_were(backend):
    """From one block's slots to another's, in any order; what lies outside is no slot."""
    ledger = of_rows(backend)
    before = ledger.books.words.clone()
    ledger.carry({"a": (ints(8, 9, -3, 10, 11, 32, 9), ints(28, 29, 5, 30, 31, 6, 9))})
    changed = (ledger.books.words != before).nonzero().flatten().tolist()
    assert changed == [28, 29, 30, 31]
    assert rows_of(ledger, "r", 4, [9], [12], [7, 3]) == []


def test_rows_of_one_copy_make_room_for_each_other():
    """All are read before one is written, as in a move of accepted rows to the front."""
    ledger = of_rows()
    ledger.carry({"a": (ints(9, 10, 11, 8), ints(8, 9, 10, 11))})
    ledger.carry({"a": (ints(11, 8, 9, 10), ints(8, 9, 10, 11))})
    assert rows_of(ledger, "r", 4, [9], [12], [2, 3]) == []


@pytest.mark.parametrize("journal", [1 << 16, 12])
def test_a_row_that_is_copied_from_a_wrong_slot_is_found(journal):
    """With its position, its slot, and whoever wrote the row."""
    ledger = of_rows(journal=journal)
    ledger.carry({"a": (ints(21, 10), ints(9, 11))})
    wrong = [("foreign", 1, 9, "u", 1), ("foreign", 3, 11, "r", 2)]
    assert rows_of(ledger, "r", 4, [9], [12], [2, 3]) == wrong


def test_rows_and_states_are_copied_in_one_call():
    ledger = of_rows()
    ledger.admit("t", [5, 6, 7])
    ledger.write(step_of(ledger, "t", 0, -1, 3))
    ledger.carry({"a": (ints(8), ints(28)), "s": (ints(3), ints(4))})
    words = ledger.books.words
    assert words[[8, 12]].tolist() == words[[28, 16]].tolist()
    ledger.write(step_of(ledger, "t", 1, 4, 4))
    assert ledger.violations() == []


def test_a_recording_has_the_rows_that_were_copied():
    ledger = of_rows(kind=RecordingLedger)
    ledger.carry({"a": (ints(-1, 8, 9, 10, 11), ints(2, 28, 29, 10, 30))})
    recording = ledger.recording()
    copied = recording["happenings"].index("copied")
    runs = [recording["runs"][at : at + 7] for at in range(0, len(recording["runs"]), 7)]
    assert [run for run in runs if run[1] == copied] == [[5, copied, 0, 28, 3, -1, -1]]


def drafted(ledger, kept):
    """A step of one token and two drafts, whose state is written once so many drafts are kept."""
    step = Step(
        lines=torch.tensor([ledger.line("r"), -1]),
        starts=torch.tensor([0, 3, 3]),
        first=torch.tensor([1, 0]),
        tokens=torch.tensor([6, 8, 9]),
        drafts=torch.tensor([2, 0]),
        slots={"s": torch.tensor([-1, -1, -1])},
        sources={"s": torch.tensor([3, -1])},
    )
    ledger.write(step)
    ledger.check(step)
    ledger.resolve([kept, 0], [[*[8, 9, 7][:kept], 4], [-1] * (kept + 1)])
    return step


def read(ledger, first, token):
    ledger.write(step_of(ledger, "r", first, 3, 3, token=token))
    return [(v.kind, v.position, v.found) for v in ledger.violations()]


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_state_is_left_after_the_kept_drafts(backend, kept):
    """One that nobody has left is the old one, and so is one that is left for nobody."""
    for left, wrong in ((3, []), (None, [("state", 1 + kept, "foreign")]), (-1, None)):
        ledger = Ledger(GROUPS, max_requests=4, max_length=30, backend=backend)
        ledger.admit("r", [5, 6])
        ledger.write(step_of(ledger, "r", 0, -1, 3))
        step = drafted(ledger, kept)
        before = ledger.books.words.clone()
        if left is not None:
            ledger.leave(step.lines, {"s": ints(left, 5)})
        changed = (ledger.books.words != before).nonzero().flatten().tolist()
        assert changed == ([3 * 4] if left == 3 else [])
        found = read(ledger, 2 + kept, 4)
        assert found == ([("state", 1 + kept, "foreign")] if wrong is None else wrong)


def blamed(ledger):
    """Who wrote what a violation is about, as far as it is known."""
    [found] = ledger.violations()
    assert found.kind == "state"
    return found.written_request, found.written_step, found.written_position, found.written_for


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_nobody_is_blamed_for_a_state_that_was_copied(backend):
    """Neither who wrote the block before, nor who wrote what was copied."""
    ledger = begun(backend)
    ledger.write(step_of(ledger, "u", 0, -1, 5, token=4))
    ledger.carry({"s": (ints(5), ints(3))})
    ledger.write(step_of(ledger, "r", 1, 3, 3))
    assert blamed(ledger) == (None, None, None, ())


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("length", [None, 1])
def test_a_state_that_was_left_names_who_left_it(backend, length):
    """With its step, and the last token that the state has taken in."""
    ledger = Ledger(GROUPS, max_requests=4, max_length=30, backend=backend)
    for name, tokens in (("r", [5, 6]), ("u", [4, 6, 7])):
        ledger.admit(name, tokens)
        ledger.write(step_of(ledger, name, 0, -1, 3 if name == "r" else 4, token=tokens[0]))
    step = drafted(ledger, 1)
    ledger.leave(step.lines, {"s": ints(4, -1)}, None if length is None else ints(length, -1))
    ledger.write(step_of(ledger, "u", 1, 4, 4))
    written = (2, (5, 6, 8)) if length is None else (0, (5,))
    assert blamed(ledger) == ("r", 3, *written)


@pytest.mark.parametrize(
    ("lines", "lengths"),
    [([0], None), (ints(99), None), (ints(-3), None), (ints(0), [1]), (ints(0), ints(-1000))],
    ids=["list", "beyond", "before", "lengths-in-a-list", "no-length"],
)
def test_lines_and_lengths_point_nowhere_else(lines, lengths):
    """Numbers in a list count like those of a tensor; what there is not leaves nothing."""
    ledger = begun()
    ledger.resolve([0])
    before = ledger.books.words.clone()
    ledger.leave(lines, {"s": ints(6)}, lengths)
    changed = (ledger.books.words != before).nonzero().flatten().tolist()
    assert changed == ([6 * 4] if isinstance(lines, list) or isinstance(lengths, list) else [])


def test_blocks_that_do_not_fit_the_lines_are_refused():
    ledger = begun()
    with pytest.raises(ConfigError, match="do not fit together"):
        ledger.leave(ints(0, 1), {"s": ints(1)})
    with pytest.raises(ConfigError, match="is not a group of states"):
        ledger.leave(ints(0), {"a": ints(1)})
