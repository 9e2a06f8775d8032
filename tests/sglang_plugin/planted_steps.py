"""Faults for a recording of an SGLang engine: in trees of drafts, maps of windows, and states."""

from __future__ import annotations

from kvtxn.integrations.sglang_plugin.seam.pools import ROWS, STATES, WINDOWS
from replay import Replay


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
        mates = {row for row in range(node) if positions[row] == positions[parent]} - {parent}
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
        for line, end in list(zip(forward["req_pool_indices"], forward["seq_lens"], strict=True))[
            :2
        ]
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


#: What is planted: into steps of which modes, and what such a step has.
PLANTS = {
    wrong_parent: ("TARGET_VERIFY", "children"),
    wrong_move: ("TARGET_VERIFY", "children"),
    wrong_entry: ("DECODE TARGET_VERIFY", "map"),
    foreign_state: ("DECODE TARGET_VERIFY", "state_slots"),
    lost_copy: ("EXTEND MIXED", "mamba_cow_src_indices"),
    wrong_commit: ("TARGET_VERIFY", "state_slots"),
}


def plants_of(recorded):
    """The faults that can be planted into a recording."""
    forwards = [each for each in recorded if each["event"] == "forward"]
    return [
        plant
        for plant, (modes, needed) in PLANTS.items()
        if any(needed in each for each in forwards if each["mode"] in modes.split())
    ]


def replay_with(hooks, recorded, plant):
    """Replay a recording with one fault; return what has to be said of it, and what was said."""
    planted, (modes, needed) = [], PLANTS[plant]

    def fault(step):
        forward = step["forward"]
        fits = forward["mode"] in modes.split() and needed in forward
        several = len(forward["rids"]) > 1 or plant is lost_copy
        if fits and several and not planted and replay.steps > 20:
            planted.extend(filter(None, [plant(replay, step)]))

    replay = Replay(hooks, recorded, fault)
    replay.run()
    (place,) = planted
    return {"group": ROWS, **place}, hooks.report()["violations"]
