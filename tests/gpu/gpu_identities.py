"""Bytes and identities behind real connectors on GPUs: ``python tests/gpu/gpu_identities.py``.

Rows leave an engine under ``"audit": "bytes"`` through OffloadingConnector, SimpleCPUOffload,
ExampleConnector, the fs tier, LMCache (in-process and multi-process) or NIXL, and come back, to the
same engine or to another one. Right rows are verified and no token changes; then rows are brought
wrong on purpose, and weights change. Some engines try public reports of faults.

    python tests/gpu/gpu_identities.py --out FOLDER [--seconds 240] [ENGINE ...]

FOLDER gets a report and a log of each engine as it ends, and ``until-then`` reports of engines that
did not. Engines whose package is not there are left out. Exit code 0: all is well; 1: something is
not; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
AUDIT, CONNECTORS = (HERE.parent / "vllm_plugin" / each for each in ("audit", "connectors"))
FOLDERS: Final = ("serving", "vllm_plugin/grid", "vllm_plugin/audit", "vllm_plugin/connectors")
sys.path[:0] = [str(HERE.parent), *(str(HERE.parent / folder) for folder in FOLDERS)]

import gpu_jobs  # noqa: E402
from engine_pool import EngineFailed, EnginePool  # noqa: E402
from folders import python_path  # noqa: E402
from identity_jobs import ENGINES, misplaced, summary, wrong  # noqa: E402

#: The package that a connector needs.
PACKAGES: Final = {"LMCache": "lmcache", "Nixl": "nixl"}


def lacks(job: dict[str, Any]) -> str | None:
    """Return the package that an engine needs and that is not there; None if it is."""
    name = job["transfer"]["kv_connector"]
    wanted = (package for sign, package in PACKAGES.items() if name.startswith(sign))
    return next((package for package in wanted if find_spec(package) is None), None)


def placed(job: dict[str, Any], number: int, gpus: int) -> dict[str, Any]:
    """Return a job with its GPU, in turn; a pair has two, if there are two."""
    if gpus == 1:
        return job
    own = [number % gpus, (number + 1) % gpus][: 2 if job.get("pair") else 1]
    place = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
    return job | {"environment": job.get("environment", {}) | place}


def main() -> int:
    """Run engines; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", help="names of engines; none: all of them")
    parser.add_argument("--out", type=Path, default=Path("identity-engines"))
    parser.add_argument("--per-gpu", type=int, default=8, help="engines at once on one GPU")
    parser.add_argument("--seconds", type=float, default=240.0, help="what one engine may take")
    given = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library, and starts no context
    if not gpus:
        print("there is no GPU")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    begin, bad, todo = time.monotonic(), 0, dict[str, Any]()
    for number, name in enumerate(given.engines or ENGINES):
        if (package := lacks(ENGINES[name])) is not None:
            print(f"{name}: left out: there is no package {package}", flush=True)
        else:
            todo[name] = placed(ENGINES[name], number, gpus)
    environment = {**gpu_jobs.ENVIRONMENT, "PYTHONHASHSEED": "0"}
    pool = EnginePool(
        "identity_child:carry_out",
        todo,
        Path(tempfile.mkdtemp(prefix="identities-")),
        count=given.per_gpu * gpus,
        seconds=given.seconds,
        environment=environment | {"PYTHONPATH": python_path(HERE, AUDIT, CONNECTORS)},
        preload=["vllm", "vllm.v1.engine.llm_engine"],
    )
    for name in pool.as_they_end():
        bad += judge(pool, name, todo[name], given.out)
    pool.stop()
    print(f"{bad} of {len(todo)} engines are not well; {time.monotonic() - begin:.0f} s")
    return int(bad > 0)


def judge(pool: EnginePool, name: str, job: dict[str, Any], out: Path) -> bool:
    """Print what came of an engine, and write its report and its log; tells if it is not well."""
    try:
        report = pool.report(name)
        found = [*wrong(job, report)]
        (out / f"{name}.json").write_text(json.dumps(report, indent=1))
        print(f"{name}: {'WRONG' if found else 'ok'}: {summary(report)}", flush=True)
        if (known := job.get("known")) and misplaced(report):
            print(f"    the alarms are right: {known}", flush=True)
    except EngineFailed as failed:
        found = [str(failed)]
        print(f"{name}: FAILED", flush=True)
        if partial := pool.partial(name):
            (out / f"{name}.until-then.json").write_text(partial)
    except Exception as error:  # the others go on
        found = [f"its report cannot be judged: {error!r}"]
        print(f"{name}: FAILED", flush=True)
    log = pool.log(name)
    (out / f"{name}.log").write_text(log)
    for each in found:
        print(f"    {each[:700]}", flush=True)
    noted = [line.partition("kvtxn.audit_")[2][:300] for line in log.splitlines()]
    for line in dict.fromkeys(line for line in noted if line):
        if not line.startswith(("active", "violation")):
            print(f"    log: {line}", flush=True)
    return bool(found)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
