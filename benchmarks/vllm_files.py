"""The files of a ``kvtxn bench vllm`` result: JSON, and Markdown and a plot made from it.

The JSON has ``machine`` (hardware, versions, commit, command), ``settings`` (the options),
``conditions`` (what else held: engine arguments, environment, what the plug-in announced, and in
``ended`` what kept cells from being measured) and ``cells``: a load and, under ``engines``, for
each what its rounds gave, what the plug-in counted meanwhile per rank, and ``of_stock``, the
comparison. ``tests/vllm/test_vllm_bench.py`` has all names and types.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from . import vllm_report

#: Of the JSON; readers refuse another.
FORMAT: Final = 2


def write(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """Write the JSON, whole or not at all; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)
    return path


def publish(path: Path) -> list[Path]:
    """Make Markdown and plot from a JSON file; returns all files that are there."""
    result = json.loads(path.read_text())
    document = path.with_suffix(".md")
    document.write_text(vllm_report.report(result))
    made = [path, document]
    if not result["cells"]:
        return made
    try:
        from .vllm_plot import draw
    except ImportError:
        return made
    made.append(path.with_suffix(".png"))
    draw(result, made[-1])
    return made


def line(cell: Mapping[str, Any]) -> str:
    """A cell in a line, to print while others run."""
    parts = [", ".join(vllm_report.name(cell))]
    for label, engine in cell["engines"].items():
        speed = f"{label} {engine['tokens_per_s']['median']:.0f} tokens/s"
        if "of_stock" in engine:
            speed += f" = {vllm_report.ratio(engine['of_stock']['tokens_per_s'])}"
        parts.append(speed)
    return " | ".join(parts)
