"""Engines on a GPU: all that the collected tests need, side by side, from the first one on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import connected_jobs
import gpu_table
import pytest
from engine_pool import EngineFailed, EnginePool
from folders import python_path
from gpu_jobs import ENVIRONMENT, JOBS, engines, missing

HERE = Path(__file__).parent

DEFAULTS = {
    "--gpu-reports": None,
    "--gpu-record": None,
    "--gpu-connected": None,
    "--gpu-jobs": 12,
    "--gpu-seconds": 420.0,
}


def setting(config: pytest.Config, name: str) -> Any:
    """An option, or its default where pytest was not started on this folder."""
    return config.getoption(name, DEFAULTS[name])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options: files for reports and for the record, engines at once, seconds for one."""
    parser.addoption("--gpu-reports", type=Path, help="judge the reports of an earlier run")
    parser.addoption("--gpu-record", type=Path, help="write what the engines showed here, as JSON")
    parser.addoption(
        "--gpu-connected", type=Path, help="reports of engines with connectors: read, or written"
    )
    jobs, seconds = DEFAULTS["--gpu-jobs"], DEFAULTS["--gpu-seconds"]
    parser.addoption("--gpu-jobs", type=int, default=jobs, help="engines that run at once")
    parser.addoption("--gpu-seconds", type=float, default=seconds, help="what one engine may take")


def run(
    folder: Path,
    work: str,
    jobs: dict[str, dict[str, Any]],
    option: Callable[[str], Any],
    found: Path | None = None,
) -> Path:
    """Run all these engines; returns the path of their reports, written as they come."""
    pool = EnginePool(
        work,
        jobs,
        folder / "engines",
        count=option("--gpu-jobs"),
        seconds=option("--gpu-seconds"),
        environment=ENVIRONMENT | {"PYTHONPATH": python_path(HERE)},
        preload=["vllm", "vllm.v1.engine.llm_engine"],
    )
    found, reports = found or folder / "reports.json", dict[str, dict[str, Any]]()
    for name in pool.as_they_end():
        log = pool.log(name)
        try:
            lines = [line for line in log.splitlines() if "kvtxn" in line]
            reports[name] = pool.report(name) | {"log": "\n".join(lines)}
        except EngineFailed as failed:
            reports[name] = {"error": str(failed), "log": log[-6000:]}
        found.write_text(json.dumps(reports))
        seconds = reports[name].get("seconds", "")  # until it was built, and since
        print(name, reports[name].get("error", f"done {seconds}"), flush=True)
    pool.stop()
    return found


def kinds(request: pytest.FixtureRequest, name: str) -> set[str]:
    """The values that a parameter has in the collected tests."""
    params = (getattr(item, "callspec", None) for item in request.session.items)
    return {str(p.params[name]) for p in params if p is not None and name in p.params}


@pytest.fixture(scope="session")
def connected(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """The report of an engine with KV connectors; all that are asked for run at the first call."""
    option = partial(setting, request.config)
    found = option("--gpu-connected")
    if found is None or not found.exists():
        if (reason := missing()) is not None:
            pytest.skip(reason)
        asked = kinds(request, "connected_kind")
        jobs = connected_jobs.engines([name for name in connected_jobs.JOBS if name in asked])
        folder = tmp_path_factory.mktemp("connected")
        found = run(folder, "connected_child:carry_out", jobs, option, found)
    by_engine: dict[str, dict[str, Any]] = json.loads(found.read_text())
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print()
        for name, report in by_engine.items():
            print(*connected_jobs.told(name, report), sep="\n", flush=True)
    return lambda name: by_engine.get(name, {"error": "not in these reports"})


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """A job's reports by policy; the engines of all collected tests run at the first call."""
    option = partial(setting, request.config)
    reason = missing() if option("--gpu-reports") is None else None
    if reason is not None:
        pytest.skip(reason)
    asked = kinds(request, "kind")
    asked |= {"trained"} if "tp2" in asked else set()
    names = [name for name in JOBS if name in asked and missing(name) is None]
    found = option("--gpu-reports")
    if found is None:
        folder = tmp_path_factory.mktemp("gpu")
        found = run(folder, "gpu_child:carry_out", engines(names), option)
    by_engine = json.loads(found.read_text())
    if option("--gpu-record") is not None:
        kept = json.dumps(gpu_table.record(by_engine), indent=1)
        option("--gpu-record").write_text(kept + "\n")

    def of(name: str) -> dict[str, Any]:
        start = f"{name}."
        mine = {key[len(start) :]: by_engine[key] for key in by_engine if key.startswith(start)}
        if not mine:
            pytest.skip(missing(name) or "not in these reports")
        return mine

    return of
