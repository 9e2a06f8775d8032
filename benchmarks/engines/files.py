"""The files of a ``kvtxn bench vllm`` result: JSON, and Markdown made from it.

The JSON has ``common.machine`` (hardware, versions, commit, command), ``settings`` (the options),
``conditions`` (what else held: engine arguments, environment, what the plug-in announced, and in
``ended`` what kept cells from being measured) and ``cells``: a load and, under ``engines``, for
each what its rounds gave, what the plug-in counted meanwhile per rank, and ``of_stock``, the
comparison. For an engine with an audit, ``audit`` counts the rows read and the violations of the
whole cell. ``audit_memory`` in ``conditions`` has the audit's bytes, by engine and rank.
``tests/benchmarks/test_bench_vllm.py`` has all names and types.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...errors import ConfigError
from . import report as vllm_report
from .load import name

#: Version of the JSON's format; readers refuse files of another version.
FORMAT: Final = 2


def write(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """Write the JSON file ``folder/name.json``, whole or not at all, and return its path.

    The folder is made, and a file of that name replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)
    return path


def publish(path: Path) -> list[Path]:
    """Write a result's Markdown beside its JSON file; without tabulate only print how to get it.

    The note goes to the standard error stream.

    Returns:
        The paths of all files of the result that exist now, the JSON file first.
    """
    result = json.loads(path.read_text())
    made = [path]
    try:
        text = vllm_report.report(result)
        made.append(path.with_suffix(".md"))
        made[-1].write_text(text)
    except ModuleNotFoundError as error:
        again = f"pip install 'kvtxn[bench]', then kvtxn bench report {path}"
        print(f"Markdown needs {error.name}: {again}", file=sys.stderr)
    return [each for each in made if each.exists()]


def line(cell: Mapping[str, Any]) -> str:
    """Return a finished cell as one line of text.

    Load, tokens per second, share of stock, audit.
    """
    parts = [", ".join(name(cell))]
    for label, engine in cell["engines"].items():
        speed = f"{label} {engine['tokens_per_s']['median']:.0f} tokens/s"
        if "of_stock" in engine:
            speed += f" = {vllm_report.ratio(engine['of_stock']['tokens_per_s'])}"
        if "audit" in engine:
            speed += f", {engine['audit']['rows']} rows read, {engine['audit']['violations']} wrong"
        parts.append(speed)
    return " | ".join(parts)


# -- `kvtxn bench report` ----------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvtxn bench report``."""
    parser.description = (
        "Markdown from result files of `kvtxn bench vllm`: for files that come from a machine "
        "without tabulate, or from a release that wrote other text."
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="NAME.json")


def run(args: argparse.Namespace) -> int:
    """Write NAME.md beside each NAME.json, and print the paths of both; return the exit code 0.

    Raises:
        ConfigError: a file is no result of ``kvtxn bench vllm``; those before it are written.
    """
    for path in args.files:
        found = _format(path)
        if found != FORMAT:
            raise ConfigError(
                "bench report",
                f"{path} is not a result of `kvtxn bench vllm`",
                expected=f"a JSON file of format {FORMAT}",
                got=found,
                hint="pass what `kvtxn bench vllm` wrote",
            )
        for made in publish(path):
            print(made)
    return 0


def _format(path: Path) -> object:
    """Return the format that a file says it has; a few words instead if it is no result.

    "none" for a JSON object that says nothing.
    """
    if not path.is_file():
        return "a folder" if path.is_dir() else "no such file"
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return "no JSON"
    return found.get("format", "none") if isinstance(found, dict) else "no JSON object"
