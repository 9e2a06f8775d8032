"""Bytes and identities behind real connectors on GPUs: ``python tests/gpu/gpu_identities.py``.

Rows leave an engine under ``"audit": "bytes"`` through OffloadingConnector, SimpleCPUOffload,
ExampleConnector, the fs tier, LMCache (in-process and multi-process) or NIXL, and come back, to the
same engine or to another one. Right rows are verified and no token changes; then rows are brought
wrong on purpose, and weights change. Some engines try public reports of faults.

    python tests/gpu/gpu_identities.py --out FOLDER [--seconds 240] [ENGINE ...]

FOLDER gets a report and a log of each engine as it ends, and ``partial`` reports of engines that
did not. Engines whose package is not there are left out. Exit code 0: all is well; 1: something is
not; 2: there is no GPU.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
CONNECTORS: Final = HERE.parent / "vllm_plugin" / "connectors"
sys.path.insert(0, str(CONNECTORS))

import gpu_audit  # noqa: E402
import identity_jobs  # noqa: E402
from identity_jobs import ENGINES  # noqa: E402

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
    given = gpu_audit.parsed(__doc__, "identity-engines", 8, 240.0)
    import torch

    gpus = torch.cuda.device_count()  # asks the driver's library, and starts no context
    if not gpus:
        print("there is no GPU")
        return 2
    todo = {}
    for number, name in enumerate(given.engines or ENGINES):
        if (package := lacks(ENGINES[name])) is not None:
            print(f"{name}: left out: there is no package {package}", flush=True)
        else:
            todo[name] = placed(ENGINES[name], number, gpus)
    work, at_once = "identity_child:carry_out", given.per_gpu * gpus
    return int(gpu_audit.run(work, todo, identity_jobs, given, at_once, CONNECTORS) > 0)


if __name__ == "__main__":
    os.environ |= {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}  # of all engines
    sys.exit(main())
