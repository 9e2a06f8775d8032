"""Kernels of recurrent layers as a compiler makes them for a GPU, looked at on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    """Counts of instructions by kernel and dtypes, from a process in which none is interpreted."""
    triton = pytest.importorskip("triton.backends")
    if "nvidia" not in triton.backends:
        pytest.skip("this Triton does not compile for NVIDIA's GPUs")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, Path(__file__).parent / "compiled_kernels.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("kernel", "least"), [("verify", (16, 16)), ("mamba2", (16, 8))])
def test_verify_multiplies_states_where_they_were_loaded(compiled, kernel, least):
    """16 bytes at once, then on to tensor cores: a state of 16 rows would need 16 reads or more."""
    for state, words in zip(("fp32", "bf16"), least, strict=True):
        assert compiled[f"{kernel} {state}"]["wide_loads"] >= words
        assert compiled[f"{kernel} {state}"]["from_shared"] < 8


@pytest.mark.parametrize(("kernel", "times"), [("verify", 16), ("mamba2", 8)])
def test_verify_multiplies_exact_pieces(compiled, kernel, times):
    """Three products for a float32 number, one for a bfloat16 one; and one of keys with keys."""
    assert compiled[f"{kernel} fp32"]["products"] == times * (3 + 1)
    assert compiled[f"{kernel} bf16"]["products"] == times * (1 + 1)


def test_programs_of_several_tiles_load_ahead(compiled):
    """A tile of 16 rows is 16 words of a thread (bfloat16: 8); two come before the loop."""
    for name, words in (("verify many fp32", 16), ("verify many bf16", 8)):
        assert compiled[name]["ahead"] == 3 * words
        assert compiled[name]["products"] == compiled[name.replace(" many", "")]["products"]


def test_commit_moves_states_in_wide_words(compiled):
    """16 bytes per thread at once: 8 words per thread of float32, 4 of bfloat16."""
    for name, words in (("advance fp32", 8), ("advance bf16", 4)):
        assert compiled[name]["wide_loads"] >= words
        assert compiled[name]["wide_stores"] == words


def test_the_gated_norm_moves_rows_in_wide_words(compiled):
    """Four heads of 128 are 16 numbers per thread, of each of two tensors, and the weights."""
    norms = {name: each for name, each in compiled.items() if name.startswith("norm ")}
    assert len(norms) == 6
    for name, each in norms.items():
        words = 4 if name.startswith("norm fp32") else 2
        assert each["stores"] == words, name
        assert each["loads"] <= 2 * words + 4
