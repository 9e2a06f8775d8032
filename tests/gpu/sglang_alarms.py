"""The alarms of SGLang's KV canary, read from an engine's log and held against planted faults.

The canary logs an alarm for each row that it finds wrong, in each step and launch that reads the
row, and names neither request nor step. So an alarm is taken for a fault's by its place in the log,
and by its slot or position. Lines of ``sglang_faults`` stand between the alarms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

ALARM: Final = re.compile(
    r"kv_canary violation: launch_tag=(?P<launch>\S+) fail_reason=(?P<reasons>\S+) "
    r"slot_idx=(?P<slot>-?\d+) position=(?P<position>-?\d+) "
    r"stored_token=(?P<stored>-?\d+) expected_token=(?P<expected>-?\d+)"
)
PLANTED: Final = re.compile(r"planted (?P<fault>\{.*\})")
#: A line every so many steps.
COUNTED: Final = re.compile(r"\[canary\] step=(\d+) protected_tokens=(\d+)")
OVERFLOW: Final = re.compile(r"verify skipped this step due to overflow \(total=(\d+)")
DROPPED: Final = re.compile(r"ring_overflow=True")
#: Why an engine did not start.
REFUSED: Final = re.compile(
    r"(?:NotImplementedError|AssertionError|ValueError): (kv-canary: .*)"
    r"|Exception: (Capture cuda graph failed: .*)"
)
INSTALLED: Final = re.compile(r"install_canary: ")
#: Faults that are read much later than they are planted.
LATE: Final = ("stale_node", "flush_without_tree")


def read(lines: Iterable[str]) -> dict[str, Any]:
    """Say what a log has of the canary.

    Returns:
        Alarms and planted faults in their order as ``events``; how many alarms; how many were said
        before the first fault; the rows that were verified or written, over all launches; the steps
        that were not verified; whether alarms were dropped; whether the canary was installed; and
        why it was not.
    """
    events: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": 0, "skipped": 0, "dropped": False, "installed": False}
    found["refused"] = None
    for line in lines:
        if match := ALARM.search(line):
            numbers = {key: int(match[key]) for key in ("slot", "position", "stored", "expected")}
            events.append({"launch": match["launch"], "reasons": match["reasons"], **numbers})
        elif match := PLANTED.search(line):
            events.append(json.loads(match["fault"]))
        elif match := COUNTED.search(line):
            found["rows"] = max(found["rows"], int(match[2]))
        elif match := OVERFLOW.search(line):
            found["skipped"] = max(found["skipped"], int(match[1]))
        elif match := REFUSED.search(line):
            found["refused"] = found["refused"] or (match[1] or match[2]).strip()
        found["dropped"] |= bool(DROPPED.search(line))
        found["installed"] |= bool(INSTALLED.search(line))
    marks = [n for n, event in enumerate(events) if "fault" in event]
    alarms = sum("fault" not in event for event in events)
    before = marks[0] if marks else alarms
    return {**found, "events": events, "alarms": alarms, "before": before}


def judged(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Say of each planted fault which alarms are its own, and how the first of them names it."""
    marks = [n for n, event in enumerate(events) if "fault" in event]
    named = [slots_of(events[mark]) for mark in marks]
    found = []
    for number, mark in enumerate(marks):
        fault = events[mark]
        if fault["fault"] == "error":
            continue
        others = set().union(*(slots for n, slots in enumerate(named) if n != number))
        late = fault["fault"] in LATE or number + 2 >= len(marks)
        end = len(events) if late else marks[number + 2]
        heard = [
            (alarm, where)
            for alarm in new_alarms(events, mark, end)
            if (where := place(fault, alarm, named[number], others))
        ]
        row: dict[str, Any] = {"fault": fault["fault"], "planted": dict(fault), "heard": len(heard)}
        if heard:
            alarm, row["at"] = min(heard, key=lambda each: each[1] != "slot")
            row |= {"said": alarm["reasons"], "alarm": alarm}
        found.append(row)
    return found


def slots_of(fault: Mapping[str, Any]) -> set[int]:
    """Return the slots that a fault names, and those that its wrong rows were written to."""
    slot = fault.get("slot")
    slots = slot if isinstance(slot, list) else [] if slot is None else [slot]
    return {*slots, *fault.get("written", ())}


def new_alarms(
    events: Sequence[Mapping[str, Any]], mark: int, end: int
) -> Iterable[Mapping[str, Any]]:
    """Yield the alarms between two places that no earlier alarm is like, each once."""

    def key(alarm: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(alarm[part] for part in ("slot", "position", "reasons", "stored"))

    known = {key(event) for event in events[:mark] if "fault" not in event}
    for event in events[mark:end]:
        if "fault" not in event and key(event) not in known:
            known.add(key(event))
            yield event


def place(
    fault: Mapping[str, Any], alarm: Mapping[str, Any], slots: set[int], others: set[int]
) -> str | None:
    """Say how an alarm names a fault: by its slot, or by its position or the one behind it.

    The row behind a wrong one breaks the chain. A flush that the tree does not hear of names no
    row: any alarm is taken for it that is at no other fault's slots.
    """
    if alarm["slot"] in slots:
        return "slot"
    if alarm["slot"] in others:
        return None
    if fault["fault"] == "flush_without_tree":
        return "another slot"
    position = fault.get("position")
    near = position is not None and 0 <= alarm["position"] - position <= 1
    return "position" if near and fault["fault"] not in LATE else None
