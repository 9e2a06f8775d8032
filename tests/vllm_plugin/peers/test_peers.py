"""PEERS.md is what the recorded runs say, and tells apart why tests do not pass."""

from __future__ import annotations

import json

import pytest
import torch
from peers_page import RECORD, TABLE, by_file, draw

RECORDED = json.loads(RECORD.read_text())


def test_the_page_is_drawn_from_the_record():
    assert TABLE.read_text() == draw(RECORDED)


@pytest.mark.parametrize("platform", RECORDED)
def test_windows_were_had(platform):
    """Without windows kvtxn would have had nothing to do with it."""
    lines = RECORDED[platform]["files"].values()
    assert any({"undo", "deferred"} <= line["windows"].keys() for line in lines)


def runs_of(undo, stock, deferred=None, windows=None, audit=None):
    """Outcomes of some tests in four runs."""
    outcomes = {"undo": undo, "stock": stock, "deferred": deferred or {}, "audit": audit or {}}
    return {
        policy: {
            "tests": {test: (outcome, "") for test, outcome in found.items()},
            "windows": (windows or {}).get(policy, {}),
            "rows": {"a.py": 70} if policy == "audit" else {},
        }
        for policy, found in outcomes.items()
    }


def test_an_outcome_that_differs_is_listed():
    undo = {"a.py::x": "passed", "a.py::y": "failed"}
    files = by_file(runs_of(undo, {"a.py::x": "passed", "a.py::y": "passed"}))
    assert files["a.py"]["passed"] == 1
    assert list(files["a.py"]["differs"]) == ["a.py::y"]
    assert "1 end otherwise" in draw({"CPU": {"engine": "e", "files": files}})


def test_an_audited_file_is_compared_with_stock():
    """One that ran under the ledger alone counts by that run; a difference is listed."""
    files = by_file(runs_of({}, {"a.py::x": "passed"}, audit={"a.py::x": "passed"}))
    assert files["a.py"]["passed"] == 1
    assert not files["a.py"]["differs"]
    assert "| a.py | 1 |  | 70 |" in draw({"CPU": {"engine": "e", "files": files}})
    files = by_file(runs_of({}, {"a.py::x": "passed"}, audit={"a.py::x": "failed"}))
    assert files["a.py"]["differs"]["a.py::x"] == "stock: passed, audit: failed"
    both = {"a.py::x": "passed"}
    assert "a.py::x" in by_file(runs_of(both, both, audit={"a.py::x": "failed"}))["a.py"]["differs"]


def test_vllms_stand_in_for_a_kernel_drops_what_it_writes():
    """The page blames it for failures on the CPU; the day this fails, that note goes."""
    kernels = pytest.importorskip("vllm.utils.cpu_triton_utils")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("a build for GPUs")
    current_platform.import_kernels()
    temperature, ends = torch.tensor([0.5, 2.0]), torch.tensor([2, 3])
    wanted, found = torch.tensor([0.5, 0.5, 2.0]), torch.full((3,), 7.0)
    kernels._expand_kernel_impl(found, temperature, ends, 0, 1)
    assert not torch.equal(found, wanted)
    assert torch.equal(found, torch.full((3,), 7.0))
