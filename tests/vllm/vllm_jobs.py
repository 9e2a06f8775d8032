"""Which engines run which scenarios. One job is one process."""

from __future__ import annotations

from typing import Any

GRID = ["one", "eight", "chunked", "preempted", "prefix", "sampled", "same_step"]
MODELS = ("llama", "qwen3", "gemma3", "mistral")
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


def engines(scenarios: list[str]) -> dict[str, Any]:
    """Stock vLLM and both policies, through the same scenarios."""
    stock = {"stock": (None, scenarios)}
    return stock | {policy: ({"policy": policy}, scenarios) for policy in POLICIES}


JOBS: dict[str, dict[str, Any]] = {
    "tp2": {
        "model": "llama",
        "engines": engines(["one", "eight", "sampled"]),
        "options": {"tensor_parallel_size": 2},
    },
    "compile": {
        "model": "llama",
        "engines": engines(["one", "eight", "chunked"]),
        "options": {"enforce_eager": False},
    },
    **{model: {"model": model, "engines": engines(GRID)} for model in MODELS},
    "draft": {"model": "llama", "draft": "draft", "engines": engines(["eight", "chunked"])},
    "faults": {
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
