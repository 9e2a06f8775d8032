"""Bytes and identities behind connectors on GPUs: the record of ``gpu_identities.py``, drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from identity_jobs import ENGINES
from kvtxn.benchmarks.common.markdown import table

HEAD: Final = """## Identities behind connectors

`python tests/gpu/gpu_identities.py --out FOLDER`: the audit `bytes` with a store of identities.
Rows leave through a connector and come back to the same engine; NIXL's come to another one.
*Brought* are rows that came, *unverified* those of unknown bytes, *alarms* violations while
nothing is wrong. Then blocks are swapped as they come, or get another request's bytes; layers are
swapped, rows shifted, or nothing comes. Bytes that no block ever had are known under no tokens,
so they are counted. *Old* rows are of earlier weights; the last column has them after a reset of
the caches that said True. Some connectors bring wrong blocks themselves, which is told below.
"""


def identities(folder: Path) -> dict[str, Any]:
    """Reduce a folder of reports, one file by engine; engines that did not end are left out."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if "healthy" not in report or path.stem.endswith(".partial"):
            continue
        healthy = report["healthy"]
        found[path.stem] = {
            "rows": healthy["rows"],
            "brought": healthy["brought"],
            "unverified": int(healthy["unverified"]),
            "alarms": healthy["told"],
            "misplaced": healthy.get("misplaced", 0),
            "same": report.get("same_texts"),
            "faults": {name: _told(one) for name, one in report["found"].items()},
            "old": _told(report["stale"]) if "stale" in report else None,
            "reset": _after_reset(report.get("reset")),
        }
    return found


def _told(found: Mapping[str, Any]) -> str:
    """Say which kinds of violations were found, or how many rows were counted as unverified."""
    kinds = sorted({each["kind"] for each in found["violations"]})
    return ", ".join(kinds) or f"{int(found['unverified'])} counted"


def _after_reset(found: Mapping[str, Any] | None) -> str | None:
    if found is None or found.get("said") is None:
        return None
    if not found["brought"]:
        return "no row came"
    return f"{found['brought']} rows came: {_told(found)}"


def drawn(found: Mapping[str, Any]) -> str:
    """Tabulate the engines."""
    faults = list(dict.fromkeys(fault for each in found.values() for fault in each["faults"]))
    header = ["connector", "rows read", "brought", "unverified", "alarms", "same texts"]
    header += [*(fault.replace("_", " ") for fault in faults), "old", "after a reset"]
    drawn = table(header, [list(_row(name, each, faults)) for name, each in found.items()])
    return "\n\n".join(filter(None, (drawn, "\n".join(_right_alarms(found)))))


def _right_alarms(found: Mapping[str, Any]) -> Iterable[str]:
    """Say which engines' connectors brought wrong blocks, though no fault was planted."""
    for name, each in found.items():
        if each.get("misplaced"):
            yield (
                f"- {name}: {each['misplaced']} blocks came with other bytes than were computed, "
                f"{each['alarms']} alarms named them. {ENGINES[name]['known']}."
            )


def _row(name: str, engine: Mapping[str, Any], faults: Iterable[str]) -> Iterable[str]:
    yield name
    yield from (str(engine[key]) for key in ("rows", "brought", "unverified", "alarms"))
    yield "yes" if engine["same"] else "no"
    yield from (engine["faults"].get(fault, "-") for fault in faults)
    yield from (engine[key] or "-" for key in ("old", "reset"))
