"""Rows with a sliding window, beside a toy of SGLang: their slots are those of another pool."""

from __future__ import annotations

import pytest
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin import starting
from kvtxn.integrations.sglang_plugin.seam.pools import WINDOWS, layer_refs, slot_spaces
from toy_pools import WINDOW
from toy_sglang import ToySglang, counters_of_clean_steps, decodes

DRAFTS = [(0, False), (3, False), (5, True)]


@pytest.mark.parametrize("kind", ["windows", "pure"])
@pytest.mark.parametrize(("drafts", "trees"), DRAFTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_clean_steps_give_no_alarm(hooks, kind, drafts, trees, overlap):
    """Rows leave windows, and the tree gives their slots back, and gets some again."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, overlap=overlap, kind=kind, seed=3)
    toy.retracts = 0.1
    for _ in range(3):
        toy.serve(14)
        assert toy.flush()
    counted = counters_of_clean_steps(hooks)
    assert counted["kvtxn_audit_rows_checked_total"] > 2000
    assert toy.events["evicted"]
    assert bool(toy.events["hits"]) == (kind == "windows")


def test_the_tree_gives_slots_of_windows_back(hooks):
    """Hits end where a window's rows are there, and lost ones come back with another request."""
    toy = ToySglang(hooks.around(), kind="windows", seed=3)
    toy.serve(30)
    assert toy.events["tombs"] > 20
    assert toy.events["hits"] > 20
    assert hooks.report()["violations"] == []


# -- faults ----------------------------------------------------------------------------------


def places(toy, batch, number):
    req = batch.reqs[number]
    return req.rid, toy.row(req).tolist(), batch.before[number]


def left_too_early(toy, batch, back):
    """A row gives its slot back while a window has it."""
    rid, line, first = places(toy, batch, 0)
    toy.token_to_kv_pool_allocator.free_swa([line[first - back]])
    return {"request": rid, "position": first - back, "slot": 0, "kind": "unwritten"}


def another_slot(toy, batch, back):
    """The map leads to another request's row."""
    mapping = toy.token_to_kv_pool_allocator.mapping
    rid, line, first = places(toy, batch, 0)
    other, theirs, end = places(toy, batch, 1)
    slot = mapping[line[first - back]] = int(mapping[theirs[end - 1]])
    writer = {"kind": "foreign", "written_request": other}
    return {"request": rid, "position": first - back, "slot": slot, **writer}


def given_twice(toy, batch, back):
    """A slot is given to one more row, which takes the place of the first one's."""
    mapping = toy.token_to_kv_pool_allocator.mapping
    rid, line, first = places(toy, batch, 0)
    writer, theirs, end = places(toy, batch, 1)
    slot = mapping[theirs[end]] = int(mapping[line[first - back]])
    other = {"kind": "foreign", "written_request": writer}
    return {"request": rid, "position": first - back, "slot": slot, **other}


def no_slot(toy, batch, back):
    """A row gets no slot of the window: the kernels write it to that of padding."""
    rid, line, first = places(toy, batch, 0)
    toy.token_to_kv_pool_allocator.free_swa([line[first]])
    return {"request": rid, "position": first, "slot": 0, "kind": "unwritten"}


def serves_with(toy, hooks, plant, back):
    """Serve, and plant a fault once; return what has to be said of it, and what was said."""
    toy.retracts = toy.aborts = 0

    def fits(batch):
        late = decodes(batch, 12)
        assert not late or hooks.report()["violations"] == []
        return late

    planted = toy.plants(lambda toy, batch: plant(toy, batch, back), fits)
    toy.serve(12)
    (place,) = planted
    return place, hooks.report()["violations"]


@pytest.mark.parametrize("plant", [left_too_early, another_slot, given_twice, no_slot])
@pytest.mark.parametrize("back", [1, WINDOW])
@pytest.mark.parametrize(("drafts", "trees"), DRAFTS)
def test_a_fault_of_the_window_is_found(hooks, plant, back, drafts, trees):
    """In its group, by request, position, slot and writer, up to the window's last row."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, kind="windows", seed=4)
    place, found = serves_with(toy, hooks, plant, back)
    expected = {"group": WINDOWS, **place}
    assert any(expected.items() <= each.items() for each in found), (expected, found[:2])
    assert {each["group"] for each in found} == {WINDOWS}


@pytest.mark.parametrize(("drafts", "trees"), DRAFTS)
def test_what_is_behind_the_window_is_nobodys(hooks, drafts, trees):
    """SGLang gives such slots back, and no query reads them."""
    toy = ToySglang(hooks.around(), drafts=drafts, trees=trees, kind="windows", seed=4)
    assert serves_with(toy, hooks, left_too_early, WINDOW + 1)[1] == []


def test_a_hit_behind_rows_that_have_left_is_found(hooks, monkeypatch):
    """A tree that does not look whether the window's rows before the hit are there."""
    toy = ToySglang(hooks.around(), kind="windows", seed=2)
    toy.retracts = toy.aborts = 0
    prompt = [*range(1, 17)]
    toy.offer(prompt, 3)
    toy.serve(0)
    freed = [slot for key, slot in toy.tree_cache.slots.items() if 12 < len(key) < 15]
    toy.token_to_kv_pool_allocator.free_swa(freed)
    monkeypatch.setattr(toy.tree_cache, "mapping", None)
    reader = toy.offer(prompt, 3)
    toy.serve(0)
    found = hooks.report()["violations"]
    assert {each["request"] for each in found} == {reader.rid}
    assert {(each["group"], each["position"]) for each in found} == {(WINDOWS, 11), (WINDOWS, 12)}


# -- bytes -----------------------------------------------------------------------------------


def test_bytes_are_compared_in_both_pools(on_a_cpu):
    """A changed row is found by its layer, and its slot in its pool."""
    hooks = starting.Hooks(AuditSettings(audit="bytes", audit_every=1))
    toy = ToySglang(hooks.around(), kind="windows", seed=4)
    names = {ref.name: ref.group for ref in layer_refs(slot_spaces(toy))}
    assert {n: g == WINDOWS for n, g in names.items()} == {
        f"layers.{number}": number % 2 == 0 for number in range(4)
    }

    def changed(toy, batch, back):
        rid, line, first = places(toy, batch, 0)
        slot = int(toy.token_to_kv_pool_allocator.mapping[line[first - back]])
        toy.token_to_kv_pool_allocator.pool.swa_kv_pool.v_buffer[1][slot, 0, 2] += 1
        return {"request": rid, "position": first - back, "slot": slot, "layer": "layers.2"}

    place, found = serves_with(toy, hooks, changed, 2)
    assert any(place.items() <= each.items() for each in found)
    assert {(each["kind"], each["slot"]) for each in found} == {("changed", place["slot"])}


# -- left out --------------------------------------------------------------------------------


def test_attention_by_chunks_leaves_the_second_pool_out(hooks, caplog):
    """It is not known which rows such a query reads; all other rows are watched."""
    toy = ToySglang(hooks.around(), kind="windows", seed=4)
    toy.model_config.attention_chunk_size = 8
    assert serves_with(toy, hooks, another_slot, 1)[1] == []
    counted = hooks.report()["counters"]
    assert counted["kvtxn_audit_unwatched_groups"] == 1
    assert counted["kvtxn_audit_rows_checked_total"] > 1000
    assert "rows of attention by chunks are not followed yet" in caplog.text
