"""Commands of kvtxn and Python programs as a user starts them, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
from folders import python_path

#: Variables of every command, and those of the pool's engines that none has.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
OF_THE_POOL = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CACHE_ROOT")

KVTXN = Path(sys.executable).parent / "kvtxn"


@attrs.frozen
class Ended:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def run(folder: Path, *words: object) -> Ended:
    """Run a command of kvtxn in a folder."""
    return _run(folder, KVTXN, *words)


def run_program(folder: Path, program: Path, *words: object) -> Ended:
    """Run a Python program in a folder."""
    return _run(folder, sys.executable, program, *words)


def _run(folder: Path, *words: object) -> Ended:
    environment = os.environ | VARIABLES | {"PYTHONPATH": python_path()}
    for name in OF_THE_POOL:
        environment.pop(name, None)
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=1500, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)
