"""``kvtxn audit`` and ``kvtxn trace`` over real engines: health, a known fault, their pages."""

from __future__ import annotations

import json
import re

import audits
import pytest
from engine_jobs import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

BLOCK = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_of(path):
    """The data of a page."""
    return json.loads(BLOCK.search(path.read_text())[1])


def test_a_healthy_engine_is_called_healthy(tmp_path):
    """Exit code 0, one sentence, a page with every step."""
    ended = audits.audit(tmp_path, "chat", "--requests", 24, "--html", "page.html")
    assert ended.code == 0, ended.out + ended.err
    said = " ".join(ended.out.split())
    assert re.match(r"Healthy: [\d,]+ rows were read in [\d,]+ steps of \d+ requests, and ", said)
    assert said.endswith("The page: page.html")
    assert max(map(len, ended.out.splitlines())) <= 100
    page = page_of(tmp_path / "page.html")
    recording = page["recording"]
    assert page["verdict"]["word"] == "healthy"
    assert len(recording["steps"]) == page["counters"][0]["kvtxn_audit_steps_total"] > 50
    assert recording["dropped"] == 0
    assert sum(step[3] for step in recording["steps"]) > 0  # drafts were accepted, and more made
    assert sum(step[2] for step in recording["steps"]) > sum(s[3] for s in recording["steps"])
    names = [life["name"] for life in recording["requests"]]
    assert any("aborted" in name for name in names)
    assert any(life["reused"] > 0 for life in recording["requests"])
    assert all(life["end"] is not None for life in recording["requests"][:-1])


def test_own_prompts_with_windows(tmp_path):
    """A file of prompts, an engine of the user's with a policy; JSON for programs."""
    (tmp_path / "prompts.jsonl").write_text(
        '"It was a fine evening"\n{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5], "max_tokens": 12}\n'
    )
    from kvtxn.integrations.audit_command.command import PLAIN

    engine = {**PLAIN, "additional_config": {"kvtxn": {"policy": "undo"}}}
    ended = audits.audit(tmp_path, "prompts.jsonl", "--json", engine=engine)
    assert ended.code == 0, ended.out + ended.err
    found = ended.json()
    assert (found["verdict"], found["requests"], found["violations"]) == ("healthy", 3, [])
    assert found["failed"] == []
    (counters,) = found["counters"]
    assert counters["kvtxn_windows_total"] > 0
    assert counters["kvtxn_audit_rows_checked_total"] > 100


def test_an_engine_that_does_not_start(tmp_path):
    """One sentence, exit code 2, and no page."""
    from kvtxn.integrations.audit_command.command import PLAIN

    engine = {**PLAIN, "max_model_len": -3}
    ended = audits.audit(tmp_path, "chat", "--html", "page.html", engine=engine)
    assert ended.code == 2
    assert ended.out == ""
    said = " ".join(ended.err.split())
    assert said.startswith("kvtxn audit: vLLM refuses these engine arguments: ")
    assert "Traceback" not in ended.err
    assert len(ended.err.splitlines()) <= 6
    assert not (tmp_path / "page.html").exists()


def test_a_trace_shows_what_a_window_does(tmp_path):
    """A page and a small picture, drawn from a run under ``deferred``."""
    ended = audits.run(
        tmp_path, "trace", "--count", 1, "--max-tokens", 32, "--html", "t.html", "--svg", "t.svg"
    )
    assert ended.code == 0, ended.out + ended.err
    page = page_of(tmp_path / "t.html")
    assert page["engine"]["windows"] == "deferred"
    assert page["restores"] is True
    picture = (tmp_path / "t.svg").read_text()
    assert picture.startswith("<svg ")
    for look in ("waits", "durable", "mark"):
        assert f'class="{look}"' in picture
    assert 'class="rejected"' not in picture
    assert len(picture) < 60_000
