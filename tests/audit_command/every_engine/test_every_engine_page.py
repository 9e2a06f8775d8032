"""The record of audits of every kind of engine, and its page."""

from __future__ import annotations

import json

import every_engine_page as pages
import pytest
from engine_kinds import ON_CPU, ON_GPU


def kind(**changes):
    """What is kept of an audit."""
    found = {
        "verdict": "healthy", "kinds": {}, "sentences": [], "failed": 0, "why": "", "requests": 9,
        "steps": 1200, "rows_checked": 34567, "states_checked": 0, "wall": 1.0,
    }  # fmt: skip
    return found | changes


def found(**kinds):
    return {"release": "0.32.0", "device": "CPU", "commit": "abc", "kinds": kinds}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of its own."""
    monkeypatch.setattr(pages, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(pages, "PAGE", tmp_path / "page.md")
    return lambda: (json.loads(pages.RECORD.read_text()), pages.PAGE.read_text())


def test_the_page_is_drawn_from_the_record():
    assert pages.PAGE.read_text() == pages.page(json.loads(pages.RECORD.read_text()))


def test_each_recorded_kind_is_one_that_can_be_run_again():
    for place, kinds in json.loads(pages.RECORD.read_text()).items():
        assert set(kinds) <= set(ON_CPU if place.endswith("CPU") else ON_GPU), place


def test_a_kind_that_is_run_again_replaces_what_it_showed(record):
    pages.merge(found(llama=kind(), mamba2=kind(kinds={"state": 1234}, states_checked=40)))
    pages.merge(found(llama=kind(rows_checked=7)) | {"commit": "def"})
    kept, page = record()
    (kinds,) = kept.values()
    assert kinds["llama"]["rows_checked"] == 7
    assert "2 engines, 2,400 steps: 34,574 rows and 40 states were read; in 1 engine some" in page
    lines = [line.replace(" ", "") for line in page.splitlines() if line.startswith("| ")]
    assert lines[1:] == ["|llama|9|1,200|7|||", "|mamba2|9|1,200|34,567|40|state:1,234|"]
    assert "Commits: abc, def." in page
