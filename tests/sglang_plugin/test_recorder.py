"""What the recorder writes beside a toy of SGLang, replayed: trees, windows, states, and faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvtxn.integrations.sglang_plugin.seam.pools import ROWS, STATES, WINDOWS
from replay import RECORDED, Replay, events
from toy_sglang import ToySglang
from toy_states import Mamba2AttnBackend, ToyHybrid

TREE = {"drafts": 5, "trees": True}
COPIES = {"strategy": "no_buffer", "overlap": False}
#: By name: a toy, and its arguments.
TOYS = {
    "plain": (ToySglang, {}),
    "chain": (ToySglang, {"drafts": 3}),
    "tree": (ToySglang, TREE),
    "windows": (ToySglang, {"kind": "windows"}),
    "windows-tree": (ToySglang, {"kind": "windows", **TREE}),
    "pure": (ToySglang, {"kind": "pure"}),
    "states": (ToyHybrid, {}),
    "copies": (ToyHybrid, {**COPIES, "linear": Mamba2AttnBackend}),
    "commits": (ToyHybrid, {"drafts": 3}),
    "states-tree": (ToyHybrid, TREE),
}
STEPS = 120


@pytest.fixture
def recording(monkeypatch, tmp_path):
    """A function that lets the recorder run beside a toy, and returns the shortened events."""
    for folder in (RECORDED, Path(__file__).parent.parent / "gpu"):
        monkeypatch.syspath_prepend(folder)

    def record(name):
        path = tmp_path / f"{name}.jsonl"
        recorder = __import__("sglang_recorder").Recorder(path, STEPS + 20)
        kind, more = TOYS[name]
        toy = kind(
            {
                "ModelRunner.forward": recorder.forward,
                "Scheduler.run_batch": recorder.run_batch,
                "Scheduler.flush_cache": recorder.flushed,
                "common.release_kv_cache": recorder.released,
            },
            seed=3,
            **more,
        )
        while recorder.steps > 0:
            toy.serve(14)
            for req in toy.done[-8:] if kind is ToyHybrid else ():  # they go on with what was said
                if len(req.tokens) < 60:
                    toy.offer([*req.tokens, 1, 2, 3], 8)
            toy.serve(0)
            assert toy.flush()
        recorder.file.close()
        short = str(tmp_path / f"{name}.jsonl.xz")
        __import__("trim").main(str(path), short, STEPS)
        monkeypatch.setattr(sys.modules["replay"], "RECORDED", tmp_path)
        return events(name)

    return record


@pytest.mark.parametrize("name", TOYS)
def test_what_the_recorder_writes_can_be_replayed(hooks, recording, tmp_path, name):
    """The plug-in that made the recordings runs beside the toy here."""
    replay = Replay(hooks, recording(name))
    replay.run()
    assert replay.steps == STEPS
    report = hooks.report()
    assert report["violations"] == []
    counted = report["counters"]
    assert counted["kvtxn_audit_active"] == 1
    assert counted["kvtxn_audit_unjudged_total"] == 0
    assert counted["kvtxn_audit_unwatched_groups"] == 0
    assert counted["kvtxn_audit_rows_checked_total"] > 2000
    hybrid = TOYS[name][0] is ToyHybrid
    assert (counted["kvtxn_audit_states_checked_total"] > 100) == hybrid
    assert (tmp_path / f"{name}.jsonl.xz").stat().st_size < 50_000


def test_recordings_keep_only_what_an_engine_has(recording):
    """So one of a plain engine is as it was before others could be recorded."""
    kinds = {
        "tree": {"children", "siblings"}, "windows": {"map"},
        "states": {"state_slots", "keeps", "mamba_clear_indices", "mamba_track_indices"},
    }  # fmt: skip
    every = set().union(*kinds.values())
    for name, kept in {"plain": set(), "chain": set(), **kinds}.items():
        recorded = recording(name)
        names = set().union(*recorded[1:])
        assert names & every == kept
        assert {*recorded[0]} & {"windows", "states"} == {name} & {"windows", "states"}


# -- faults ----------------------------------------------------------------------------------


def going_on(replay, forward):
    """The numbers of a step's requests that the next forward has, too."""
    forwards = [each for each in replay.recorded if each["event"] == "forward"]
    at = next(number for number, each in enumerate(forwards) if each is forward)
    after = forwards[at + 1]["rids"] if at + 1 < len(forwards) else []
    return [number for number, rid in enumerate(forward["rids"]) if rid in after]


def accepted(step):
    """The accepted rows of each request: the number of its move, and its number in the tree."""
    forward, moved = step["forward"], step["moved"]
    width = forward["draft_token_num"]
    rows = {slot: at for at, slot in enumerate(forward["out_cache_loc"])}
    found = [[] for _ in forward["rids"]]
    for at, (target, source) in enumerate(zip(moved["target"], moved["source"], strict=True)):
        if target:
            found[rows[target] // width].append((at, rows[source] % width))
    return found


def wrong_parent(replay, step):
    """The last accepted row of a tree follows a row of another branch, at the place of its own."""
    paths, forward = accepted(step), step["forward"]
    width = forward["draft_token_num"]
    for number in going_on(replay, forward):
        (_, parent), (at, node) = ((0, 0), (0, 0), *paths[number])[-2:]
        positions = forward["positions"][number * width :][:width]
        mates = {row for row in range(width) if positions[row] == positions[parent]} - {parent}
        if not mates:
            continue
        children, siblings = forward["children"][number], forward["siblings"][number]
        family = children if node in children else siblings
        family[family.index(node)] = siblings[node]
        siblings[node], children[min(mates)] = children[min(mates)], node
        return {"request": forward["rids"][number], "slot": step["moved"]["target"][at]}
    return None


def wrong_move(replay, step):
    """A rejected row is moved in the place of an accepted one."""
    paths, forward = accepted(step), step["forward"]
    width = forward["draft_token_num"]
    for number in going_on(replay, forward):
        rejected = {*range(width)} - {node for _, node in paths[number]}
        if len(paths[number]) < 2 or not rejected:
            continue
        at, _ = paths[number][-1]
        step["moved"]["source"][at] = forward["out_cache_loc"][number * width + max(rejected)]
        return {"request": forward["rids"][number], "slot": step["moved"]["target"][at]}
    return None


def wrong_entry(replay, step):
    """The map leads a row of the first request to the window's row of the second."""
    forward, pool = step["forward"], replay.token_to_kv_pool_allocator.get_kvcache()
    own, other = (
        int(replay.req_to_token_pool.req_to_token[line, end - 2])
        for line, end in list(zip(forward["req_pool_indices"], forward["seq_lens"], strict=True))[:2]
    )
    slot = int(pool.full_to_swa_index_mapping[other])
    forward["map"] = [*forward.get("map", ()), [own, [slot]]]
    return {"request": forward["rids"][0], "slot": slot, "group": WINDOWS}


def foreign_state(replay, step):
    """The first request continues the state of the second."""
    slots = step["forward"]["state_slots"]
    slots[0] = slots[1]
    return {"request": step["forward"]["rids"][0], "slot": slots[1], "group": STATES}


def lost_copy(replay, step):
    """The state of a hit is not copied."""
    forward = step["forward"]
    copied = forward.pop("mamba_cow_src_indices", None) and forward.pop("mamba_cow_dst_indices")
    if not copied:
        return None
    number = forward["state_slots"].index(copied[0])
    return {"request": forward["rids"][number], "slot": copied[0], "group": STATES}


def wrong_commit(replay, step):
    """The state of one row less is committed."""
    last, forward = step["committed"]["last"], step["forward"]
    for number in going_on(replay, forward):
        if last[number] > 0:
            last[number] -= 1
            slot = forward["state_slots"][number]
            return {"request": forward["rids"][number], "slot": slot, "group": STATES}
    return None


#: What is planted, and into steps of which modes; each with the recordings that have such steps.
PLANTS = {
    wrong_parent: ("TARGET_VERIFY", ("tree", "windows-tree", "states-tree")),
    wrong_move: ("TARGET_VERIFY", ("tree", "windows-tree", "states-tree")),
    wrong_entry: ("DECODE TARGET_VERIFY", ("windows", "windows-tree")),
    foreign_state: ("DECODE TARGET_VERIFY", ("states", "copies", "commits", "states-tree")),
    lost_copy: ("EXTEND", ("states", "copies", "commits", "states-tree")),
    wrong_commit: ("TARGET_VERIFY", ("commits",)),
}
CASES = [(plant, name) for plant, (_, names) in PLANTS.items() for name in names]


@pytest.mark.parametrize(("plant", "name"), CASES)
def test_a_fault_in_what_was_written_is_found(hooks, recording, plant, name):
    """By its request, and by its slot in its group."""
    planted, modes = [], PLANTS[plant][0].split()

    def fault(step):
        forward = step["forward"]
        several = len(forward["rids"]) > 1 or modes == ["EXTEND"]
        if forward["mode"] in modes and several and not planted and replay.steps > 20:
            planted.extend(filter(None, [plant(replay, step)]))

    replay = Replay(hooks, recording(name), fault)
    replay.run()
    ((place),) = planted
    expected = {"group": ROWS, **place}
    found = hooks.report()["violations"]
    print(expected, *found, sep="\n")
    assert any(expected.items() <= each.items() for each in found), (expected, found[:3])
