"""Drafts that are trees, and rows that are moved: no false alarm, and each wrong read is named."""

from __future__ import annotations

import pytest
import torch
from kernels_here import ON_GPU
from ledger_pairs import DEVICE, assert_equal_books, pair
from token_slots import CONTEXT, FAULTS, SLOTS, TokenSlots, new_ledger

from kvtxn import AcceptanceError, ConfigError, LayerRef
from kvtxn.audit import Ledger, RecordingLedger, RowGroup, Scrub, StateGroup, Step

__all__ = ["pair"]


@pytest.fixture
def ledgers(pair):
    """Two ledgers of one key for the engine: one in torch, one of the passes that are tested."""
    _, other = pair("plain")
    first = new_ledger("torch", DEVICE)
    return first, new_ledger(type(other.passes), DEVICE, first.books.key)


def said(ledger):
    return [
        (v.step, v.request, v.position, v.slot, v.written_request, v.written_step, v.kind)
        for v in ledger.violations()
    ]


def assert_named(found, wrong):
    """Every violation is a wrong read, and the first ones of each request are all found.

    Of rows that the journal has forgotten, or that were unwritten for the ledger, nobody is named.
    """
    by_place = {each[:4]: each[4:] for each in wrong}
    for *place, writer, step, _ in found:
        assert (writer, step) in ((None, None), by_place[tuple(place)])
    for name in {each[1] for each in wrong}:
        mine = [each[:4] for each in wrong if each[1] == name]
        assert {each for each in mine if each[0] == mine[0][0]} <= {each[:4] for each in found}


@pytest.mark.parametrize("seed", range(4))
def test_no_alarm_is_false(seed):
    """In many steps of trees, with prompts, hits and slots that are used again."""
    ledger = new_ledger("auto", DEVICE)
    engine = TokenSlots([ledger], seed, DEVICE)
    for _ in range(300):
        engine.step()
    assert engine.wrong == ledger.violations() == []
    assert engine.moved > 100
    assert engine.names > 30
    assert ledger.counters()["kvtxn_audit_rows_checked_total"] > 10_000
    assert ledger.unresolved == ledger.refused == 0


def test_the_passes_agree(ledgers):
    engine = TokenSlots(ledgers, 5, DEVICE)
    for _ in range(60 if ON_GPU else 12):
        engine.step()
    assert said(ledgers[0]) == said(ledgers[1]) == engine.wrong == []
    assert engine.moved > 2
    assert_equal_books(*ledgers)
    for name in ("own", "journal"):
        assert torch.equal(*(getattr(each.books, name) for each in ledgers)), name
    assert ledgers[0].fingerprints() == ledgers[1].fingerprints()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_named(fault):
    """By request, position and slot, and by whoever wrote the row that is there."""
    kinds, writers = set(), set()
    for seed in range(6):
        ledger = new_ledger("torch", DEVICE)
        engine = fault([ledger], seed, DEVICE)
        for _ in range(40):
            engine.step()
        found = said(ledger)
        assert_named(found, engine.wrong)
        kinds |= {each[-1] for each in found}
        writers |= {each[4] for each in found}
    assert kinds & {"foreign", "rejected"}
    assert writers != {None}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_passes_find_the_same(ledgers, fault):
    engine = fault(ledgers, 3, DEVICE)
    for _ in range(40 if ON_GPU else 15):
        engine.step()
    one, other = (sorted(map(str, said(each))) for each in ledgers)
    assert one == other
    assert_equal_books(*ledgers)


# -- one step, by hand -----------------------------------------------------------------------------


def numbers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def tree(
    ledger, name="a", first=3, tokens=(9, 5, 6, 5, 7, 8), parents=(7, -1, -1, 0, 1, 2), **other
):
    """A last token and five drafts: 5 and 6 follow it, 5-5, 6-7, and 5-5-8; in slots from 10."""
    count = len(tokens)
    step = Step(
        lines=numbers(-1, ledger.line("a")),
        starts=numbers(0, 0, count),
        first=numbers(0, first),
        tokens=numbers(*tokens),
        drafts=numbers(0, count - 1),
        slots={"rows": torch.arange(10, 10 + count, device=DEVICE)},
        tables={"rows": table(range(first), range(10, 10 + count))},
        table_lines=numbers(0, 1),
        parents=numbers(*parents),
        **other,
    )
    ledger.write_and_check(step)
    return step


def table(*slots):
    """Line 1 of a table has these slots."""
    lines = torch.zeros(2, CONTEXT, dtype=torch.int32, device=DEVICE)
    named = [slot for each in slots for slot in each]
    lines[1, : len(named)] = numbers(*named, dtype=torch.int32)
    return lines


def begun(ledgers, tokens=(1, 2, 3, 9)):
    """Request "a" has the rows of its first three tokens, in slots 0 to 2."""
    for ledger in ledgers:
        ledger.admit("a", tokens)
        step = Step(
            lines=numbers(ledger.line("a")), starts=numbers(0, 3), first=numbers(0),
            tokens=numbers(*tokens[:3]), slots={"rows": numbers(0, 1, 2)},
        )  # fmt: skip
        ledger.write(step)


def go_on(ledger, slots, token, first, name="a"):
    """The next step of a request, whose table has these slots; return what is wrong."""
    step = Step(
        lines=numbers(-1, ledger.line(name)), starts=numbers(0, 0, 1), first=numbers(0, first),
        tokens=numbers(token), slots={"rows": numbers(40)},
        tables={"rows": table(slots, [40])}, table_lines=numbers(0, 1),
    )  # fmt: skip
    ledger.write_and_check(step)
    return [(each[2], each[3], each[-1]) for each in said(ledger)]


def test_the_accepted_rows_are_those_of_the_sampled_tokens(ledgers):
    """They are read where they were moved to; what was not accepted is rejected."""
    begun(ledgers)
    for ledger in ledgers:
        step = tree(ledger)
        ledger.resolve([0, 2], [[-1] * 4, [6, 7, 4, -1]])
        assert ledger.kept(step).tolist()[1] == 2
        ledger.carry({"rows": (numbers(12, 14), numbers(11, 12))})
        assert go_on(ledger, [0, 1, 2, 10, 11, 12], 4, 6) == []
        wrong = [(4, 13, "rejected"), (5, 12, "foreign")]
        assert go_on(ledger, [0, 1, 2, 10, 13, 12], 4, 6) == wrong[:1]
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)


def test_a_lost_move_is_found(ledgers):
    begun(ledgers)
    for ledger in ledgers:
        tree(ledger)
        ledger.resolve([0, 2], [[-1] * 4, [6, 7, 4, -1]])
        assert go_on(ledger, [0, 1, 2, 10, 11, 12], 4, 6) == [
            (4, 11, "rejected"), (5, 12, "foreign"),
        ]  # fmt: skip


def test_more_drafts_are_accepted_than_the_tree_has(ledgers):
    """Those whose tokens are no way in it count as rejected."""
    begun(ledgers)
    for ledger in ledgers:
        step = tree(ledger)
        ledger.resolve([0, 3], [[-1] * 4, [5, 7, 8, 4]])
        assert ledger.kept(step).tolist()[1] == 1
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.own, ledgers[1].books.own)


@pytest.mark.parametrize("accepted", [-1, 0])
def test_nothing_is_accepted(ledgers, accepted):
    begun(ledgers)
    for ledger in ledgers:
        tree(ledger)
        ledger.resolve([0, accepted], [[-1], [4 if accepted == 0 else -1]])
        assert go_on(ledger, [0, 1, 2, 10], 4, 4) == []
        assert (ledger.books.words[11:16] == 1).all()
    assert_equal_books(*ledgers)


def test_a_draft_that_is_computed_for_another_position_is_found(ledgers):
    """And so are those that follow it."""
    begun(ledgers)
    for ledger in ledgers:
        step = tree(ledger, positions=numbers(3, 4, 5, 5, 5, 6))
        assert [each[2:4] for each in said(ledger)] == [(5, 12), (7, 14)]
        ledger.resolve([0, 2], [[-1] * 4, [6, 7, 4, -1]])
        assert ledger.kept(step).tolist()[1] == 2
        ledger.carry({"rows": (numbers(12, 14), numbers(11, 12))})
        assert go_on(ledger, [0, 1, 2, 10, 11, 12], 4, 6) == []  # "a" was told of them
        ledger.admit("b", [1, 2, 3, 9, 6, 7, 4])
        wrong = [(4, 11, "foreign"), (5, 12, "foreign")]
        assert go_on(ledger, [0, 1, 2, 10, 11, 12], 4, 6, "b") == wrong
    assert_equal_books(*ledgers)
    assert torch.equal(ledgers[0].books.journal, ledgers[1].books.journal)


def test_drafts_of_known_positions_take_the_place_of_tokens(ledgers):
    """What was known of them is not known after a tree: only what was sampled is."""
    begun(ledgers, (1, 2, 3, 9, 1, 1, 1))
    for ledger in ledgers:
        tree(ledger)
        ledger.resolve([0, 1], [[-1] * 4, [5, 4, -1, -1]])
        assert go_on(ledger, [0, 1, 2, 10, 11], 4, 5) == []
    assert_equal_books(*ledgers)


def test_a_request_that_ended_before_its_outcome(ledgers):
    """Its drafts are what their tokens say, for whoever has the same; its line may be another's."""
    begun(ledgers)
    for ledger in ledgers:
        tree(ledger)
        ledger.release("a")
        ledger.admit("b", [4, 4, 4, 4, 4, 4, 4])
        ledger.resolve([0, 1], [[-1] * 4, [5, 4, -1, -1]])
        ledger.release("b")
        ledger.admit("a", [1, 2, 3, 9, 5, 5, 8, 4])
        assert go_on(ledger, [0, 1, 2, 10, 11, 13, 15], 4, 7) == []
    assert_equal_books(*ledgers)


#: Rows of two requests, and the drafts among them.
SIZES = [((40, 40), (0, 0)), ((150, 3), (150, 2)), ((9, 290), (7, 260)), ((1, 20), (1, 20))]


def random_tree(draw, rows, drafts, first):
    """Trees of few tokens, with numbers that name no row, and rows computed for no position."""
    total = sum(rows)
    row = torch.cat([torch.arange(number) for number in rows])
    there = row + torch.tensor(first).repeat_interleave(torch.tensor(rows))
    nowhere = torch.rand(total, generator=draw) < 0.02
    parents = torch.randint(0, 1 << 30, (total,), generator=draw) % (row + 3) - 2
    return {
        "starts": torch.tensor([0, rows[0], total]),
        "first": torch.tensor(first),
        "tokens": torch.randint(0, 3, (total,), generator=draw),
        "drafts": torch.tensor(drafts),
        "positions": torch.where(nowhere, -3, there),
        "parents": parents,
    }


def test_random_trees(ledgers):
    """Some have no settled row, or more drafts than a program looks at in one go."""
    draw = torch.Generator().manual_seed(1)
    groups = RowGroup("rows", 1, SLOTS), StateGroup("states", 400)
    sizes = {"max_requests": 4, "max_length": 500, "journal": 700, "device": DEVICE}
    key, kinds = ledgers[0].books.key, [type(each.passes) for each in ledgers]
    one, other = (Ledger(groups, backend=kind, key=key, **sizes) for kind in kinds)
    tokens = torch.randint(0, 3, (40,), generator=draw).tolist()
    for ledger in (one, other):
        ledger.admit("a", tokens, embedded={7: 5, 30: 6})
        ledger.admit("b", tokens)
    for trial, (rows, drafts) in enumerate(SIZES):
        given = random_tree(draw, rows, drafts, [30, 35] if trial else [0, 0])
        slots = torch.randperm(sum(rows), generator=draw).clamp(max=SLOTS + 3).to(DEVICE)
        sampled = torch.randint(0, 3, (2, 5), generator=draw).to(DEVICE)
        for ledger in (one, other):
            step = Step(
                lines=numbers(ledger.line("a"), ledger.line("b")),
                slots={"rows": slots, "states": slots % 390},
                tables={"rows": torch.arange(800, device=DEVICE).view(2, 400).int() % SLOTS},
                **{name: each.to(DEVICE) for name, each in given.items()},
            )
            ledger.write_and_check(step)
            ledger.resolve(step.drafts, sampled)
        for name in ("words", "owners", "facts", "own", "journal"):
            assert torch.equal(*(getattr(each.books, name) for each in (one, other))), (trial, name)
        assert one.fingerprints() == other.fingerprints()
        assert sorted(map(str, said(one))) == sorted(map(str, said(other)))


def test_an_outcome_without_tokens_is_refused(ledgers):
    begun(ledgers)
    for ledger in ledgers:
        tree(ledger)
        with pytest.raises(AcceptanceError, match="trees"):
            ledger.resolve([0, 1])
        ledger.resolve([0, 1], [[-1], [5]])


def test_a_scrub_refuses_trees():
    ledger = new_ledger("torch", DEVICE)
    begun([ledger])
    cells = torch.zeros(SLOTS, 1, 1, 4, device=DEVICE)
    scrub = Scrub(ledger, [LayerRef("layer", cells, cells.clone(), group="rows")])
    step = tree(ledger)
    ledger.resolve([0, 1], [[-1], [5]])
    with pytest.raises(ConfigError, match="tree"):
        scrub.seal(step, [0, 1])


def test_a_recording_knows_which_drafts_were_kept():
    ledger = new_ledger("auto", DEVICE, kind=RecordingLedger)
    begun([ledger])
    tree(ledger)
    ledger.resolve([0, 2], [[-1] * 4, [6, 7, 4, -1]])
    recording = ledger.recording()
    runs = [recording["runs"][at : at + 7] for at in range(0, len(recording["runs"]), 7)]
    told = [(recording["happenings"][run[1]], *run[3:5]) for run in runs if run[0] == 5]
    assert told == [("rejected", 11, 1), ("kept", 12, 1), ("rejected", 13, 1), ("kept", 14, 1),
                    ("rejected", 15, 1)]  # fmt: skip
    assert recording["steps"][-1] == [1, 6, 5, 2]
