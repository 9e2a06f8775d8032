"""The KV canary's alarms are read from a log, held against planted faults, and drawn."""

from __future__ import annotations

import json

import pytest
import seen_canary
import sglang_alarms
import sglang_canary
import sglang_engines
from gpu_seen import COMPARISON, RECORD, compared
from seen_canary import ABSENT

SEEN = json.loads(RECORD.read_text())
FOUND = SEEN.get("sglang_canary", {})


def alarm(slot, position, reasons="verify_chain_hash", stored=5):
    """Write an alarm as SGLang 0.5.23 logs it; ``_format_violation`` says the format is frozen."""
    return (
        "[2026-11-28 21:00:00] kv_canary violation: launch_tag=HEAD_K_FULL "
        f"fail_reason={reasons} slot_idx={slot} position={position} stored_token={stored} "
        "expected_token=-1 stored_chain_hash=0x00ff expected_aux=0x0063\n"
        f"KV cache canary violation detected (kernel_kind=HEAD_K_FULL, slot_idx={slot})\n"
        "  total_violations=2000 ring_overflow=False step_when_pumped=9"
    )


def planted(name, **facts):
    return f"planted {json.dumps({'fault': name, 'step': 12, 'slot': None, **facts})}"


def heard(*parts):
    events = sglang_alarms.read("\n".join(parts).splitlines())["events"]
    return {each["fault"]: each for each in sglang_alarms.judged(events)}


def test_a_log_is_read():
    """Counts of the last line; alarms before a fault are those of a sound engine."""
    lines = [
        "[x] install_canary: disaggregation_mode=null config=CanaryConfig(...)",
        "[x] [canary] step=100 protected_tokens=900 sweep_passes=0 violations=0",
        "[x] [canary] step=200 protected_tokens=2100 sweep_passes=0 violations=0",
        "[x] kv-canary: per-forward verify skipped this step due to overflow (total=3, capacity=9)",
        *alarm(7, 3).splitlines(),
        planted("old_row", position=4, slot=8),
        alarm(8, 3),
    ]
    found = sglang_alarms.read(lines)
    assert (found["rows"], found["skipped"], found["alarms"], found["before"]) == (2100, 3, 2, 1)
    assert found["installed"]
    assert not found["dropped"]
    assert found["refused"] is None


def test_a_refusal_is_read():
    """The first error counts: a child's error is logged again by its parent."""
    says = "kv-canary: no attacher registered for pool class MLATokenToKVPool; supported: ['A']"
    found = sglang_alarms.read([f"NotImplementedError: {says}", "ValueError: kv-canary: later"])
    assert found["refused"] == says
    assert not found["installed"]


def test_an_alarm_at_the_slot_is_the_faults():
    found = heard(planted("old_row", position=4, slot=8), alarm(8, 3, "verify_position"))["old_row"]
    assert (found["heard"], found["at"], found["said"]) == (1, "slot", "verify_position")


def test_the_slots_that_a_fault_writes_are_its_own():
    fault = planted("swapped_lines", position=None, written=[31, 32])
    assert heard(fault, alarm(32, 60))["swapped_lines"]["at"] == "slot"


def test_the_row_behind_a_wrong_one_breaks_the_chain():
    """It is named by its position, and only near its fault: slots come first."""
    fault = planted("lost_write", position=40, slot=8)
    found = heard(fault, alarm(9, 41))["lost_write"]
    assert (found["heard"], found["at"]) == (1, "position")
    assert heard(fault, alarm(9, 41), alarm(8, 40))["lost_write"]["at"] == "slot"
    assert heard(fault, alarm(9, 42))["lost_write"]["heard"] == 0


def test_alarms_that_went_on_before_a_fault_are_not_its_own():
    """A wrong row is said in each step that reads it."""
    found = heard(alarm(8, 3), planted("old_row", position=4, slot=8), alarm(8, 3))["old_row"]
    assert found["heard"] == 0


def test_alarms_behind_the_second_next_fault_are_not_its_own():
    later = [planted(f"f{n}", position=900, slot=900 + n) for n in range(2)]
    fault = planted("wrong_token", position=4, slot=8)
    assert heard(fault, later[0], alarm(8, 5), later[1])["wrong_token"]["heard"] == 1
    assert heard(fault, *later, alarm(8, 5), planted("f3"))["wrong_token"]["heard"] == 0


def test_a_node_is_read_much_later():
    """Its slots name it; a position alone does not."""
    fault = planted("stale_node", position=4, slot=[20, 21])
    later = [planted(f"f{n}", position=900, slot=900 + n) for n in range(3)]
    assert heard(fault, *later, alarm(21, 30))["stale_node"]["at"] == "slot"
    assert heard(fault, alarm(50, 4))["stale_node"]["heard"] == 0


def test_a_flush_takes_alarms_that_are_no_other_faults():
    node = planted("stale_node", position=4, slot=[20, 21])
    flush = planted("flush_without_tree", position=0)
    assert heard(node, flush, alarm(20, 7))["flush_without_tree"]["heard"] == 0
    assert heard(node, flush, alarm(50, 7))["flush_without_tree"]["at"] == "another slot"


def test_a_planter_that_failed_is_no_fault():
    assert heard(planted("error", error="KeyError"), alarm(1, 1)) == {}


# -- engines ------------------------------------------------------------------------------


def test_each_kind_meets_each_engine_with_faults():
    given = sglang_canary.parsed(["OUT"])
    queue = sglang_canary.queue_of(given)
    assert len(queue) == len(set(queue))
    for name in sglang_canary.WITH_FAULTS:
        assert {kind for each, kind in queue if each == name} == set(seen_canary.COLUMNS)
    assert not [each for each in queue if each[1] not in sglang_engines.KINDS]
    only = sglang_canary.queue_of(sglang_canary.parsed(["OUT", "--engines", "mla"]))
    assert only == [("mla", "canary")]


def test_the_canary_runs_without_kvtxn(tmp_path):
    found = {
        kind: sglang_engines.variables("faults", kind, tmp_path) for kind in sglang_engines.KINDS
    }
    assert {kind for kind in found if "KVTXN_SGLANG" in found[kind]} == {"ledger", "recorded"}
    assert len({each["FAULTS_FILE"] for each in found.values()}) == len(found)


# -- the record ---------------------------------------------------------------------------

#: Of an engine that still ran when the time was over.
CUT = {"ok": False, "exit": None}
STARTED = {"installed": True, "refused": None, "skipped": 0, "dropped": False, "rows": 900}


def run(engine, kind, faults=(), **said):
    row = {"engine": engine, "kind": kind, "ok": said.get("refused") is None, "wrong": ["an error"]}
    row["exit"] = 0 if row["ok"] else 1
    if kind == "ledger":
        return {**row, "faults": list(faults)}
    alarms = {"alarms": len(faults), "before": 0}
    return {**row, "canary": {**STARTED, **alarms, "faults": list(faults), **said}}


def by_ledger(name, kind):
    found = [{"kind": kind}] if kind else []
    return {"fault": name, "exact": len(found), "found": found}


def by_canary(name, said=None, at="slot"):
    return {"fault": name, "heard": int(bool(said)), **({"said": said, "at": at} if said else {})}


@pytest.fixture
def found():
    """Three engines: with faults, with faults and false alarms, and one that does not start."""
    refused = {"refused": "kv-canary: no attacher registered for pool class MLA; supported: []"}
    rows = [
        run("faults", "ledger", [by_ledger("wrong_token", "foreign"), by_ledger("old_row", None)]),
        run(
            "faults", "canary", [by_canary("wrong_token"), by_canary("old_row", "verify_position")]
        ),
        run("faults", "strict", [by_canary("wrong_token", "verify_token", "position")]),
        run("tree", "ledger", [by_ledger("lost_move", "rejected")]),
        run("tree", "canary", [by_canary("lost_move", "verify_position")], before=30),
        run("mla", "canary", installed=False, **refused),
        run("late", "canary", [by_canary("old_row")], before=5) | CUT,
        run("later", "canary", installed=False) | CUT,
    ]
    return seen_canary.canary({"machine": "M", "command": "python x", "engines": rows})


def test_each_cell_says_what_was_seen(found):
    engine = found["faults"]
    said = {
        (fault, kind): seen_canary.cell(engine, fault, kind)
        for fault in engine["faults"]
        for kind in seen_canary.COLUMNS
    }
    assert said == {
        ("wrong_token", "ledger"): "foreign",
        ("wrong_token", "canary"): seen_canary.MISSED,
        ("wrong_token", "strict"): "token; by position",
        ("old_row", "ledger"): seen_canary.MISSED,
        ("old_row", "canary"): "position",
        ("old_row", "strict"): ABSENT,
    }
    assert seen_canary.cell(found["tree"], "lost_move", "canary") == seen_canary.NOISY
    assert seen_canary.cell(found["tree"], "lost_move", "strict") == "-"


def test_the_pages_are_drawn_from_the_record():
    text = COMPARISON.read_text()
    assert compared(text, SEEN) == text
    for name in seen_canary.SECTIONS:
        assert text.count(f"<!-- {name} -->") == 1


def test_the_ledger_found_every_recorded_fault():
    for name, engine in FOUND.items():
        said = {fault: each.get("ledger", ABSENT) for fault, each in engine["faults"].items()}
        assert None not in said.values(), (name, said)
