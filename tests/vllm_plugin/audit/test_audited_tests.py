"""``pytest --kvtxn-audit``: tests whose engines read wrong rows fail, and only those."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from engine_jobs import missing
from kvtxn.integrations.pytest_audit import engines
from kvtxn.integrations.pytest_audit.plugin import AuditedEngines

from kvtxn import log


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.engines("audited-tests")
def test_of_real_engines_those_with_wrong_rows_fail(reports):
    """In the test's own process and in another one; a failure of a test's own keeps its reason."""
    report = reports("audited-tests")["alone"]
    out = report["out"]
    assert report["rc"] == 1, out
    assert "2 failed, 3 passed" in out
    for name, outcome in (
        ("test_that_is_well", "PASSED"),
        ("test_with_a_lost_write", "FAILED"),
        ("test_with_a_lost_write_that_fails_anyway", "FAILED"),
        ("test_that_is_well_again", "PASSED"),
        ("test_whose_engine_is_in_another_process", "PASSED"),
    ):
        assert f"{outcome} test_engines.py::{name}" in out, out
    assert out.count("kvtxn's audit found wrong rows in a KV cache:") >= 2
    assert "RuntimeError: a failure of its own" in out
    assert "; found unwritten" in out
    assert "workers watched: 2, wrong reads: " in out
    read = re.search(
        r"\nrows read: ([\d,]+), states read: 0, of these compared by .*: ([\d,]+)\n", out
    )
    assert read is not None, out
    rows, compared = (int(number.replace(",", "")) for number in read.groups())
    assert 0 < compared < rows  # one engine of two, and a share of its rows


@pytest.fixture
def audits(monkeypatch):
    """What the plug-in registers, outside of a run of pytest."""
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    audits = AuditedEngines("ledger")
    yield audits
    audits.pytest_unconfigure()
    assert engines.VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--kvtxn-audit"], "ledger"),
        (["--kvtxn-audit=bytes", "tests"], "bytes"),
        (["tests", "--kvtxn-audit", "-q"], "ledger"),
        (["tests"], None),
    ],
)
def test_the_option_has_two_values(pytestconfig, given, found):
    """Without a value it is the ledger."""
    assert pytestconfig._parser.parse_known_args(given).kvtxn_audit == found


def test_a_path_is_no_audit(pytestconfig):
    """pytest takes the word after the option for its value."""
    with pytest.raises(pytest.UsageError, match="'tests' is no audit: write --kvtxn-audit=ledger"):
        pytestconfig._parser.parse_known_args(["--kvtxn-audit", "tests"])


def test_lines_that_are_half_written_wait(audits):
    """A process may be killed while it writes."""
    path = json.loads(os.environ[engines.VARIABLE])["events"]
    whole = json.dumps({"event": engines.VIOLATION, "kind": "foreign", "rows": 3})
    with open(path, "a") as file:
        file.write(whole[:20])
        file.flush()
        assert audits._take() == []
        file.write(f"{whole[20:]}\n")
    assert [event["rows"] for event in audits._take()] == [3]
    assert audits._violations == 3


class Watch:
    """Stands in for a worker's, which weak references may name."""


def test_the_last_count_of_each_worker_counts(audits):
    """Others are said to have given none; bytes are named where some worker compares them."""
    audits._watched = 3
    one, two = Watch(), Watch()
    for watch, rows in ((one, 5), (two, 7000), (one, 50)):
        engines.tell_counters(watch, {"kvtxn_audit_rows_checked_total": float(rows)})
    audits._take()
    said = audits._what_was_read()
    assert said == "rows read: 7,050, states read: 0; 1 of the workers gave no count"
    more = {"kvtxn_audit_bytes_compared_total": 3.0, "kvtxn_audit_states_checked_total": 2.0}
    engines.tell_counters(Watch(), more)
    audits._take()
    said = audits._what_was_read()
    assert said == "rows read: 7,050, states read: 2, of these compared by their bytes: 3"


def test_without_the_option_no_count_is_told(monkeypatch):
    """A worker is asked for its counters all the time."""
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    told = []
    monkeypatch.setattr(engines, "_append", lambda *given: told.append(given))
    engines.tell_counters(Watch(), {})
    assert told == []


def test_an_engine_may_outlive_the_tests(monkeypatch):
    """A server that a test started goes on, and logs; its file is gone."""
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    audits = AuditedEngines("ledger")
    end = engines.write_events()
    try:
        log.get_logger().debug(engines.ACTIVE)
        assert audits._take() == []
        assert audits._watched == 1
        given = os.environ[engines.VARIABLE]
        audits.pytest_unconfigure()
        monkeypatch.setenv(engines.VARIABLE, given)
        log.get_logger().debug(engines.ACTIVE)
    finally:
        assert end is not None
        end()


ENDS = """
import json, os, pytest

def says():
    told = [
        {"event": "kvtxn.audit_active"},
        {"event": "counted", "worker": "1", "counters": {"kvtxn_audit_rows_checked_total": 5}},
        {"event": "kvtxn.inactive", "why": "another engine is not"},
        {"event": "kvtxn.audit_violation", "kind": "foreign", "step": 3, "found": "foreign"},
    ]
    with open(json.loads(os.environ["KVTXN_PYTEST_AUDIT"])["events"], "a") as file:
        file.writelines(json.dumps(each) + chr(10) for each in told)

@pytest.mark.xfail(HOW in ("mark", "strict"), reason="a reason", strict=HOW == "strict")
def test_one():
    if HOW != "late":
        says()
    if HOW in ("skip", "xfail"):
        getattr(pytest, HOW)("a reason")
    assert HOW != "strict"
"""


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["alone", "xdist"])
@pytest.mark.parametrize("how", ["skip", "xfail", "mark", "strict", "late"])
def test_no_wrong_row_is_passed_over(tmp_path, how, more):
    """By a test that is skipped or expected to fail, or by an engine that says it at the end."""
    (tmp_path / "test_it.py").write_text(ENDS.replace("HOW", repr(how)))
    hook = "import os\nfrom test_it import says\ndef pytest_sessionfinish():\n"
    hook += f"    if {not more} or 'PYTEST_XDIST_WORKER' in os.environ:\n        says()\n"
    (tmp_path / "conftest.py").write_text(hook if how == "late" else "")
    ours = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kvtxn-audit", *more],
        cwd=tmp_path, env=ours | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "kvtxn's audit found wrong rows" in ended.stdout
    assert "workers watched: 1, wrong reads: 1" in ended.stdout
    assert "rows read: 5," in ended.stdout
    assert "not watched, or in part: 1, because another engine is not" in ended.stdout


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (None, {"audit": "ledger", "log_tokens": True}),
        ({"other": 1}, {"audit": "ledger", "log_tokens": True}),
        ({"kvtxn": {"policy": "undo"}}, {"policy": "undo", "audit": "ledger", "log_tokens": True}),
        ({"kvtxn": {"audit": "bytes"}}, {"audit": "bytes"}),
    ],
)
def test_an_engine_keeps_what_it_asks_for(audits, given, asked):
    """The audit is added; other settings, and an audit of the engine's own, stay."""
    before = json.dumps(given)
    found = engines.with_audit(given)
    assert found["kvtxn"] == asked
    assert {**found, "kvtxn": None} == {**(given or {}), "kvtxn": None}
    assert json.dumps(given) == before


def test_settings_that_are_no_mapping_stay(audits):
    """vLLM takes other objects there as well."""
    given = object()
    assert engines.with_audit(given) is given


@pytest.mark.parametrize("given", [None, {"kvtxn": {"policy": "undo"}}])
def test_without_the_option_nothing_is_asked_for(monkeypatch, given):
    """Every engine of vLLM comes by here."""
    monkeypatch.delenv(engines.VARIABLE, raising=False)
    assert engines.with_audit(given) is given


def test_events_of_all_levels_are_heard():
    """A level that hides an event in the log hides it from no listener."""
    heard = []
    end = log.listen(heard.append)
    logger = log.get_logger()
    logger.debug("kvtxn.one", number=1)
    end()
    logger.debug("kvtxn.two")
    assert heard == [{"event": "kvtxn.one", "number": 1}]
