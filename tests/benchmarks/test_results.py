"""The result files in the repository: what is made from them is current."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvtxn.benchmarks.engines import files as vllm_files

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"  # wheels have none
FILES = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
ENGINES = [path for path, found in FILES.items() if found.get("format") == vllm_files.FORMAT]


def test_there_are_results():
    """The rules below would hold of an empty list."""
    assert len(FILES) > 5
    assert ENGINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_where_it_is_from(path):
    """A command, versions, and a commit that is one: no changes beside it."""
    machine = FILES[path]["machine"]
    assert machine["command"]
    assert machine["torch"]
    int(machine["commit"], 16)
