"""The HTML page of an audit: one file, with its data as one block of JSON and no other resource."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import attrs

from ...audit import RecordingLedger
from .jobs import Found
from .verdict import Verdict, judge_found

_FOLDER: Final = files(__package__) / "assets"
#: The scripts, in the order in which they need each other.
SCRIPTS: Final = ("model.js", "picture.js", "tables.js", "main.js")

#: By policy: the meaning of a draft's cell.
_DRAFT_LABELS: Final[Mapping[str, str]] = {
    "deferred": "draft that waits outside of its slot until it is accepted",
    "undo": "draft whose slot is restored if it is rejected",
}


#: By a verdict's word: the class of the page's head.
_MOODS: Final = {"healthy": "good", "violations": "bad"}


def write(path: Path, *, title: str, verdict: Verdict, found: Found, command: str) -> None:
    """Write the page of an audit; an existing file is replaced.

    Args:
        path: the file.
        title: the first words of the page.
        verdict: the verdict.
        found: everything that the audit found.
        command: the command line that makes this audit again.

    Raises:
        OSError: the file cannot be written, as on a full disk; half a page is not left.
    """
    try:
        path.write_text(page(data(title, verdict, found, command)), encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_ledger(
    path: Path, ledger: RecordingLedger, *, title: str, policy: str | None = None
) -> Verdict:
    """Write the page of any engine that has told a ledger its steps.

    Args:
        path: the file.
        ledger: the ledger; its violations are read.
        title: the first words of the page.
        policy: of the engine's windows; None without windows.

    Returns:
        The verdict that the page shows; its ``exit_code`` is 0 for a healthy engine.

    Raises:
        OSError: the file cannot be written, as on a full disk; half a page is not left.
    """
    ledger.violations()
    recording = ledger.recording() | {"policy": policy}
    found = Found(
        engine={},
        counters=[dict(ledger.counters())],
        recordings=[recording],
        requests=len(recording["requests"]),
        aborted=0,
        failed=[],
        seconds=0.0,
    )
    verdict = judge_found(found)
    write(path, title=title, verdict=verdict, found=found, command=title)
    return verdict


def data(title: str, verdict: Verdict, found: Found, command: str) -> dict[str, Any]:
    """Return the data of a page, for JSON, by the names that ``page`` and its scripts read.

    The recording is that of one rank: the first with a violation, else rank 0. The engine's facts
    get ``windows``, the policy or "none".
    """
    ranks = range(len(found.recordings))
    rank = next((r for r in ranks if found.recordings[r]["violations"]), 0)
    recording = found.recordings[rank]
    policy = recording.get("policy")
    return {
        "title": title,
        "command": command,
        "verdict": attrs.asdict(verdict),
        "notes": _notes(found, rank),
        "engine": {**found.engine, "windows": policy or "none"},
        "rank": rank,
        "counters": found.counters,
        "restores": policy in _DRAFT_LABELS,
        "draft_label": _DRAFT_LABELS.get(policy or "", ""),
        "recording": recording,
    }


def _notes(found: Found, rank: int) -> list[str]:
    """Return sentences that a reader of the picture needs, and one for each request that failed.

    They say which rank it shows, where it ends, which steps had no window, and that it has users'
    text.
    """
    recording, notes = found.recordings[rank], []
    if len(found.recordings) > 1:
        notes.append(f"The picture shows rank {rank} of {len(found.recordings)}.")
    if recording["dropped"]:
        notes.append(
            f"The picture ends after step {recording['whole_steps']} of {len(recording['steps'])}: "
            "what came later was checked, and not recorded."
        )
    counters = found.counters[rank]
    without = sum(
        counters.get(name, 0) for name in ("kvtxn_fallbacks_total", "kvtxn_bypassed_windows_total")
    )
    if without:
        notes.append(
            f"{without:,.0f} steps had no window: their rejected rows stayed in their slots, "
            "although the picture shows them as restored."
        )
    if recording["violations"]:
        notes.append(
            "This page has users' text: the last tokens that each violation's reader expected, and "
            "those that the row was computed for."
        )
    notes += [f"Failed: {each}" for each in found.failed]
    return notes


def page(values: Mapping[str, Any]) -> str:
    """Return the HTML of a page with these data, its style and its scripts in it.

    Without script it shows the verdict.

    Args:
        values: as ``data`` returns them.
    """
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # "<" as an escape: no text in the data can end the block.
    block = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    verdict = values["verdict"]
    items = (html.escape(each) for each in [*verdict["sentences"], *values["notes"]])
    parts = {
        "title": html.escape(str(values["title"])),
        "mood": _MOODS.get(verdict["word"], "none"),
        "word": html.escape(verdict["word"]),
        "headline": html.escape(verdict["headline"]),
        "facts": html.escape(" \N{MIDDLE DOT} ".join(map(_fact, values["engine"].items()))),
        "sentences": "".join(f"<li>{each}</li>" for each in items),
        "style": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "command": html.escape(str(values["command"])),
        "script": script,
        "data": block,
    }
    head, *rest = text.split("{{")
    for piece in rest:
        name, _, after = piece.partition("}}")
        head += parts[name] + after
    return head


def _fact(item: tuple[str, Any]) -> str:
    """Return a fact of the engine as text: a name, and its value as in JSON."""
    name, value = item
    return f"{name} {value if isinstance(value, str) else json.dumps(value)}"
