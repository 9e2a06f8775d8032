"""The process of one engine whose ranks share a GPU: runs scenarios, and reports as it goes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gpu_child


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run its scenarios, watched; under a policy without windows first."""
    os.environ.update(job.get("environment", {}))
    begin = time.monotonic()
    llm = gpu_child.build(job, folder)
    stages = len(llm.collective_rpc("describe"))
    report: dict[str, Any] = {"started": round(time.monotonic() - begin)}
    report |= llm.collective_rpc("describe")[-1] | {"stages": llm.collective_rpc("stages")}
    if job.get("random"):
        llm.collective_rpc("randomise", args=(0.08,))
    stock = job["policy"] == "stock"
    for name in job["scenarios"]:
        if not stock:
            llm.collective_rpc("switch", args=(False,))
            report[f"{name}.off"] = gpu_child.say(llm, name)
            llm.collective_rpc("switch", args=(True,))
        report[f"{name}.fast"] = gpu_child.say(llm, name)
        print(name, "without an oracle: done", flush=True)
    llm.collective_rpc("oracle_install")
    for name in job["scenarios"]:
        said = gpu_child.say(llm, name)
        report[name] = said | {"oracle": llm.collective_rpc("oracle_take")}
        print(name, report[name]["oracle"], flush=True)
    return report | {"seconds": round(time.monotonic() - begin), "ranks": stages}
