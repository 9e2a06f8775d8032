"""Python programs in forks of one process, which imports torch once for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: As ``python PROGRAM`` does, in the program's folder or another one.
_START = """
import os, runpy, sys
os.chdir({folder!r})
sys.path[0] = {parent!r}
runpy.run_path({program!r}, run_name={name!r})
"""


def run(
    programs: Sequence[Path],
    environment: Mapping[str, str],
    folder: Path | None = None,
    name: str = "__main__",
) -> dict[Path, dict[str, Any]]:
    """Run programs one after the other; returns how each ended.

    Args:
        programs: their files.
        environment: variables of all of them.
        folder: they run in it; None: each runs in its own.
        name: each program's ``__name__``.
    """
    starts = [
        _START.format(
            folder=str(folder or each.parent), parent=str(each.parent), program=str(each), name=name
        )
        for each in programs
    ]
    child = Path(__file__).with_name("installed_commands.py")
    done = subprocess.run(
        [sys.executable, child, json.dumps([["-c", start] for start in starts])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(programs, json.loads(done.stdout), strict=True))
