"""``kvtxn bench report``: Markdown from result files of ``kvtxn bench vllm``.

For files that come from a machine without tabulate, or from a release that wrote other text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ...errors import ConfigError
from . import files as vllm_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = __doc__
    parser.add_argument("files", type=Path, nargs="+", metavar="NAME.json")


def run(args: argparse.Namespace) -> int:
    """Write NAME.md beside each file."""
    for path in args.files:
        found = _format(path)
        if found != vllm_files.FORMAT:
            raise ConfigError(
                "bench report",
                f"{path} is not a result of `kvtxn bench vllm`",
                expected=f"a JSON file of format {vllm_files.FORMAT}",
                got=found,
                hint="pass what `kvtxn bench vllm` wrote",
            )
        for made in vllm_files.publish(path):
            print(made)
    return 0


def _format(path: Path) -> object:
    """Read the format that a file says it has; a few words instead if it is no result."""
    if not path.is_file():
        return "a folder" if path.is_dir() else "no such file"
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return "no JSON"
    return found.get("format", "none") if isinstance(found, dict) else "no JSON object"
