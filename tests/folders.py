"""Folders whose modules tests import from other folders; child processes of tests get them too.

pytest has the same list as ``pythonpath`` in pyproject.toml. No folder of tests is a package: then
pytest would put the repository's root on the path, where ``kvtxn/`` lacks its backends.
"""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent  # a path through ".." has another parent
SHARED = ["tests", "tests/serving", "tests/vllm_plugin/grid", "tests/vllm_plugin/serve"]


def python_path(*first: Path) -> str:
    """``PYTHONPATH`` for a child process: ``first``, the shared folders, and what is set here."""
    shared = [TESTS.parent / folder for folder in SHARED]
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, (*first, *shared)), *inherited])
