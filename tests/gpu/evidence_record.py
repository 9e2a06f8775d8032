"""Take results of evidence over into the records, and draw the pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gpu_seen
import gpu_table
from kvtxn.benchmarks import documents
from kvtxn.benchmarks.common.machine import RESULTS

if TYPE_CHECKING:
    from evidence import Evidence
    from evidence_parts import Part

#: Lists of a result that several parts share.
_LISTS: Final = ("cells", "rows", "pieces")


def join(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the results of parts that measured one thing in pieces: their lists, end to end.

    So are their commands; all else is the first part's.
    """
    first = dict(results[0])
    if "machine" in first:
        commands = dict.fromkeys(result["machine"]["command"] for result in results)
        first["machine"] = {**first["machine"], "command": "; ".join(commands)}
    for name in _LISTS:
        if name in first:
            first[name] = [each for result in results for each in result[name]]
    return first


def take_over(evidence: Evidence, parts: Sequence[Part]) -> None:
    """Take over what the parts that ended left, and draw all pages."""
    shared: dict[str, list[dict[str, Any]]] = {}

    def measured(path: Path, _: str) -> None:
        """Keep a result, whose command names no folder of the evidence."""
        text = path.read_text().replace(f"{path.parent}/", "")
        shared.setdefault(path.name, []).append(json.loads(text))

    taken: Mapping[str, Callable[[Path, str], None]] = {
        "grid": gpu_table.take,
        "bench": measured,
        **{kind: partial(gpu_seen.take, kind) for kind in gpu_seen.REDUCERS},
    }
    for part in parts:
        if part.name not in evidence.ended:
            continue
        for kind, name in part.kept:
            place = evidence.folder / part.name / name
            if place.exists():
                taken[kind](place, evidence.commit)
                print(f"{part.name}: {kind} is taken over")
            else:
                print(f"{part.name}: there is no {name}")
    for name, results in shared.items():
        (RESULTS / name).write_text(json.dumps(join(results), indent=1) + "\n")
    gpu_seen.redraw()
    gpu_table.redraw()
    for page in documents.DOCUMENTS:
        page.write_text(documents.fill(page.read_text()))
