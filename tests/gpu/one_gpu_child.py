"""The process of one engine whose ranks share a GPU: runs scenarios, and reports as it goes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import gpu_child


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run its scenarios, watched, under a policy once more without windows.

    ``partial.json`` in the folder has what is known so far, in case the engine is ended.
    """
    os.environ.update(job.get("environment", {}))
    begin = time.monotonic()
    llm = gpu_child.build(job, folder)
    report: dict[str, Any] = {"started": round(time.monotonic() - begin)}
    report |= llm.collective_rpc("describe")[-1] | {"stages": llm.collective_rpc("stages")}
    if job.get("random"):
        llm.collective_rpc("randomise", args=(0.08,))
    first = job["scenarios"][0]
    report[f"{first}.unwatched"] = gpu_child.say(llm, first)
    llm.collective_rpc("oracle_install")
    for name in job["scenarios"]:
        report[name] = gpu_child.watched(llm, name)
        print(name, report[name]["oracle"], flush=True)
        if job["policy"] != "stock":
            llm.collective_rpc("switch", args=(False,))
            report[f"{name}.off"] = gpu_child.watched(llm, name)
            llm.collective_rpc("switch", args=(True,))
            print(name, "without windows", report[f"{name}.off"]["oracle"], flush=True)
        report["seconds"] = round(time.monotonic() - begin)
        (folder / "partial.json").write_text(json.dumps(report))
    return report
