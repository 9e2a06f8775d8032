"""PEERS.md is what the recorded run says, and tells apart why tests do not pass."""

from __future__ import annotations

import json

import pytest
from vllm_peers import RECORD, TABLE, by_file, cause, draw

RECORDED = json.loads(RECORD.read_text())


def test_the_page_is_drawn_from_the_record():
    assert TABLE.read_text() == draw(RECORDED)


def test_windows_were_had_and_nothing_differs():
    """Without windows kvtxn would have had nothing to do with it."""
    lines = RECORDED["files"].values()
    assert any({"undo", "deferred"} <= line["windows"].keys() for line in lines)
    assert not any(line["differs"] for line in lines)


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("Skipped: CUDA required for acceptance estimator tests", "a GPU"),
        ("ValueError: Unsupported platform", "a GPU"),
        ("Skipped: the V2 runner needs triton-cpu, which CI builds", "Triton"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find", "the hub"),
        ("assert 1 == 2", "something else"),
    ],
)
def test_causes_are_told_apart(reason, wanted):
    assert cause("failed", reason) == wanted


def test_an_outcome_that_differs_is_listed():
    undo = {
        "tests": {"a.py::x": ("passed", ""), "a.py::y": ("failed", "CUDA")},
        "windows": {"a.py": 3},
    }
    stock = {"tests": {"a.py::y": ("passed", "")}, "windows": {}}
    files = by_file({"undo": undo, "deferred": {"tests": {}, "windows": {}}, "stock": stock})
    assert files["a.py"]["passed"] == 1
    assert files["a.py"]["windows"] == {"undo": 3}
    assert list(files["a.py"]["differs"]) == ["a.py::y"]
    assert "1 end otherwise" in draw({"engine": "e", "files": files})
