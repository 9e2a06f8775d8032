"""The process of an engine with KV connectors on a GPU: scenarios, and what left the cache."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_child
from connected_jobs import transfer
from connector_scenarios import SCENARIOS
from egress_oracle import EgressOracle
from gpu_oracle import Watch


class Watched(EgressOracle, Watch):
    """The worker extension of these tests."""


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run it; returns its report.

    With ``first`` another engine, in a process of its own, comes before, and they share a store.
    """
    os.environ.update(job.get("environment", {}))
    begin, store = time.monotonic(), folder / "store"
    if job.get("first"):
        earlier = multiprocessing.get_context("fork").Process(
            target=_first, args=(job, folder / "first", store)
        )
        earlier.start()
        earlier.join()
        if earlier.exitcode:
            raise RuntimeError(f"the first engine's process ended with {earlier.exitcode}")
    report = run(build(job, folder, store), job)
    return report | {"seconds": round(time.monotonic() - begin)}


def _first(job: dict[str, Any], folder: Path, store: Path) -> None:
    """Fill the store."""
    folder.mkdir()
    run(build(job, folder, store), job)
    os._exit(0)


def build(job: dict[str, Any], folder: Path, store: Path) -> Any:
    """Build the engine of a job under its policy."""
    options = dict(job.get("options", {}))
    if job["connectors"]:
        options["kv_transfer_config"] = transfer(job["connectors"], store)
    return gpu_child.build(job | {"options": options, "watch": f"{__name__}.Watched"}, folder)


def run(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Every scenario, with the oracle's findings."""
    from kvtxn.integrations.vllm_plugin import snapshots

    results: dict[str, Any] = {"idle": snapshots(llm)} | llm.collective_rpc("describe")[-1]
    llm.collective_rpc("egress_install")
    with mock.patch.dict(gpu_child.SCENARIOS, SCENARIOS):
        for name in job["scenarios"]:
            found = gpu_child.say(llm, name)
            results[name] = found | {"egress": llm.collective_rpc("egress_take")[-1]}
    return results
