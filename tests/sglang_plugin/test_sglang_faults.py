"""Faults planted into the toy's batches, table, tree and outcomes are found, with their place."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting
from toy_sglang import VOCABULARY, ToySglang, decodes


@attrs.define
class Planted:
    """Where a fault is, and what has to be said of it; None: it does not matter."""

    request: str
    position: int
    slot: int | None = None
    kinds: tuple[str, ...] = ("foreign", "unwritten", "rejected")
    writer: str | None = None
    differs: str | None = None


def places(toy, batch, number):
    """A request of a batch: its name, its line, the position and the number of its first row."""
    req, first = batch.reqs[number], batch.before[number]
    row = number * (batch.ends[number] - first)
    return req.rid, toy.row(req), first, row


def wrong_slot(toy, batch):
    """The row is written to another slot than the table says."""
    rid, line, first, row = places(toy, batch, 0)
    batch.forward_batch.out_cache_loc[row] = toy.token_to_kv_pool_allocator.free_slots[-1]
    return Planted(rid, first, int(line[first]))


def lost_write(toy, batch):
    """The row is written to the slot of padding."""
    rid, line, first, row = places(toy, batch, 0)
    batch.forward_batch.out_cache_loc[row] = 0
    return Planted(rid, first, int(line[first]))


def foreign_line(toy, batch):
    """A place of the table leads to another request's row."""
    rid, line, first, _ = places(toy, batch, 0)
    other, theirs, end, _ = places(toy, batch, 1)
    line[first - 1] = theirs[end - 1]
    return Planted(rid, first - 1, int(theirs[end - 1]), ("foreign",), other)


def swapped_lines(toy, batch):
    """Two requests read each other's line."""
    rid, _, first, _ = places(toy, batch, 0)
    lines = batch.forward_batch.req_pool_indices
    lines[[0, 1]] = lines[[1, 0]]
    return Planted(rid, first)


def off_by_one(toy, batch):
    """The last rows of the table are those of the positions before."""
    rid, line, first, _ = places(toy, batch, 0)
    line[first - 2 : first] = line[first - 3 : first - 1].clone()
    return Planted(rid, first - 1, int(line[first - 1]), ("foreign",), None, "position")


def given_twice(toy, batch):
    """A slot is given to one more request, whose row takes the place of the first one's."""
    rid, line, first, _ = places(toy, batch, 0)
    writer, theirs, end, row = places(toy, batch, 1)
    slot = int(line[first - 1])
    theirs[end] = batch.forward_batch.out_cache_loc[row] = slot
    return Planted(rid, first - 1, slot, ("foreign",), writer)


def wrong_token(toy, batch):
    """A row is computed of another token than the one that was sampled."""
    rid, line, first, row = places(toy, batch, 0)
    ids = batch.forward_batch.input_ids
    ids[row] = ids[row] % (VOCABULARY - 1) + 1
    return Planted(rid, first, int(line[first]), ("foreign",), rid, "tokens")


def wrong_position(toy, batch):
    """A row is computed for the next position."""
    rid, line, first, row = places(toy, batch, 0)
    batch.forward_batch.positions[row] += 1
    return Planted(rid, first, int(line[first]), ("foreign",), rid)


def padding_read(toy, batch):
    """A place of the table leads to the slot of padding."""
    rid, line, first, _ = places(toy, batch, 0)
    line[first - 1] = 0
    return Planted(rid, first - 1, 0)


def accepts_one_more(toy, batch):
    """A rejected draft counts as accepted, for SGLang and for whoever listens."""
    number = next((n for n, kept in enumerate(batch.accepted) if kept <= toy.drafts), None)
    if number is None:
        return None
    rid, line, first, _ = places(toy, batch, number)
    position = first + batch.accepted[number]
    batch.accepted[number] += 1
    return Planted(rid, position, int(line[position]), ("rejected", "foreign"), rid)


def length_one_less(toy, batch):
    """The next step begins a row too early: its first token is one position before its own."""
    number = next((n for n, kept in enumerate(batch.accepted) if kept > 1), None)
    if number is None:
        return None
    rid, _, first, _ = places(toy, batch, number)
    toy.too_short = batch.reqs[number]
    return Planted(rid, first + batch.accepted[number] - 1, None, ("foreign",), rid)


def moved(toy, batch):
    """The first row that an accepted draft is moved from: its request and position, or None."""
    width = toy.drafts + 1
    for number, kept in enumerate(batch.accepted):
        for depth in range(1, kept):
            target, source = (each[number * width + depth] for each in batch.moves)
            if target != source:
                return number, depth, int(target), int(source)
    return None


def lost_move(toy, batch):
    """No accepted row of a tree is moved to the front."""
    found = moved(toy, batch)
    if found is None:
        return None
    number, depth, slot, _ = found
    batch.moves[0].zero_()
    rid, _, first, _ = places(toy, batch, number)
    return Planted(rid, first + depth, slot, ("rejected", "foreign"), rid)


def wrong_branch(toy, batch):
    """The row of another draft is moved to the front."""
    found = moved(toy, batch)
    if found is None:
        return None
    number, depth, slot, source = found
    rid, line, first, _ = places(toy, batch, number)
    width = toy.drafts + 1
    others = [each for each in line[first + 1 : first + width].tolist() if each != source]
    batch.moves[1][number * width + depth] = others[-1]
    return Planted(rid, first + depth, slot, ("rejected", "foreign"))


DECODE = [
    *(wrong_slot, lost_write, foreign_line, swapped_lines, off_by_one),
    *(given_twice, wrong_token, wrong_position, padding_read),
]
CASES = [(plant, drafts, False) for plant in DECODE for drafts in (0, 3)]
CASES += [(plant, 3, False) for plant in (accepts_one_more, length_one_less)]
CASES += [(plant, 5, True) for plant in (*DECODE, lost_move, wrong_branch)]


@pytest.mark.parametrize(
    ("plant", "drafts", "trees"), CASES, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_planted_fault_is_found(hooks, plant, drafts, trees):
    """By request, position, slot and writer, in one of the kinds that it can be."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, seed=4)
    toy.retracts = toy.aborts = 0

    def fits(batch):
        late = decodes(batch) and toy.events["steps"] > 8
        assert not late or hooks.report()["violations"] == []
        return late

    planted = toy.plants(plant, fits)
    toy.serve(12)
    (place,) = planted
    found = hooks.report()["violations"]
    fits = [
        each
        for each in found
        if (each["request"], each["position"]) == (place.request, place.position)
        and each["kind"] in place.kinds
        and place.slot in (None, each["slot"])
        and place.writer in (None, each["written_request"])
        and place.differs in (None, each["differs"])
    ]
    assert fits, (place, found[:3])


def test_neighbouring_rows_are_one_line_of_the_log(hooks, caplog):
    """A slot is a block here, and each row of a wrong line of the table is a wrong one."""
    toy = ToySglang(hooks.around(), seed=4)
    toy.retracts = toy.aborts = 0
    toy.plants(swapped_lines, decodes)
    toy.serve(6)
    violations = hooks.report()["violations"]
    lines = [each for each in caplog.messages if "audit_violation" in each]
    assert len(violations) > 20
    assert len(lines) < 10
    assert sum("last_position=" in each for each in lines) >= 2


def test_a_node_of_the_tree_whose_slots_were_freed_is_found(hooks):
    """The next hit reads what others have written there since."""
    toy = ToySglang(hooks.around(), seed=2)
    toy.retracts = toy.aborts = 0
    prompt = [*range(1, 17)]
    toy.offer(prompt, 3)
    toy.serve(0)
    freed = [slot for key, slot in toy.tree_cache.slots.items() if 4 < len(key) < 9]
    toy.token_to_kv_pool_allocator.free_slots.extendleft(freed)
    writer = toy.offer([40] * 12, 3)
    toy.serve(0)
    reader = toy.offer(prompt, 3)
    toy.serve(0)
    found = hooks.report()["violations"]
    assert [(each["request"], each["written_request"], each["differs"]) for each in found] == [
        (reader.rid, writer.rid, each["differs"]) for each in found
    ]
    assert {each["slot"] for each in found} == set(freed)
    assert {each["position"] for each in found} == {3, 4, 5, 6}


def test_a_flush_that_the_tree_does_not_hear_of_is_found(hooks, monkeypatch):
    """The rows of before are nobody's, and some slots get other rows."""
    toy = ToySglang(hooks.around(), seed=2)
    toy.retracts = toy.aborts = 0
    prompt = [*range(1, 17)]
    toy.offer(prompt, 3)
    toy.serve(0)
    monkeypatch.setattr(toy.tree_cache, "reset", lambda: None)
    assert toy.flush()
    reader = toy.offer(prompt, 3)
    toy.serve(0)
    found = hooks.report()["violations"]
    assert {each["request"] for each in found} == {reader.rid}
    assert {each["kind"] for each in found} == {"unwritten", "foreign"}
    assert {each["position"] for each in found} == {*range(15)}


def test_a_flush_that_is_refused_forgets_nothing(hooks):
    """Requests run on, and their rows are right ones."""
    toy = ToySglang(hooks.around(), seed=2)
    toy.offer([*range(1, 9)], 5)
    for _ in range(3):
        toy.step()
    assert not toy.flush()
    toy.serve(0)
    assert hooks.report()["violations"] == []


def serves_with_other_weights(toy, hooks, tell):
    """Serve requests, change the weights, tell of it or not, and serve more."""
    toy.retracts = toy.aborts = 0
    toy.serve(8)
    with torch.no_grad():
        toy.tp_worker.model_runner.model.weight += 1
    tell()
    toy.serve(12)
    return hooks.report()


def test_weights_that_nobody_told_of_are_found(hooks):
    """A sample of the parameters shows the change."""
    toy = ToySglang(hooks.around(), seed=2)
    report = serves_with_other_weights(toy, hooks, lambda: None)
    assert "weights" in {each["kind"] for each in report["violations"]}


def test_an_update_that_keeps_the_cache_makes_its_rows_older(on_a_cpu):
    """SGLang says that it has updated them; rows that are read since are of earlier weights."""
    hooks = starting.Hooks(AuditSettings(audit="ledger", stale="alarm"))
    toy = ToySglang(hooks.around(), seed=2)
    update = partial(hooks.weights_updated, lambda updater, request: (True, ""), None, None)
    toy.offer(prompt := [*range(1, 17)], 3)
    toy.serve(0)
    report = serves_with_other_weights(toy, hooks, update)
    assert report["violations"] == []  # other prompts
    toy.offer(prompt, 3)
    toy.serve(0)
    assert {each["kind"] for each in hooks.report()["violations"]} == {"stale"}


def test_an_update_with_a_flush_is_no_fault(hooks):
    """As SGLang does it, unless its user does not want that."""
    toy = ToySglang(hooks.around(), seed=2)
    assert serves_with_other_weights(toy, hooks, toy.flush)["violations"] == []
    assert toy.events["flushed"] == 1
