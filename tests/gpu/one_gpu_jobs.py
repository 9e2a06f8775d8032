"""Engines whose pipeline stages or ranks share a GPU."""

from __future__ import annotations

from typing import Any

from gpu_jobs import ON_GPU, STAGES, drafter

#: Variables and options of an engine whose ranks share a GPU.
ENVIRONMENT = {"VLLM_DISABLE_PYNCCL": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
OPTIONS = {"distributed_executor_backend": "mp", "disable_custom_all_reduce": True}

#: Options of an engine that has several ranks.
SEVERAL = {"pipeline_parallel_size", "tensor_parallel_size"}

SCENARIOS = ["eight", "chunked", "prefix", "preempted", "leaving", "reused", "same_step"]


def engine(policy: str, *, stages: int = 2, **more: Any) -> dict[str, Any]:
    """One engine; under a policy early stages have windows, too, and a failure is counted."""
    return {
        "model": "llama",
        "attention": "FLASH_ATTN",
        "speculation": ON_GPU,
        "scenarios": SCENARIOS,
        "policy": policy,
        "settings": {"unchecked": True, "on_error": "fallback"},
        **more,
        "options": (STAGES if stages > 1 else {}) | more.get("options", {}),
    }


EAGLE = {**drafter("eagle", "eagle"), "scenarios": ["eight", "chunked", "prefix", "leaving"]}
#: In float32 two tokens are hardly ever as near as rounding; without graphs, to start sooner.
FLOAT32 = {
    "attention": "TRITON_ATTN",
    "dtype": "float32",
    "options": {"enforce_eager": True},
}


def ranks(count: int) -> dict[str, Any]:
    """So many tensor-parallel ranks of one stage."""
    options = {"enforce_eager": True, "tensor_parallel_size": count}
    return FLOAT32 | {"stages": 1, "options": options, "scenarios": SCENARIOS[:4]}


#: Steps of an idle data-parallel rank between those of requests.
IDLE = {"stages": 1, "scenarios": ["eight", "idle"]}
RANKS = FLOAT32 | {"options": {"enforce_eager": True, "tensor_parallel_size": 2}}
THREE = FLOAT32 | {"options": {"enforce_eager": True, "pipeline_parallel_size": 3}}
GEMMA3 = FLOAT32 | {
    "model": "gemma3",
    "options": {"enforce_eager": True, "prefix_cache_retention_interval": None},
}
MTP = {
    **drafter("mtp"),
    **{"model": "deepseek_mtp", "attention": "TRITON_MLA"},
    "scenarios": EAGLE["scenarios"],
}

#: By name; the part before the dot says what is compared with its ``stock``.
ENGINES: dict[str, dict[str, Any]] = {
    "flash.stock": engine("stock"),
    "flash.auto": engine("auto"),
    "flash.undo": engine("undo"),
    "float32.stock": engine("stock", **FLOAT32),
    "float32.auto": engine("auto", **FLOAT32),
    "float32.alone": engine("stock", stages=1, **FLOAT32),
    "three.stock": engine("stock", **THREE),
    "three.auto": engine("auto", **THREE),
    "gemma3.stock": engine("stock", **GEMMA3),
    "gemma3.auto": engine("auto", **GEMMA3),
    "mtp.stock": engine("stock", **MTP),
    "mtp.auto": engine("auto", **MTP),
    "ranks.stock": engine("stock", **RANKS),
    "ranks.auto": engine("auto", **RANKS),
    "eagle.stock": engine("stock", **EAGLE),
    "eagle.auto": engine("auto", **EAGLE),
    "tp2.stock": engine("stock", **ranks(2)),
    "tp2.auto": engine("auto", **ranks(2)),
    "tp2.undo": engine("undo", **ranks(2)),
    "tp4.stock": engine("stock", **ranks(4)),
    "tp4.auto": engine("auto", **ranks(4)),
    "tp4.undo": engine("undo", **ranks(4)),
    "idle.stock": engine("stock", **IDLE),
    "idle.auto": engine("auto", **IDLE),
    "idle.undo": engine("undo", **IDLE),
}


def placed(name: str, *, several: bool) -> dict[str, Any]:
    """Return an engine's job: with a GPU for each stage, or with one for all."""
    job = ENGINES[name]
    if several or not SEVERAL & job["options"].keys():
        # vLLM's own all-reduce first tries which GPUs reach each other, for long.
        options = job["options"] | ({"disable_custom_all_reduce": True} if several else {})
        return job | {"watch": "stage_oracle.Watch", "options": options}
    shared = {"watch": "one_gpu.Watch", "environment": ENVIRONMENT}
    return job | shared | {"options": job["options"] | OPTIONS}
