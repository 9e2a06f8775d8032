"""Run a script that compiles kernels, in a process of its own: in this one they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def compiled_facts(script: str, cache: Path) -> Any:
    """What a script beside this file prints; skips where Triton does not compile for NVIDIA's GPUs.

    Args:
        script: name of the file.
        cache: an empty folder.
    """
    triton = pytest.importorskip("triton.backends")
    if "nvidia" not in triton.backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, Path(__file__).parent / script]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
