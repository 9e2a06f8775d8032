"""The rows, findings and costs of the audits of ``kvtxn bench vllm``, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..common.markdown import table
from .audits import complaints
from .load import COLUMNS, name

_PARTS: Final = ("taken", "formula", "slots", "positions", "checksums", "constant")

_COUNTED: Final = (
    "Of each whole cell (its first round and those for the first token and the clock included), "
    "summed over ranks. A request of a step is not judged if what the engine told of it is "
    "malformed, or if nobody said which of its drafts were kept."
)
_MEMORY: Final = (
    "Bytes of each audit on its device, and by the formula: 8 per slot and state of each group, 8 "
    "per request and position, 8 per slot and layer where bytes are compared, and a constant "
    "(the latest writers, and violations that wait to be read)."
)


def audit(result: Mapping[str, Any]) -> str:
    """Tabulate rows read and violations by cell, with the host's time; then the memory."""
    cells = result["cells"]
    engines = [
        (cell, label, engine)
        for cell in cells
        for label, engine in cell["engines"].items()
        if "audit" in engine
    ]
    timed = any("host_us" in engine for _, _, engine in engines)
    rows = []
    for cell, label, engine in engines:
        found = engine["audit"]
        row = [*name(cell), label]
        row += [str(found[each]) for each in ("steps", "rows", "states")]
        row += [_kinds(found), str(found["unjudged"])]
        rows.append([*row, *(_host(engine) if timed else [])])
    header = [*COLUMNS, "audit", "steps", "rows read", "states read", "violations", "not judged"]
    header += ["host: before the forward, us", "after it, us", "both, us"] if timed else []
    parts = [table(header, rows), _COUNTED]
    if wrong := complaints(cells):
        parts.append("\n".join(f"- **The audit found:** {each}" for each in wrong))
    if known := _memory(result["conditions"].get("audit_memory", {})):
        parts += [known, _MEMORY]
    return "\n\n".join(parts)


def _kinds(found: Mapping[str, Any]) -> str:
    """Show the number of violations and, where there are some, their kinds."""
    if not found["violations"]:
        return "0"
    kinds = ", ".join(f"{kind} {count}" for kind, count in found["kinds"].items())
    return f"**{found['violations']}**: {kinds}"


def _host(engine: Mapping[str, Any]) -> list[str]:
    """Show the median times that an audit takes in a step on the host of rank 0."""
    clocked = next(iter(engine.get("host_us") or ()), None)
    if clocked is None:
        return ["-"] * 3
    return [*(f"{clocked[part]:.0f}" for part in ("begin", "commit")), both(clocked)]


def both(clocked: Mapping[str, float]) -> str:
    """Show the host's time before and after the forward: its median and, if known, quartiles."""
    whole = f"{clocked['both']:.0f}"
    if "lower" not in clocked:  # a result from before they were written
        return whole
    return f"{whole} ({clocked['lower']:.0f} to {clocked['upper']:.0f})"


def _memory(ranks_of: Mapping[str, Any]) -> str:
    """Tabulate the bytes that each engine's audit takes, by rank; "" without any."""
    rows = [
        [label, str(rank), *(str(taken[part]) for part in _PARTS)]
        for label, ranks in ranks_of.items()
        for rank, taken in enumerate(ranks)
        if taken is not None
    ]
    header = ["audit", "rank", "bytes", "by the formula", "slots", "positions", "checksums"]
    return table([*header, "constant"], rows) if rows else ""
