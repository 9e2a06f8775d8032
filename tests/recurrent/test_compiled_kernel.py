"""The kernel as a compiler makes it for a GPU, looked at on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton.backends")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Facts by variant; in a process of its own, since kernels are interpreted in this one."""
    if "nvidia" not in triton.backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    script = Path(__file__).parent / "compiled_kernel.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_rounds_products_and_sums_apart(compiled):
    """No fused multiply-add, nothing flushed to zero: so the bytes are the reference's."""
    for name, found in compiled.items():
        assert (found["fused"], found["flushed"]) == (0, 0), name


def test_states_move_in_wide_words(compiled):
    """16 bytes at once, where a state lies so; never where it does not."""
    for name in ("float32", "bfloat16"):
        assert compiled[name]["wide_loads"] >= 2
        assert compiled[name]["wide_stores"] >= 2
    assert compiled["odd"]["wide_loads"] == compiled["odd"]["wide_stores"] == 0


def test_a_past_is_read_before_it_is_written(compiled):
    """By a barrier: a tap that one thread overwrites is another one's to read."""
    assert compiled["past"]["barriers_before_store"] == 1
