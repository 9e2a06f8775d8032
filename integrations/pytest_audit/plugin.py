"""The pytest plug-in behind ``--kvtxn-audit``.

A test in which an audit finds a wrong row fails with what was found; the summary says how many
workers were watched, what they read, and why others were not. An engine that serves several tests
fails the test in which it was found. Without the option the plug-in does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from .engines import ACTIVE, COUNTED, UNWATCHED, VARIABLE, VIOLATION

_AUDITS: Final = ("ledger", "bytes")
#: Violations of one test that are shown.
_SHOWN: Final = 8
#: The key of what a process of pytest-xdist's gives to the process that started it.
_OUTPUT: Final = "kvtxn_audit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--kvtxn-audit[=ledger|bytes]``: "ledger" without a value, None if not given."""
    parser.getgroup("kvtxn").addoption(
        "--kvtxn-audit",
        nargs="?",
        const=_AUDITS[0],
        type=_audit,
        metavar="ledger|bytes",
        help="audit the KV cache of every vLLM engine that a test starts; a test in which a wrong "
        "row is read fails. 'ledger' (the default) compares what rows were computed for, 'bytes' "
        "their content as well",
    )


def _audit(given: str) -> str:
    """Return the audit that the option names; refuse another word, as argparse wants it.

    pytest takes a path that follows the option for its value.
    """
    if given in _AUDITS:
        return given
    raise argparse.ArgumentTypeError(
        f"{given!r} is no audit: write --kvtxn-audit=ledger or --kvtxn-audit=bytes before a path"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register ``AuditedEngines`` if the option is given; else do nothing."""
    audit = config.getoption("--kvtxn-audit")
    if audit is not None:
        config.pluginmanager.register(AuditedEngines(audit), "kvtxn-audited-engines")


class AuditedEngines:
    """The engines of one pytest process, and what their audits say.

    From when it is made, an environment variable asks engines for the audit; ``pytest_unconfigure``
    puts the variable back.

    Args:
        audit: "ledger" or "bytes".
    """

    def __init__(self, audit: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvtxn-audit-"))
        self._events = self._folder / "events.jsonl"
        self._events.touch()
        self._read = 0
        self._late: list[str] = []
        self._watched = self._violations = 0
        self._unwatched: Counter[str] = Counter()
        self._counters: dict[str, dict[str, float]] = {}  # by worker, the last ones
        self._before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = json.dumps({"audit": audit, "events": str(self._events)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Return the report of a phase of a test; fail it if an audit has found a wrong row.

        A phase that fails itself gets what was found as a section of its report; one that is
        skipped or expected to fail fails, too.
        """
        report = yield
        if found := self._found():
            if report.failed:
                report.sections.append(("kvtxn audit", found))
            else:
                vars(report).pop("wasxfail", None)
                report.outcome, report.longrepr = "failed", found
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that passed if engines say after the last test that a wrong row was read.

        A process of pytest-xdist's that ran tests gives what it has counted and found to the
        process that started it.
        """
        self._late += filter(None, [self._found()])
        if self._late and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = {
                "watched": self._watched,
                "violations": self._violations,
                "unwatched": dict(self._unwatched),
                "counters": self._counters,
                "late": self._late,
            }

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a process of pytest-xdist's has counted and found; nothing if it was killed."""
        given = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if given is not None:
            self._watched += given["watched"]
            self._violations += given["violations"]
            self._unwatched.update(given["unwatched"])
            self._counters |= given["counters"]
            self._late += given["late"]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many workers were watched, what they read, and why others were not."""
        self._take()
        terminalreporter.section("kvtxn audit")
        found = f"workers watched: {self._watched}, wrong reads: {self._violations}"
        terminalreporter.line(found if self._watched else "no engine was watched")
        if self._watched:
            terminalreporter.line(self._what_was_read())
        for found in self._late:
            terminalreporter.line(f"after the last test {found}")
        for why, number in self._unwatched.most_common():
            terminalreporter.line(f"not watched, or in part: {number}, because {why}")

    def pytest_unconfigure(self) -> None:
        """Put the environment variable back, and remove the file of events.

        Engines that start from now on are as they were.
        """
        if self._before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = self._before
        shutil.rmtree(self._folder, ignore_errors=True)

    def _what_was_read(self) -> str:
        """Return how many rows and states workers read, and of how many bytes were compared.

        Workers that gave no count are mentioned.
        """
        rows, states, compared = (
            sum(int(each.get(f"kvtxn_audit_{name}_total", 0)) for each in self._counters.values())
            for name in ("rows_checked", "states_checked", "bytes_compared")
        )
        found = f"rows read: {rows:,}, states read: {states:,}"
        if any("kvtxn_audit_bytes_compared_total" in each for each in self._counters.values()):
            found += f", of these compared by their bytes: {compared:,}"
        silent = self._watched - len(self._counters)
        return found + (f"; {silent} of the workers gave no count" if silent > 0 else "")

    def _found(self) -> str:
        """Return what audits found since the last call in words, or "". 8 violations are shown.

        Engines that run in this process are asked for their last step before.
        """
        module = sys.modules.get("kvtxn.integrations.vllm_plugin.engine_calls")
        if module is not None:  # workers look at their last step when they are asked
            module.ask_running_engines()
        found = self._take()
        if not found:
            return ""
        lines = [_sentence(event) for event in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"and {len(found) - _SHOWN} more")
        return "\n".join(["kvtxn's audit found wrong rows in a KV cache:", *lines])

    def _take(self) -> list[dict[str, Any]]:
        """Read the new whole lines of the file, count what they say, and return the violations."""
        with self._events.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        self._watched += sum(event["event"] == ACTIVE for event in events)
        self._counters |= {
            event["worker"]: event["counters"] for event in events if event["event"] == COUNTED
        }
        self._unwatched.update(
            str(event.get("why") or event.get("effect"))
            for event in events
            if event["event"] in UNWATCHED
        )
        violations = [event for event in events if event["event"] == VIOLATION]
        self._violations += sum(event.get("rows", 1) for event in violations)
        return violations


def _sentence(event: dict[str, Any]) -> str:
    """Return a violation in words, and its fields on the next line."""
    import attrs

    from ...audit import Violation

    said: dict[str, Any] = {name: value for name, value in event.items() if name != "event"}
    fields: dict[str, Any] = {each.name: said.get(each.name) for each in attrs.fields(Violation)}
    return f"- {Violation(**fields)}\n  {said}"
