"""``kvtxn audit`` and ``kvtxn trace`` over real engines: health, a known fault, their pages."""

from __future__ import annotations

import json
import re

import pytest
from engine_jobs import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.engines(
        *(f"command-{name}" for name in ("chat", "own-prompts", "refused", "trace", "pooling"))
    ),
]

BLOCK = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_of(path):
    """The data of a page."""
    return json.loads(BLOCK.search(path.read_text())[1])


def test_a_healthy_engine_is_called_healthy(ended):
    """Exit code 0, one sentence, a page with every step."""
    end, folder = ended("chat")
    assert end.code == 0, end.out + end.err
    said = " ".join(end.out.split())
    assert re.match(r"Healthy: [\d,]+ rows were read in [\d,]+ steps of \d+ requests, and ", said)
    assert said.endswith("The page: page.html")
    assert max(map(len, end.out.splitlines())) <= 100
    page = page_of(folder / "page.html")
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


def test_own_prompts_with_windows(ended):
    """A file of prompts, an engine of the user's with a policy; JSON for programs."""
    end, _ = ended("own-prompts")
    assert end.code == 0, end.out + end.err
    found = end.json()
    assert (found["verdict"], found["requests"], found["violations"]) == ("healthy", 2, [])
    assert found["failed"] == found["sentences"] == []
    (counters,) = found["counters"]
    assert counters["kvtxn_windows_total"] > 0
    assert counters["kvtxn_audit_rows_checked_total"] > 100


def test_an_engine_that_does_not_start(ended):
    """One sentence, exit code 2, and no page."""
    end, folder = ended("refused")
    assert end.code == 2
    assert end.out == ""
    lines = [line for line in end.err.splitlines() if "starting the engine" not in line]
    said = " ".join(" ".join(lines).split())
    assert said.startswith("kvtxn audit: vLLM refuses these engine arguments: ")
    assert "Traceback" not in end.err
    assert len(lines) <= 6
    assert not (folder / "page.html").exists()


def test_a_pooling_engine_is_refused_before_it_starts(ended):
    """One sentence, which says what to do instead."""
    end, _ = ended("pooling")
    assert (end.code, end.out) == (2, "")
    said = " ".join(end.err.split())
    assert "kvtxn audit: no workload can be played here: it is a pooling engine" in said
    assert said.endswith("and ask audit_report(llm)")


def test_a_trace_shows_what_a_window_does(ended):
    """A page and a small picture, drawn from a run under ``deferred``."""
    end, folder = ended("trace")
    assert end.code == 0, end.out + end.err
    page = page_of(folder / "t.html")
    assert page["engine"]["windows"] == "deferred"
    assert page["restores"] is True
    picture = (folder / "t.svg").read_text()
    assert picture.startswith("<svg ")
    for look in ("waits", "durable", "mark"):
        assert f'class="{look}"' in picture
    assert 'class="rejected"' not in picture
    assert len(picture) < 60_000
