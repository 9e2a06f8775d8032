"""A pytest plug-in for vLLM's own tests: kvtxn active wherever an engine is built, and a report.

python -m pytest -p vllm_peers_plugin --kvtxn-policy undo --kvtxn-report result.json tests/...
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

REPORT = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which policy, if any, and where the report goes."""
    parser.addoption("--kvtxn-policy", help="stock: none")
    parser.addoption("--kvtxn-report", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Every engine's arguments ask for kvtxn; a failure of kvtxn's is a failure of the test."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm_child import replace_kernels_once

    replace_kernels_once()
    current_platform.register_triton_kernel_overrides()  # sampler tests need them without an engine
    asked = {"policy": config.getoption("--kvtxn-policy"), "on_error": "raise"}
    original = EngineArgs.__post_init__

    def asking(self: Any) -> None:
        self.additional_config = {**(self.additional_config or {}), "kvtxn": asked}
        original(self)

    if asked["policy"] != "stock":
        EngineArgs.__post_init__ = asking
    config.stash[REPORT] = {"tests": {}, "windows": Counter()}
    config.pluginmanager.register(Reporter(config.stash[REPORT]))


class Reporter:
    """Keeps what became of each test, and how many windows its engines had."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.tests, self.windows, self.engines = report["tests"], report["windows"], 0

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be read is one test that failed."""
        if report.outcome != "passed":
            self.tests[report.nodeid] = (report.outcome, _reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of its three phases is what became of a test."""
        worse = report.outcome != "passed"
        if worse or (report.when == "call" and report.nodeid not in self.tests):
            self.tests[report.nodeid] = (report.outcome, _reason(report) if worse else "")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Engines that ended since the last test."""
        from kvtxn.integrations.vllm_plugin import last_snapshots

        ended = last_snapshots()[self.engines :]
        self.engines += len(ended)
        found = sum(int(ranks[0].get("kvtxn_windows_total_committed", 0)) for ranks in ended)
        self.windows[item.nodeid.partition("::")[0]] += found


def pytest_collection_finish() -> None:
    """Most of vLLM's tests end in a collection: what was imported is no part of it."""
    gc.collect()
    gc.freeze()


def _reason(report: Any) -> str:
    """Why, in a line: of a skip its reason, of a failure the error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2] if crash is not None else lines[-2:])[:400]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the report."""
    path = config.getoption("--kvtxn-report")
    if path is not None:
        path.write_text(json.dumps(config.stash[REPORT]))
