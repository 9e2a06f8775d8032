"""The page of an audit: one file, whole data, words that anybody can read."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import recorded
import torch
from kvtxn.integrations.audit_command import page
from ledger_kit.mutants import KeepsOneRowTooMany

from kvtxn.audit import RecordingLedger, RowGroup, Step
from kvtxn.audit.recording import RUN_FIELDS

BLOCK = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
#: Anything that would make a browser look for another resource.
OUTSIDE = re.compile(r"https?:|//[a-z]+\.|\bsrc\s*=|\bhref\s*=|url\(|@import|\bfetch\(|\bimport\b")


def test_the_page_is_whole_and_needs_nothing_else():
    """Its data are one block of JSON; no address, no picture, no font, no framework."""
    data = recorded.data(recorded.found())
    text = page.page(data)
    (block,) = BLOCK.findall(text)
    assert json.loads(block) == json.loads(json.dumps(data))
    assert len(data["recording"]["runs"]) % len(RUN_FIELDS) == 0
    assert len(data["recording"]["steps"]) == 60
    assert (data["verdict"]["word"], data["restores"]) == ("healthy", False)
    rest = BLOCK.sub("", text)
    assert OUTSIDE.search(rest) is None
    assert "{{" not in rest
    assert rest.count("<script") == rest.count("<style") == 1


def test_the_verdict_is_readable_without_the_script():
    """Its headline and sentences stand in the page itself, whatever is in them."""
    values = recorded.data(recorded.found())
    sentences = ["first <one>", "second & last"]
    values = values | {"verdict": values["verdict"] | {"headline": "a < b", "sentences": sentences}}
    text = page.page(values).partition("<main>")[0]
    assert "<h1>a &lt; b</h1>" in text
    assert "<li>first &lt;one&gt;</li><li>second &amp; last</li>" in text
    assert '<header class="good">' in text
    for said in (f"{values['title']}: healthy", "vLLM 0.0 · model small", "need JavaScript"):
        assert said in text
    assert f"<p>Made by <code>{values['command']}</code></p>" in page.page(values)


def test_names_cannot_leave_their_place():
    """A request may be called anything."""
    found = recorded.found(steps=8)
    name = "</script><script>alert(1)</script>{{data}}"
    found.recordings[0]["requests"][0]["name"] = name
    text = recorded.html(found)
    assert "alert(1)</script>" not in text
    (block,) = BLOCK.findall(text)
    assert json.loads(block)["recording"]["requests"][0]["name"] == name


@pytest.mark.parametrize(
    ("policy", "restores"), [("undo", True), ("deferred", True), ("direct", False)]
)
def test_windows_put_slots_back(policy, restores):
    """The picture has to know, since the ledger marks rejected rows either way."""
    data = recorded.data(recorded.found(steps=8, policy=policy))
    assert data["restores"] is restores
    assert bool(data["draft_label"]) is restores
    assert data["engine"]["windows"] == policy


def test_notes_say_what_the_picture_leaves_out():
    found = recorded.found(steps=30, most=50)
    found.failed.append("request 3: too long")
    found.recordings.append(found.recordings[0])
    found.counters[0]["kvtxn_bypassed_windows_total"] = 2
    found.counters.append(found.counters[0])
    notes = recorded.data(found)["notes"]
    assert notes[0] == "The picture shows rank 0 of 2."
    assert re.match(r"The picture ends after step \d+ of 30: ", notes[1])
    assert notes[2].startswith("2 steps had no window")
    assert notes[3] == "Failed: request 3: too long"


def test_the_rank_with_a_violation_is_shown():
    healthy = recorded.found(steps=20)
    wrong = recorded.found(engine=KeepsOneRowTooMany, steps=60)
    assert wrong.recordings[0]["violations"]
    healthy.recordings.append(wrong.recordings[0])
    healthy.counters.append(wrong.counters[0])
    data = recorded.data(healthy)
    assert data["rank"] == 1
    assert data["verdict"]["word"] == "violations"
    assert data["notes"][-1].startswith("This page has users' text: ")
    assert not any(
        "users' text" in note for note in recorded.data(recorded.found(steps=20))["notes"]
    )


def test_half_a_page_is_not_left(monkeypatch, tmp_path):
    """A disk that is full is named with the file."""
    path = tmp_path / "page.html"

    def write_text(self, text, encoding):
        self.write_bytes(text[:9].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(page, "data", lambda *args: {})
    monkeypatch.setattr(page, "page", lambda data: "<!doctype html>")
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(OSError, match=r"No space left on device: '.*page\.html'") as failed:
        page.write(path, title="", verdict=None, found=None, command="")
    assert failed.value.errno == errno.ENOSPC
    assert not path.exists()


@pytest.mark.parametrize("healthy", [True, False])
def test_an_engine_of_ones_own_has_a_page(tmp_path, healthy):
    """Its recording is in it, the policy of its windows, and the verdict of its ledger."""
    ledger = RecordingLedger([RowGroup("rows", 4, 4)], max_requests=1, max_length=8)
    ledger.admit("chat", [11, 12])
    ledger.hand_out("rows", [0])
    step = Step(
        lines=torch.tensor([ledger.line("chat")]),
        starts=torch.tensor([0, 2]),
        first=torch.tensor([0]),
        tokens=torch.tensor([11, 12]),
        slots={"rows": torch.tensor([0, 1 if healthy else -1])},
        tables={"rows": torch.tensor([[0]])},
    )
    ledger.write(step)
    ledger.check(step)
    path = tmp_path / "page.html"
    verdict = page.write_ledger(path, ledger, title="mine", policy="undo")
    assert verdict.exit_code == (0 if healthy else 1)
    values = json.loads(BLOCK.findall(path.read_text())[0])
    assert (values["title"], values["restores"]) == ("mine", True)
    assert len(values["recording"]["steps"]) == len(values["recording"]["requests"]) == 1
    assert values["verdict"]["headline"] == verdict.headline
    assert bool(values["recording"]["violations"]) != healthy
