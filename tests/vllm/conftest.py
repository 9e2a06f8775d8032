"""Engines of real vLLM, each group in a process of its own, started as soon as it is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import vllm_table
from vllm_jobs import COMPARED, missing, wanted

HERE = Path(__file__).parent


def carry_out(folder: Path, jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
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
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            [sys.executable, HERE / "vllm_child.py", folder / "jobs.json", folder / "reports.json"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=1500,
        ).returncode
    text = (folder / "log").read_text()
    if code != 0:
        raise RuntimeError(f"the engines' process ended with {code}:\n{text[-6000:]}")
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


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A job's report, by name; all jobs of the session start with the first call."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("vllm")
    found = needed(request.session.items)
    names = {job: found[job] for job in found if missing(job) is None}
    jobs = wanted(names)
    with ThreadPoolExecutor() as pool:
        futures: dict[str, Future[dict[str, dict[str, Any]]]] = {}
        for number, batch in enumerate(batches(jobs, min(4, os.cpu_count() or 1))):
            future = pool.submit(carry_out, folder / str(number), batch)
            futures.update(dict.fromkeys(batch, future))

        def report(name: str) -> dict[str, Any]:
            reason = missing(name)
            if reason is not None:
                pytest.skip(reason)
            return futures[name].result()[name]

        yield report
        whole = [job for job in COMPARED if job in names and names[job] is None]
        remember(request.config, {job: futures[job] for job in whole})


def remember(config: pytest.Config, futures: dict[str, Future[dict[str, dict[str, Any]]]]) -> None:
    """Leave what whole jobs showed in pytest's cache, for ``vllm_table``."""
    engine = f"vllm-cpu {version('vllm-cpu')}, V1 model runner, float32"
    seen = config.cache.get(vllm_table.CACHE, {})
    for job, future in futures.items():
        if future.exception() is None:
            found = vllm_table.record(job, future.result()[job])
            seen[job] = {"engine": engine, "policies": found}
    config.cache.set(vllm_table.CACHE, seen)
