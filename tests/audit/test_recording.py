"""``RecordingLedger``: it checks as a ledger does, and remembers what happened to every slot."""

from __future__ import annotations

import json

import pytest
import torch

from kvtxn.audit import Ledger, RecordingLedger, RowGroup, StateGroup, Step
from kvtxn.audit.recording import HAPPENINGS, RUN_FIELDS

GROUPS = (RowGroup("full", 4, 10), StateGroup("mamba", 6))
PROMPT = [11, 12, 13, 14, 15, 16]


def step_of(ledger, request, first, tokens, slots, table, states, drafts=0):
    return Step(
        lines=torch.tensor([ledger.line(request), -1]),
        starts=torch.tensor([0, len(tokens), len(tokens)]),
        first=torch.tensor([first, 0]),
        tokens=torch.tensor(tokens),
        slots={"full": torch.tensor(slots), "mamba": torch.tensor(states)},
        tables={"full": torch.tensor([table, table])},
        drafts=torch.tensor([drafts, 0]),
    )


def play(ledger):
    """A prompt, a step of three drafts of which one is kept, a published block, a wrong read."""
    ledger.admit("a", PROMPT)
    ledger.hand_out("full", [2, 1])
    step = step_of(ledger, "a", 0, PROMPT, [4, 5, 6, 7, 8, 9], [1, 2, -1], [-1] * 5 + [1])
    ledger.write(step)
    ledger.check(step)
    ledger.publish("a", "full", [1, 2], 0, 4)
    ledger.hand_out("full", [5])
    drafts = [17, 18, 19, 20], [10, 11, 20, 21], [1, 2, 5], [2, 3, 4, 5]
    ledger.write(step_of(ledger, "a", 6, *drafts, drafts=3))
    ledger.resolve([1, 0])
    step = step_of(ledger, "a", 9, [21], [21], [1, 2, 5], [3])
    ledger.write(step)
    ledger.check(step)
    ledger.violations()
    ledger.release("a")


@pytest.fixture
def recording():
    ledger = RecordingLedger(GROUPS, max_requests=4, max_length=32)
    play(ledger)
    return ledger.recording()


def runs(recording):
    """Return the runs as dicts, with the happening's name."""
    flat, width = recording["runs"], len(RUN_FIELDS)
    found = [
        dict(zip(RUN_FIELDS, flat[i : i + width], strict=True)) for i in range(0, len(flat), width)
    ]
    return [{**run, "happening": HAPPENINGS[run["happening"]]} for run in found]


def of(recording, happening, group=0):
    return [
        (run["time"], run["slot"], run["count"], run["request"], run["position"])
        for run in runs(recording)
        if run["happening"] == happening and run["group"] == group
    ]


def test_a_step_ends_for_the_requests_that_it_was_written_for():
    """Also if one was released meanwhile, and another request has its line."""
    ledger = RecordingLedger(GROUPS, max_requests=1, max_length=32)
    ledger.admit("a", PROMPT)
    table, states = [1, 2, -1], [-1] * 5 + [1]
    ledger.write(step_of(ledger, "a", 0, PROMPT, [4, 5, 6, 7, 8, 9], table, states, drafts=2))
    ledger.release("a")
    ledger.admit("b", PROMPT)
    ledger.resolve([1, 0])
    recording = ledger.recording()
    assert of(recording, "kept") == [(3, 8, 1, 0, 4)]
    assert of(recording, "rejected") == [(3, 9, 1, 0, 5)]
    assert [life["accepted"] for life in recording["requests"]] == [1, 0]


def test_each_happening_is_a_run_of_slots(recording):
    """A step has two times; blocks handed out between steps count to the next forward."""
    assert of(recording, "handed_out") == [(2, 4, 8, -1, -1), (4, 20, 4, -1, -1)]
    assert of(recording, "durable") == [(2, 4, 6, 0, 0), (4, 10, 1, 0, 6), (6, 21, 1, 0, 9)]
    assert of(recording, "published") == [(2, 4, 4, 0, 0)]
    assert of(recording, "draft") == [(4, 11, 1, 0, 7), (4, 20, 2, 0, 8)]
    assert of(recording, "kept") == [(5, 11, 1, 0, 7)]
    assert of(recording, "rejected") == [(5, 20, 2, 0, 8)]
    assert of(recording, "rejected", group=1) == [(5, 4, 2, 0, 8)]
    times = [run["time"] for run in runs(recording)]
    assert times == sorted(times)


def test_requests_and_steps_are_counted(recording):
    (life,) = recording["requests"]
    assert life == {
        "name": "a", "begin": 2, "end": 7, "admitted": 1, "reused": 0,
        "rows": 11, "drafts": 3, "accepted": 1,
    }  # fmt: skip
    assert recording["steps"] == [[1, 6, 0, 0], [1, 4, 3, 1], [1, 1, 0, 0]]


def test_violations_know_their_request(recording):
    """Position 8 was rejected, and the next step goes on after it."""
    found = [(v["kind"], v["slot"], v["number"]) for v in recording["violations"]]
    assert found == [("rejected", 20, 0)]


def test_it_is_plain_data(recording):
    assert json.loads(json.dumps(recording)) == recording


def test_it_finds_what_a_ledger_finds():
    plain = Ledger(GROUPS, max_requests=4, max_length=32)
    recording = RecordingLedger(GROUPS, max_requests=4, max_length=32)
    found = []
    for ledger in (plain, recording):
        ledger.admit("b", [1, 2, 3, 4, 5])
        step = step_of(ledger, "b", 4, [5], [20], [1, 5], [1])
        ledger.write(step)
        ledger.check(step)
        found.append(ledger.violations())
    assert found[0] == found[1] != []
    assert plain.counters() == recording.counters()


def test_a_full_recording_says_so():
    """Later runs are counted; whole steps are those without a gap."""
    ledger = RecordingLedger(GROUPS, most=4, max_requests=4, max_length=32)
    play(ledger)
    recording = ledger.recording()
    assert len(runs(recording)) == 4
    assert recording["dropped"] > 0
    assert recording["whole_steps"] == 1
    assert len(recording["steps"]) == 3


def test_a_reset_ends_every_life():
    ledger = RecordingLedger(GROUPS, max_requests=4, max_length=32)
    ledger.admit("a", PROMPT)
    ledger.reset()
    recording = ledger.recording()
    assert recording["requests"][0]["end"] == 1
    assert of(recording, "handed_out") == [(2, 0, 40, -1, -1)]
    assert "a" not in ledger


def test_a_restart_forgets_the_recording():
    """Steps that warm an engine up are in neither; the next step is the first."""
    ledger = RecordingLedger(GROUPS, max_requests=4, max_length=32)
    play(ledger)
    ledger.restart()
    empty = ledger.recording()
    assert not any(empty[part] for part in ("steps", "requests", "runs", "violations"))
    play(ledger)
    again = ledger.recording()
    fresh = RecordingLedger(GROUPS, max_requests=4, max_length=32)
    play(fresh)
    assert again == fresh.recording()
