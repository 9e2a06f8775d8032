"""The process of one engine whose ranks share a GPU: runs scenarios, and reports as it goes."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import gpu_child
from failing_stage import STAGES
from scenarios import Engine, Tokens, text


def leaving(engine: Engine) -> Tokens:
    """Requests of different lengths, every third one aborted in the middle; others follow them."""
    inner = engine.llm.llm_engine
    asked = {f"leaving-{number}": text(400 + number, 30) for number in range(12)}
    waiting, running, done = list(asked), set[str](), dict[str, Any]()
    aborted = set(list(asked)[::3])
    while waiting or inner.has_unfinished_requests():
        while waiting and len(running) < 6:
            name = waiting.pop(0)
            running.add(name)
            params = engine.params(10 + 7 * (len(waiting) % 5))
            inner.add_request(name, {"prompt_token_ids": asked[name]}, params)
        for output in inner.step():
            done[output.request_id] = output.outputs[0]
            if output.finished:
                running.discard(output.request_id)
        for name in running & aborted & {*done}:
            if len(done[name].token_ids) > 4:
                inner.abort_request([name])
                running.discard(name)
    return [engine.keep(asked[name], done[name]) for name in asked if name not in aborted]


def idle(engine: Engine) -> Tokens:
    """Between requests, the steps of a data-parallel rank that has none while another has some.

    Raises:
        AssertionError: such a step wrote into a cache, or had a window.
    """
    asked = [[text(500 + number, 24), text(600 + number, 17)] for number in range(3)]
    tokens = []
    for prompts in (*asked, asked[0]):
        tokens += engine.run(prompts, 16)
        for rank, seen in enumerate(engine.llm.collective_rpc("idle_steps", args=(4,))):
            assert seen == {"layers_changed": 0, "windows": 0}, f"rank {rank}: {seen}"
    return tokens


def tried(llm: Any, name: str) -> dict[str, Any]:
    """Run a scenario, watched; if it fails, say so, and let no request of it go on."""
    try:
        return gpu_child.watched(llm, name)
    except Exception:
        engine = llm.llm_engine
        for _ in range(1000):
            if not engine.has_unfinished_requests():
                break
            engine.step()
        return {"error": traceback.format_exc()[-2000:], "oracle": []}


def carry_out(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build an engine and run its scenarios, watched, under a policy once more without windows.

    ``partial.json`` in the folder has what is known so far, in case the engine is ended.
    """
    os.environ.update(job.get("environment", {}))
    gpu_child.SCENARIOS |= {"leaving": leaving, "idle": idle}
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
        report[name] = tried(llm, name)
        print(name, report[name]["oracle"], flush=True)
        if job["policy"] != "stock":
            llm.collective_rpc("switch", args=(False,))
            report[f"{name}.off"] = tried(llm, name)
            llm.collective_rpc("switch", args=(True,))
            print(name, "without windows", report[f"{name}.off"]["oracle"], flush=True)
        report["seconds"] = round(time.monotonic() - begin)
        (folder / "partial.json").write_text(json.dumps(report))
    if job["policy"] != "stock" and not all(each["last"] for each in report["stages"]):
        report["faults"] = {stage: failing(llm, first, stage) for stage in STAGES["undo"]}
    return report | {"seconds": round(time.monotonic() - begin)}


def failing(llm: Any, name: str, stage: str) -> dict[str, Any]:
    """Run a scenario in which one stage of a step fails once on each early stage, and again."""
    late = 1 if stage == "plan" else 10  # steps of one shape share a plan: few are made
    llm.collective_rpc("early_fault_install", args=(stage, late))
    during = tried(llm, name)
    calls = llm.collective_rpc("early_fault_remove")
    return {"struck": max(calls) > late, "during": during, "afterwards": tried(llm, name)}
