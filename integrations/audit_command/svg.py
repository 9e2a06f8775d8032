"""A small picture of a few steps of one request: which slots a window writes, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final, TypeAlias

import attrs

#: The life of every slot, as ``Ledger.recording`` returns it.
Recording: TypeAlias = Mapping[str, Any]
#: A run of neighbouring slots with the same life, its fields by name; see ``read_runs``.
Run: TypeAlias = Mapping[str, Any]

_CELL, _LEFT, _TOP = 30, 74, 44
#: Steps of an excerpt.
_STEPS: Final = 7
_CROSS: Final = "\u00d7"

_STYLE: Final = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #16202c; }
.quiet { fill: #566273; } .slot { text-anchor: end; } .step, .mark { text-anchor: middle; }
rect { stroke: #b6bfca; } .old { fill: none; } .durable { fill: #3f87d6; }
.draft { fill: #f2b100; } .waits { fill: none; stroke: #b78600; stroke-width: 3; }
.rejected { fill: #d9541e; } .mark { fill: #d9541e; font-weight: 700; }
.new { fill: #ffffff; font-weight: 600; text-anchor: middle; } .ink { fill: #16202c; }
.rule { stroke: #566273; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8edf3; } .quiet { fill: #9fadbd; } rect { stroke: #445162; }
  .durable { fill: #4a90e2; } .waits { stroke: #ffcb3d; } .mark { fill: #ff8a5c; }
  .rule { stroke: #9fadbd; }
}
"""


@attrs.frozen
class Excerpt:
    """A few steps of one request.

    Attributes:
        first: the first step.
        slots: the slots, one after another in the order of their positions.
        cells: by (time, slot): "old", "durable", "draft", "rejected" (its row is in the slot), or
            "taken back" (the slot is as it was); a time that is left out is as the one before.
        fresh: the (time, slot) at which a row became durable.
    """

    first: int
    slots: list[int]
    cells: dict[tuple[int, int], str]
    fresh: set[tuple[int, int]]


def excerpt(recording: Recording, *, restores: bool) -> Excerpt:
    """Choose the steps of one request that show most: drafts kept and rejected, in few slots.

    Only runs of the first group of layers are looked at.

    Args:
        recording: the recording of an engine that speculates.
        restores: windows leave the slots of rejected drafts as they were.

    Raises:
        ValueError: no request has such steps with drafts.
    """
    by_request: dict[int, list[Run]] = {}
    for run in read_runs(recording):
        if run["what"] in _STATES and run["group"] == 0:
            by_request.setdefault(run["request"], []).append(run)
    best: tuple[float, int, int] = (0.0, 0, 0)
    for request, runs in by_request.items():
        for first in range(runs[0]["time"] // 2 + 1, runs[-1]["time"] // 2 - _STEPS + 2):
            best = max(best, (_worth(_between(runs, first)), request, first))
    if best[0] <= 0:
        raise ValueError("no request has drafts in so many steps")
    _, request, first = best
    return _cut(_between(by_request[request], first), first, restores)


def _between(runs: Sequence[Run], first: int) -> list[Run]:
    """Return the runs whose happening is in one of an excerpt's steps from ``first`` on."""
    return [run for run in runs if first <= run["time"] // 2 < first + _STEPS]


def _worth(runs: Sequence[Run]) -> float:
    """Return an excerpt's worth: high with drafts of both ends, lower for each slot above 14."""
    kept: int
    lost: int
    kept, lost = (
        sum(run["count"] for run in runs if run["what"] == what) for what in ("kept", "rejected")
    )
    tall = len({slot for run in runs for slot in slots_of(run)})
    return min(kept, lost) + 0.1 * (kept + lost) - max(0, tall - 14)


def read_runs(recording: Recording) -> list[Run]:
    """Return the runs of a recording as dicts; ``what`` is the name of the happening."""
    fields, flat = recording["run_fields"], recording["runs"]
    width, names = len(fields), recording["happenings"]
    found: list[Run] = []
    for begin in range(0, len(flat), width):
        run = dict(zip(fields, flat[begin : begin + width], strict=True))
        found.append({**run, "what": names[run["happening"]]})
    return found


def slots_of(run: Run) -> range:
    """Return the slots of a run."""
    return range(run["slot"], run["slot"] + run["count"])


def _cut(runs: Sequence[Run], first: int, restores: bool) -> Excerpt:
    """Return an excerpt of these runs, of which each time has one state per slot."""
    cells: dict[tuple[int, int], str] = {}
    fresh, positions = set(), dict[int, int]()
    for run in runs:
        time, state = run["time"], _STATES[run["what"]]
        for number, slot in enumerate(slots_of(run)):
            positions[slot] = run["position"] + number
            taken_back = restores and state == "rejected"
            cells[time, slot] = "taken back" if taken_back else state
            if state == "durable":
                fresh.add((time, slot))
    return Excerpt(first, sorted(positions, key=positions.__getitem__), cells, fresh)


_STATES: Final = {
    "durable": "durable",
    "draft": "draft",
    "kept": "durable",
    "rejected": "rejected",
}


def draw(found: Excerpt, *, title: str, waits: bool) -> str:
    """Return an excerpt as an SVG document that follows the reader's light or dark colours.

    Args:
        found: the excerpt.
        title: a line above the picture, and its text for those who cannot see it.
        waits: drafts wait outside of their slots.
    """
    width = _LEFT + _STEPS * 2 * _CELL + 12
    bottom = _TOP + len(found.slots) * _CELL
    parts = [f'<text x="8" y="20">{escape(title)}</text>']
    for row, slot in enumerate(found.slots):
        y = _TOP + row * _CELL
        parts.append(f'<text class="quiet slot" x="{_LEFT - 10}" y="{y + 20}">slot {slot}</text>')
        parts += _row(found, slot, y, waits)
    for step in range(_STEPS + 1):
        x = _LEFT + step * 2 * _CELL
        parts.append(f'<line class="rule" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{bottom + 8}"/>')
    for step in range(_STEPS):
        x = _LEFT + (2 * step + 1) * _CELL
        text = (
            f'<text class="quiet step" x="{x}" y="{bottom + 20}">step {found.first + step}</text>'
        )
        parts.append(text)
    parts += _legend(bottom + 46, waits)
    height = bottom + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<style>{_STYLE}</style>" + "\n".join(parts) + "</svg>\n"
    )


def _row(found: Excerpt, slot: int, y: int, waits: bool) -> list[str]:
    """Return the SVG elements of one slot's line at ``y``: a cell for each time, with its marks."""
    parts, state, before = [], "old", "old"
    for column in range(2 * _STEPS):
        time = 2 * found.first + column
        x = _LEFT + column * _CELL
        happened = found.cells.get((time, slot))
        if happened == "draft":
            before = "old" if state == "draft" else state
        state = happened or state
        mark = ""
        if state == "taken back":
            mark, state = (_CROSS if happened else ""), before
        look = "waits" if state == "draft" and waits else state
        inset = 3 if look == "waits" else 0.5
        size = _CELL - 2 * inset
        parts.append(
            f'<rect class="{look}" x="{x + inset}" y="{y + inset}" width="{size}" height="{size}"/>'
        )
        if mark:
            parts.append(f'<text class="mark" x="{x + _CELL / 2}" y="{y + 20}">{mark}</text>')
        if (time, slot) in found.fresh:
            parts.append(f'<text class="new" x="{x + _CELL / 2}" y="{y + 20}">✓</text>')
    return parts


def _legend(y: int, waits: bool) -> list[str]:
    """Return the SVG elements of the legend at ``y``."""
    items = [
        ("waits" if waits else "draft", "draft, waits elsewhere" if waits else "draft"),
        ("durable", "durable"),
        ("mark", "rejected: never written") if waits else ("rejected", "rejected, and still there"),
    ]
    parts, x = [], 8
    for look, words in items:
        if look == "mark":
            parts.append(f'<text class="mark" x="{x + 8}" y="{y + 5}">{_CROSS}</text>')
        else:
            parts.append(f'<rect class="{look}" x="{x}" y="{y - 8}" width="14" height="14"/>')
        parts.append(f'<text class="quiet" x="{x + 22}" y="{y + 4}">{words}</text>')
        x += 40 + 7 * len(words)
    return parts
