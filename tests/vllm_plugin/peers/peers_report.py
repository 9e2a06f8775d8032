"""A pytest plug-in that says, line by line of JSON, what becomes of each test.

python -m pytest -p peers_report --kvtxn-report report.jsonl tests/...
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvtxn-report``: the path of the report."""
    parser.addoption("--kvtxn-report", type=Path, help="a file that gets one line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    """Report."""
    config.pluginmanager.register(Reporter(config.getoption("--kvtxn-report")))


class Reporter:
    """Says line by line what became of each test, what its engines had of windows and of audits.

    Args:
        path: a process that is killed leaves there what it said until then.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.tests, self.engines, self.file = path, {}, 0, ""

    def _say(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is one test that failed."""
        if report.outcome != "passed":
            self._say(test=report.nodeid, outcome=report.outcome, why=_reason(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The test that runs now, should the process not survive it."""
        self.file = nodeid.partition("::")[0]
        self._say(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of its three phases is what became of a test; it ends with the third."""
        worse = report.outcome != "passed"
        if worse or (report.when == "call" and report.nodeid not in self.tests):
            self.tests[report.nodeid] = (report.outcome, _reason(report) if worse else "")
        if report.when == "teardown":
            outcome, why = self.tests[report.nodeid]
            self._say(test=report.nodeid, outcome=outcome, why=why)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Engines that ended since the last test."""
        self._count()

    def pytest_sessionfinish(self) -> None:
        """Engines that outlived their tests, and the report's last line."""
        gc.collect()
        self._count()
        self._say(end=True)

    def _count(self) -> None:
        plugin = sys.modules.get("kvtxn.integrations.vllm_plugin")
        ended = plugin.last_snapshots()[self.engines :] if plugin else []
        self.engines += len(ended)
        windows, rows = (
            sum(int(ranks[-1].get(name, 0)) for ranks in ended)
            for name in ("kvtxn_windows_total_committed", "kvtxn_audit_rows_checked_total")
        )
        if windows or rows:
            self._say(file=self.file, windows=windows, rows=rows)


def pytest_collection_finish() -> None:
    """Most of vLLM's tests end in a collection: what was imported is no part of it."""
    gc.collect()
    gc.freeze()


def _reason(report: Any) -> str:
    """The cause, in a line: of a skip its reason, of a failure the error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2] if crash is not None else lines[-2:])[:400]
