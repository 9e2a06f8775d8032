"""Engines of real vLLM, each group in a process of its own, started as soon as it is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm_table
from kernels_here import importing_kernels
from vllm_jobs import COMPARED, missing, wanted

# Whichever test module comes first, and whatever it imports.
with suppress(pytest.skip.Exception), importing_kernels():
    import kvtxn.backends.slot_tables
    import kvtxn.integrations.vllm_gpu  # noqa: F401

HERE = Path(__file__).parent


class Engines:
    """The jobs of a session, in as many processes as there are cores, at most four.

    They start as soon as the tests are known and run beside the tests that come before.
    """

    def __init__(self, jobs: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtxn-vllm-")
        self._children: list[subprocess.Popen[bytes]] = []
        self._pool = ThreadPoolExecutor()
        self._futures: dict[str, Future[dict[str, dict[str, Any]]]] = {}
        for number, batch in enumerate(batches(jobs, min(4, os.cpu_count() or 1))):
            future = self._pool.submit(self._carry_out, Path(self._folder.name, str(number)), batch)
            self._futures.update(dict.fromkeys(batch, future))

    def report(self, job: str) -> dict[str, Any]:
        """What a job reported; waits for its process."""
        return self._futures[job].result()[job]

    def finished(self, job: str) -> bool:
        """Whether there is a report."""
        future = self._futures.get(job)
        if future is None or not future.done():
            return False
        return not future.cancelled() and future.exception() is None

    def stop(self) -> None:
        """End what still runs: nobody will ask for it."""
        for child in self._children:
            child.kill()  # its workers notice
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def _carry_out(self, folder: Path, jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Run jobs in one child process; returns their reports."""
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps(jobs))
        environment = os.environ | {
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",  # two pools of two threads on two cores wait for each other
            "NUMBA_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [HERE / "vllm_child.py", folder / "jobs.json", folder / "reports.json"]
        with (folder / "log").open("w") as log:
            child = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._children.append(child)
            code = child.wait(timeout=2400)
        text = (folder / "log").read_text()
        if code != 0:
            errors = "\n".join(line for line in text.splitlines() if "Error: " in line)
            raise RuntimeError(
                f"the engines' process ended with {code}:\n{errors[:2000]}\n...\n{text[-4000:]}"
            )
        reports: dict[str, dict[str, Any]] = json.loads((folder / "reports.json").read_text())
        return {name: {**report, "log": text} for name, report in reports.items()}


def batches(jobs: dict[str, dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The jobs in ``count`` batches that take about as long; the longest first."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in sorted(jobs, key=lambda name: -jobs[name]["weight"]):
        lightest = min(found, key=lambda batch: sum(job["weight"] for job in batch.values()))
        lightest[name] = jobs[name]
    return [batch for batch in found if batch]


def needed(items: list[Any]) -> dict[str, set[str] | None]:
    """The scenarios of each job that the collected tests need; None: all of them."""
    found: dict[str, set[str] | None] = {}
    for item in items:
        params = getattr(item, "callspec", None)
        job = None if params is None else params.params.get("job")
        if job is not None:
            scenario = params.params.get("scenario")
            known = found.setdefault(job, set())
            found[job] = None if scenario is None or known is None else known | {scenario}
    return found


ENGINES = pytest.StashKey[Engines]()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the engines that the collected tests need."""
    if session.config.option.collectonly or missing() is not None:
        return
    found = needed(session.items)
    jobs = wanted({job: found[job] for job in found if missing(job) is None})
    if jobs:
        session.config.stash[ENGINES] = Engines(jobs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember what whole jobs showed, and leave no engine behind."""
    engines = session.config.stash.get(ENGINES, None)
    if engines is not None:
        found = needed(session.items)
        whole = [job for job in COMPARED if job in found and found[job] is None]
        reports = {job: engines.report(job) for job in whole if engines.finished(job)}
        engines.stop()
        remember(session.config, reports)


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> Callable[[str], dict[str, Any]]:
    """A job's report, by name; skips where the job cannot run here."""

    def report(name: str) -> dict[str, Any]:
        reason = missing(name)
        if reason is not None:
            pytest.skip(reason)
        return request.config.stash[ENGINES].report(name)

    return report


def remember(config: pytest.Config, reports: dict[str, dict[str, Any]]) -> None:
    """Leave what whole jobs showed in pytest's cache, for ``vllm_table``."""
    if not reports or not config.pluginmanager.hasplugin("cacheprovider"):
        return
    engine = f"vllm-cpu {version('vllm-cpu')}, V1 model runner, float32"
    seen = config.cache.get(vllm_table.CACHE, {})
    for job, report in reports.items():
        seen[job] = {"engine": engine, "policies": vllm_table.record(job, report)}
    config.cache.set(vllm_table.CACHE, seen)
