"""Steps that real engines of SGLang 0.5.23 ran on an H200, replayed through the seam."""

from __future__ import annotations

import pytest
from kvtxn.integrations.serving.audit_settings import AuditSettings
from kvtxn.integrations.sglang_plugin.starting import Hooks
from planted_steps import plants_of, replay_with
from replay import RECORDED, Replay, events
from toy_sglang import counters_of_clean_steps

NAMES = sorted(path.name.partition(".")[0] for path in RECORDED.glob("*.jsonl.xz"))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_give_no_alarm(hooks, name):
    """Prompts in chunks beside decoding, hits, aborts, retraction; drafts and their outcomes."""
    recorded = events(name)
    replay = Replay(hooks, recorded)
    replay.run()
    counted = counters_of_clean_steps(hooks)
    assert counted["kvtxn_audit_steps_total"] == replay.steps > 30
    assert counted["kvtxn_audit_rows_checked_total"] > 20_000
    assert (counted["kvtxn_audit_states_checked_total"] > 200) == ("states" in recorded[0])


def test_the_recordings_have_each_kind_of_step():
    """Otherwise the test above would say little."""
    every = [event for name in NAMES for event in events(name)]
    forwards = [event for event in every if event["event"] == "forward"]
    assert {event["mode"] for event in forwards} == {"EXTEND", "MIXED", "DECODE", "TARGET_VERIFY"}
    assert any(sum(event.get("extend_prefix_lens_cpu", [0])) for event in forwards)  # hits
    assert any(event["event"] == "released" for event in every)


def lost_write(step):
    """The first row is written to padding."""
    forward = step["forward"]
    right, forward["out_cache_loc"][0] = forward["out_cache_loc"][0], 0
    return right


def wrong_token(step):
    """The first row is computed of another token."""
    forward = step["forward"]
    forward["input_ids"][0] += 1
    return forward["out_cache_loc"][0]


def foreign_row(step):
    """The last row that the first request has written leads to one of the second's."""
    forward = step["forward"]
    _, slots = forward["table"][1]
    forward["table"][0] = [forward["seq_lens"][0] - 2, [slots[-1], *forward["table"][0][1][-1:]]]
    return slots[-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plant", [lost_write, wrong_token, foreign_row])
def test_a_fault_in_a_recorded_step_is_found(hooks, name, plant):
    """By its request, and by its slot."""
    planted = []

    def fault(step):
        forward = step["forward"]
        decodes = forward["mode"] in ("DECODE", "TARGET_VERIFY") and len(forward["rids"]) > 1
        if decodes and not planted and replay.steps > 20:
            planted.append((forward["rids"][0], plant(step)))

    replay = Replay(hooks, events(name), fault)
    replay.run()
    ((request, slot),) = planted
    found = [(each["request"], each["slot"]) for each in hooks.report()["violations"]]
    assert (request, slot) in found


@pytest.mark.parametrize("name", NAMES)
def test_each_fault_of_trees_windows_and_states_is_found(on_a_cpu, name):
    """In what the seam reads of these alone; a plain engine has none of it."""
    for plant in plants_of(events(name)):
        hooks = Hooks(AuditSettings(audit="ledger"))
        expected, found = replay_with(hooks, events(name), plant)
        assert any(expected.items() <= each.items() for each in found), (plant, expected, found[:3])
