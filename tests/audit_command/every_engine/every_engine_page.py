"""The record of audits of every kind of engine, and EVERY_ENGINE.md, which is drawn from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tabulate

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "every_engine.json", HERE / "EVERY_ENGINE.md"

HEAD = """# Every kind of engine under `kvtxn audit`

Drawn from what `python tests/audit_command/every_engine/run_every_engine.py` saw. Each line is one
run of `kvtxn audit` over an unmodified vLLM: a tiny model with random weights, a
cache so small that requests are preempted, and the workloads `{shaken}`, or
`{connected}` where the engine has a connector. Where nothing else is said, drafts are looked up in
the text, four at a time, and rows are kept by the prefix cache. On GPUs V1 and V2 name the model
runner; *windows* are kvtxn's own, of recurrent layers too; *states cached*: the prefix cache
keeps the states at the ends of blocks; *short steps* have room for fewer rows than all requests
want. What did not start stands below its table with what vLLM said.
[FAULTS.md](../../../integrations/FAULTS.md) tells where each kind of violation comes from: all are
vLLM's.
"""


def merge(found: dict[str, Any]) -> None:
    """Put what was seen into the record, and draw the page."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    place = f"vLLM {found['release']}, {found['device']}"
    kinds = {name: kind | {"commit": found["commit"]} for name, kind in found["kinds"].items()}
    record.setdefault(place, {}).update(kinds)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(record))


def page(record: dict[str, Any]) -> str:
    """Draw the page: a table for each release and device."""
    from engine_kinds import CONNECTED, SHAKEN

    parts = [HEAD.format(shaken=SHAKEN, connected=CONNECTED)]
    for place, kinds in sorted(record.items()):
        parts += [f"## {place}\n", summed(kinds) + "\n", table(kinds) + "\n"]
        if others := list(not_judged(kinds)):
            parts.append("\n".join(others) + "\n")
        commits = sorted({kind["commit"] for kind in kinds.values()})
        parts.append(f"Commits: {', '.join(commits)}.\n")
    return "\n".join(parts)


def judged(kind: dict[str, Any]) -> bool:
    """Tell whether an audit came to a verdict."""
    return "rows_checked" in kind


def summed(kinds: dict[str, Any]) -> str:
    """Return what was seen in all, in a sentence."""
    ended = [kind for kind in kinds.values() if judged(kind)]
    rows, states = (
        sum(kind[word] for kind in ended) for word in ("rows_checked", "states_checked")
    )
    wrong = sum(bool(kind["kinds"]) for kind in ended)
    engines = "1 engine" if wrong == 1 else f"{wrong} engines"
    return (
        f"{len(ended)} engines, {sum(kind['steps'] for kind in ended):,} steps: {rows:,} rows and "
        f"{states:,} states were read; in {engines} some were wrong."
    )


def table(kinds: dict[str, Any]) -> str:
    """Return a line for each kind that was judged."""
    lines = [
        [
            name,
            f"{kind['requests']:,}",
            f"{kind['steps']:,}",
            f"{kind['rows_checked']:,}",
            f"{kind['states_checked']:,}" if kind["states_checked"] else "",
            ", ".join(f"{what}: {count:,}" for what, count in kind["kinds"].items()),
        ]
        for name, kind in sorted(kinds.items())
        if judged(kind)
    ]
    heads = ["engine", "requests", "steps", "rows read", "states read", "violations"]
    return tabulate.tabulate(
        lines, heads, tablefmt="pipe", disable_numparse=True, colalign=("left", *["right"] * 5)
    )


def not_judged(kinds: dict[str, Any]) -> Iterator[str]:
    """Yield what was said of the kinds that did not start, and of those whose requests failed."""
    reasons: dict[str, list[str]] = {}
    for name, kind in sorted(kinds.items()):
        if not judged(kind):
            reasons.setdefault(f"{kind['verdict']}: {reason(kind['why'])}", []).append(name)
        elif kind["failed"]:
            yield f"- {name}: {kind['failed']} requests failed, first {reason(kind['why'])}"
    for why, names in reasons.items():
        yield f"- {'; '.join(names)}: {why}"


def reason(why: str) -> str:
    """Return the part of an error that tells engines apart, in at most 200 characters."""
    for before in ("its log first says: ", "kvtxn audit: "):
        why = why.rpartition(before)[2]
    why = why.removesuffix("; --log-level debug shows the rest").replace("`", "")
    return why if len(why) <= 200 else why[:197] + "..."
