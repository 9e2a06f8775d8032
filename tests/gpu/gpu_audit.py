"""The audit in real engines on GPUs: ``python tests/gpu/gpu_audit.py --out FOLDER``.

Each engine has a process of its own, and runs scenarios without the audit and with it: the ledger
reads rows, finds nothing, and changes no token. Then faults are planted in some engines, and each
is found: the request, the position and the slot. Engines run side by side on all GPUs; FOLDER gets
a log and a report of each. Exit code 0: all is well; 1: something is not; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
FOLDERS: Final = ("serving", "vllm_plugin/grid", "vllm_plugin/audit", "vllm_plugin/serve")
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / folder) for folder in FOLDERS)]

import gpu_jobs  # noqa: E402
from audit_jobs import COME_BACK, DRAWN, ENGINES, LACKING, SHARE  # noqa: E402
from engine_pool import EngineFailed, EnginePool  # noqa: E402
from folders import python_path  # noqa: E402
from gpu_jobs import TIMED  # noqa: E402

# -- judging --------------------------------------------------------------------------------


def wrong(job: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """Say what is not as it should be."""
    left_out = job.get("unwatched_ranks", ())
    for name, cell in report["healthy"].items():
        if "error" in cell:
            yield f"{name}: {cell['error']}"
            continue
        for rank, counts in enumerate(cell["counters"]):
            active = bool(counts.get("kvtxn_audit_active"))
            if rank in left_out:
                if active:
                    yield f"{name}: rank {rank} is watched"
                continue
            if not active:
                yield f"{name}: rank {rank} is not watched"
            if not counts.get("kvtxn_audit_rows_checked_total") and not job.get("no_rows"):
                yield f"{name}: rank {rank} has read no row"
            if job.get("states") and not counts.get("kvtxn_audit_states_checked_total"):
                yield f"{name}: rank {rank} has compared no state"
            if counts.get("kvtxn_audit_unjudged_total"):
                yield f"{name}: rank {rank} could not judge {counts}"
            if counts.get("kvtxn_audit_violations_total"):
                yield f"{name}: rank {rank} found {counts['kvtxn_audit_violations_total']:g}"
        for rank, found in enumerate(cell["violations"]):
            for each in found[:2]:
                yield f"{name}: rank {rank}: {each}"
        if any(cell.get("idle", ())):
            yield f"{name}: while nothing was watched: {cell['idle']}"
        if job["asked"].get("audit") == "bytes" and not cell["facts"].get("compared"):
            yield f"{name}: no bytes were compared"
        comes = name in (COME_BACK[0], "states_come_back")
        if job.get("connectors") and comes and not cell["facts"].get("brought"):
            yield f"{name}: the connector brought no rows"
        believed = sum(c.get("kvtxn_audit_rows_unverified_total", 0) for c in cell["counters"])
        if job.get("verified") and believed:
            yield f"{name}: {believed:g} rows and states that came are of unknown bytes"
        timed = cell["facts"]["ahead"] and name in TIMED
        if not cell["exact"] and not timed and name not in DRAWN:
            yield f"{name}: {cell['same']} texts are the same"
    yield from (f"a step waits: {where}" for where in report.get("time", {}).get("waits", ()))
    long = report.get("long", {})
    yield from (
        f"long: {long[name]} {name}" for name in ("violations", "unjudged") if long.get(name)
    )
    yield from unfound(report.get("planted"))
    if job.get("ranks_differ"):
        yield from undistinguished(report["ranks"])
    if job.get("sleeps"):
        yield from restless(report["slept"], report["facts"][-1]["ahead"])
    if job.get("fails"):
        yield from unheard(report["failed"])
    if job.get("contains"):
        yield from unhealed(report["contained"])
    facts = report["facts"][-1]
    if job.get("alone") and facts["reserved"] > facts["memory"] * SHARE + (300 << 20):
        yield f"memory: {facts['reserved'] >> 20} MiB of {facts['memory'] >> 20} are taken"


def unfound(report: dict[str, Any] | None) -> Iterator[str]:
    """Say which planted faults were not found, or not where they struck."""
    if report is None:
        return
    if report["healthy"]:
        yield f"before faults: {report['healthy'][0]}"
    for name, found in report["found"].items():
        if "error" in found:
            yield f"fault {name}: {found['error']}"
        elif found["struck"] is None:
            yield f"fault {name} has not struck"
        elif not found["violations"]:
            yield f"fault {name} was not found: {found['struck']}"
        else:
            struck, violations = found["struck"], found["violations"]
            # The slot of a state is not known, nor in which of its rows a NaN comes out first.
            fields = ["request", "position", "slot"]
            fields = [field for field in fields if struck[field] is not None]
            place = [struck[field] for field in fields]
            places = [[violation.get(field) for field in fields] for violation in violations]
            late = violations[0].get("step", 0) > struck["step"] + 1
            if place not in places or late:
                yield f"fault {name}: {struck}, found {violations[:3]}"
    for name, (struck, violations) in report.get("harmless", {}).items():
        if not struck or violations:
            yield f"harmless {name}: struck {struck}, found {violations[:2]}"
    if not isinstance(report["again"], list) or report["again"][1]:
        yield f"after faults: {report['again']}"


def undistinguished(ranks: list[list[list[Any]]]) -> Iterator[str]:
    """Say which of two ranks did not report the step in which they wrote something else.

    The rank that took a token for another may find later reads of its rows wrong as well.
    """
    told = [[step for kind, step in rank if kind == "ranks"] for rank in ranks]
    if any(len(steps) != 1 or steps != told[0] for steps in told) or len(ranks[0]) > 1:
        yield f"ranks that differ report {ranks}"


def restless(report: dict[str, Any], ahead: bool) -> Iterator[str]:
    """Say what is not as it should be in an engine that slept."""
    for name, found in report["ways"].items():
        if found["violations"]:
            yield f"slept, {name}: {found['violations'][:2]}"
        if not (found["answers"] and found["awake"]):
            yield f"slept, {name}: other answers: {found['answers']}, then {found['awake']}"
        if not found["same"] and not ahead:
            yield f"slept, {name}: other texts"
    if [each["kind"] for each in report["forgotten"][:1]] != ["unwritten"]:
        yield f"slept: rows that were lost were read, found {report['forgotten']}"


def unheard(report: dict[str, Any]) -> Iterator[str]:
    """Say what is not as it should be in an engine in which forwards failed."""
    for name, found in report.items():
        first = found["violations"][0] if found["violations"] else {}
        if not found["failed"] or not found["hit"]:
            yield f"failed, {name}: {found['ways']}, a hit of {found['hit']}"
        elif (first.get("kind"), first.get("request")) != ("unwritten", found["request"]):
            yield f"failed, {name}: its rows were read, found {found['violations'][:2]}"
        if found["again"] or not found["same"]:
            yield f"failed, {name}: then same {found['same']}, found {found['again'][:2]}"


def unhealed(report: dict[str, Any]) -> Iterator[str]:
    """Say which faults were not contained, or left a text that is another one without the fault."""
    if len(report["healed"]) < 8:
        yield f"contained: only {len(report['healed'])} faults were planted"
    for name, found in report["healed"].items():
        if not found["violations"] or not found["contained"]:
            yield f"contained {name}: {found['violations']} found, {found['contained']} again"
        pairs = zip(found["texts"], report["stock"], strict=True)
        other = [index for index, (text, right) in enumerate(pairs) if text != right]
        if other:
            later = found.get("later")
            yield f"contained {name}: texts {other} are other ones; found later: {later}"
    if all(texts == report["stock"] for texts in report["logged"].values()):
        yield "contained: the faults change no text where they are logged alone"


def summary(job: dict[str, Any], report: dict[str, Any]) -> str:
    """One line about an engine in which all is well."""
    counts = [c for cell in report["healthy"].values() for c in cell.get("counters", ())]
    rows = sum(int(c.get("kvtxn_audit_rows_checked_total", 0)) for c in counts)
    rows += report.get("long", {}).get("rows", 0)
    compared = sum(
        cell.get("facts", {}).get("compared", 0) or 0 for cell in report["healthy"].values()
    )
    found = report.get("planted", {}).get("found", {})
    struck = sum(bool(each.get("violations")) for each in found.values())
    same = {name: cell.get("same") for name, cell in report["healthy"].items()}
    facts = report["facts"][-1]
    return (
        f"{rows} rows read, {compared} bytes compared, {struck} of {len(found)} faults found, "
        f"{report['seconds']} s, graphs {facts['graphs']}, ahead {facts['ahead']}, groups "
        f"{facts['groups']}, published {facts.get('published')}, windows {facts['windows']}, "
        f"ledger {facts.get('bytes', 0) >> 10} KiB, same {same}, time {report.get('time')}, "
        f"long {report.get('long')}, "
        f"brought {[c.get('facts', {}).get('brought', 0) for c in report['healthy'].values()]}"
    )


# -- running --------------------------------------------------------------------------------


def jobs(asked: list[str], gpus: int) -> dict[str, dict[str, Any]]:
    """The engines to run, those on two GPUs first, the others on one GPU each in turn."""
    found: dict[str, dict[str, Any]] = {}
    chosen = {name: job for name, job in ENGINES.items() if not asked or name in asked}
    order = sorted(chosen, key=lambda name: (-chosen[name].get("gpus", 1), name))
    takes_long = ("long", "gpus", "faults")
    order.sort(key=lambda name: not any(chosen[name].get(what) for what in takes_long))
    number = 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if len(visible) == gpus else [str(index) for index in range(gpus)]
    for name in order:
        job = chosen[name]
        if job.get("gpus", 1) > gpus:
            print(f"{name}: left out, it needs {job['gpus']} GPUs", flush=True)
            continue
        if job.get("gpus", 1) == 1 and gpus > 1:
            place = {"CUDA_VISIBLE_DEVICES": visible[number % gpus]}
            job = job | {"environment": job.get("environment", {}) | place}
            number += 1
        found[name] = job
    return found


def parsed(about: str | None, out: str, per_gpu: int, seconds: float) -> argparse.Namespace:
    """Read the command line, with these defaults."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("engines", nargs="*", help="names of engines; none: all of them")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--per-gpu", type=int, default=per_gpu, help="engines at once on one GPU")
    parser.add_argument("--seconds", type=float, default=seconds, help="what one engine may take")
    return parser.parse_args()


def main() -> int:
    """Run engines; returns the exit code."""
    given = parsed(__doc__, "audit-engines", 12, 400.0)
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library, and starts no context
    if not gpus:
        print("there is no GPU")
        return 2
    todo, bad = jobs(given.engines, gpus), 0
    for alone in (False, True):
        now = {name: job for name, job in todo.items() if bool(job.get("alone")) == alone}
        if alone and now:
            wait_for_memory()
        at_once, rules = 1 if alone else given.per_gpu * gpus, sys.modules[__name__]
        bad += run("gpu_audit_child:carry_out", now, rules, given, at_once) if now else 0
    return int(bad > 0)


def run(
    work: str,
    todo: dict[str, Any],
    rules: Any,
    given: argparse.Namespace,
    at_once: int,
    *more: Path,
) -> int:
    """Run engines, judge each as it ends, and return how many are not well.

    ``rules`` has ``wrong`` and ``summary`` of a job and a report; ``more`` are folders of modules.
    """
    given.out.mkdir(parents=True, exist_ok=True)
    begin, bad = time.monotonic(), 0
    path = python_path(HERE, HERE.parent / "vllm_plugin" / "audit", *more)
    pool = EnginePool(
        work,
        todo,
        Path(tempfile.mkdtemp(prefix=f"{given.out.name}-")),
        count=at_once,
        seconds=given.seconds,
        environment=gpu_jobs.ENVIRONMENT | {"PYTHONPATH": path},
        preload=["vllm", "vllm.v1.engine.llm_engine"],
    )
    for name in pool.as_they_end():
        bad += judge(pool, name, todo[name], rules, given.out)
    pool.stop()
    print(f"{bad} of {len(todo)} engines are not well; {time.monotonic() - begin:.0f} s")
    return bad


def wait_for_memory(seconds: float = 60.0, same: int = 4) -> None:
    """Wait until processes that ended have released their memory: vLLM refuses to profile before.

    The memory in use has to be the same in so many looks, half a second apart.
    """
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    looks: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (len(looks) < same or len({*looks[-same:]}) > 1):
        try:
            looks.append(subprocess.run(command, capture_output=True, text=True, timeout=20).stdout)
        except (OSError, subprocess.TimeoutExpired):  # without the tool, some seconds have to do
            looks.append("")
            time.sleep(2.0)
        time.sleep(0.5)


def judge(pool: EnginePool, name: str, job: dict[str, Any], rules: Any, out: Path) -> bool:
    """Print what came of an engine, and write its report and its log; tells if it is not well."""
    try:
        report = pool.report(name)
        found = [*rules.wrong(job, report)]
        (out / f"{name}.json").write_text(json.dumps(report, indent=1))
        print(f"{name}: {'WRONG' if found else 'ok'}: {rules.summary(job, report)}", flush=True)
    except EngineFailed as failed:
        lacking = next((why for sign, why in LACKING.items() if sign in pool.log(name)), None)
        found = [str(failed)] if lacking is None else []
        print(f"{name}: {'FAILED' if found else f'skipped: {lacking}'}", flush=True)
        found += until_then(job, pool.partial(name), rules, out / f"{name}.partial.json")
    except Exception as error:  # the others go on
        found = [f"its report cannot be judged: {error!r}"]
        print(f"{name}: FAILED", flush=True)
    log = pool.log(name)
    (out / f"{name}.log").write_text(log)
    for each in found:
        print(f"    {each[:600]}", flush=True)
    noted = [line for line in log.splitlines() if "kvtxn.audit_" in line]
    for line in dict.fromkeys(line.partition("kvtxn.audit_")[2][:300] for line in noted[:40]):
        if not line.startswith(("active", "violation")):
            print(f"    log: {line}", flush=True)
    return bool(found)


def until_then(job: dict[str, Any], partial: str, rules: Any, keep: Path) -> list[str]:
    """Keep what an engine without a report has reported so far; say what is wrong in that."""
    if not partial:
        return []
    keep.write_text(partial)
    report = json.loads(partial)
    found = report.get("planted", {}).get("found", {})
    done = f"until then: {', '.join(report.get('healthy', ()))}; {len(found)} faults planted"
    last = dict.fromkeys(("contains", "ranks_differ", "sleeps", "fails"))
    try:
        return [done, *rules.wrong(job | last, report)]
    except Exception as error:  # it ended in the middle of something
        return [done, f"its report cannot be judged: {error!r}"]


if __name__ == "__main__":
    sys.exit(main())
