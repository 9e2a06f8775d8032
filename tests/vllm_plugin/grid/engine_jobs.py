"""The engines of the grid and their scenarios. A job is a kind of engine, stock and by policy."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtxn.integrations.demo import smol
from kvtxn.integrations.vllm_plugin.policy.supported import AUDIT_RELEASES, RELEASES

#: Variables of every engine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two pools of two threads on two cores wait for each other
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # An eager engine of vLLM's compiles single functions, such as that of an embedding over ranks,
    # which takes longer than the engine's work.
    "TORCH_COMPILE_DISABLE": "1",
}

GRID = ["one", "eight", "chunked", "preempted", "prefix", "sampled", "same_step"]
REQUESTS = ["structured", "logprobs", "stop", "n2", "abort"]
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


def missing(job: str | None = None) -> str | None:
    """Say what is missing here for a job, or for any engine of real vLLM; None if nothing is."""
    if job == "amx_mla" and not _has_amx_mla():
        return "AMX_MLA needs a release of vLLM that has it, and a CPU with AVX-512 for bfloat16"
    if job in ("fp8", "audit-fp8") and not _has("avx512f"):
        return "vLLM's rows of eight bits need a CPU with AVX-512"
    if job == "ray" and find_spec("ray") is None:
        return "ray is not installed"
    if job == "connected-nixl" and find_spec("nixl") is None:
        return "nixl is not installed: pip install --no-deps nixl nixl-cu12"
    if job in ("command-demo-real", "command-audit-real") and not smol.is_installed():
        return f"the real model is not installed: {smol.INSTALL}"
    try:
        found = version("vllm-cpu")
    except PackageNotFoundError:
        return "vllm-cpu is not installed"
    if platform.machine() not in ("x86_64", "AMD64"):
        return "the cache oracle knows the packing of x86 kernels only"
    release = found.partition("+")[0]
    audited = AUDIT_RELEASES if (job or "").startswith("command-fault-") else ()
    return None if release in (*audited, *RELEASES) else f"vllm-cpu {found} is not supported"


def variables(folder: str) -> dict[str, str]:
    """Variables of engines that take over from each other what is kept in ``folder``."""
    return ENVIRONMENT | {"VLLM_CACHE_ROOT": f"{folder}/cache"}


def _has_amx_mla() -> bool:
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return False
    backend = Path(vllm.origin).parent / "v1" / "attention" / "backends" / "mla" / "amx_mla.py"
    return backend.exists() and _has("avx512_bf16")


def _has(instructions: str) -> bool:
    """Return whether this machine's processor lists them among its flags."""
    processor = Path("/proc/cpuinfo")
    return processor.exists() and instructions in processor.read_text()


def two_cores() -> list[int]:
    """One core for each of two ranks; the same one twice if there is no other."""
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[-1]]


def engines(scenarios: list[str], policies: tuple[str, ...] = POLICIES) -> dict[str, Any]:
    """Stock vLLM and some policies, through the same scenarios."""
    stock = {"stock": (None, scenarios)}
    return stock | {policy: ({"policy": policy}, scenarios) for policy in policies}


#: By name. ``covers`` says what a job adds, and so why it leaves out the scenarios that it leaves
#: out; ``left_out`` are policies that are possible and not run; ``stock`` is the job whose stock
#: engine a job is compared with, if it has none itself.
JOBS: dict[str, dict[str, Any]] = {
    "tp2": {
        "model": "llama",
        "covers": "tensor parallelism, which is the same at every scenario",
        "engines": engines(["one", "eight", "sampled"]),
        "options": {"tensor_parallel_size": 2},
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, two_cores()))},
    },
    "ray": {
        "model": "llama",
        "ray": True,
        "covers": "tensor parallelism over Ray, the same again, so under one policy and beside the "
        "stock engine of tp2; vLLM has no Ray for its CPU platform, so the tests give it a "
        "resource to ask for",
        "engines": {"deferred": ({"policy": "deferred"}, ["eight"])},
        "stock": "tp2",
        "left_out": ("undo",),
        "options": {"tensor_parallel_size": 2},
        "environment": {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, two_cores())),
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        },
    },
    "compile": {
        "model": "llama",
        "covers": "torch.compile, which changes the forward alone",
        "engines": engines(["one", "eight", "chunked"]),
        "options": {"enforce_eager": False},
        # vLLM's own cache has a folder for each policy, so that each would compile everything.
        "environment": {"TORCH_COMPILE_DISABLE": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"},
    },
    **{
        model: {
            "model": model,
            "covers": "every schedule; what a request can ask for is the job requests",
            "engines": engines(GRID),
            # Or else blocks that decoding fills are not hashed where some layers slide.
            "options": {"prefix_cache_retention_interval": None} if model in SLIDING else {},
        }
        for model in MODELS
    },
    "draft": {
        "model": "llama",
        "draft": "draft",
        "covers": "drafts from a model, with layers of its own in the cache",
        "engines": engines(["eight", "chunked"]),
    },
    "requests": {
        "model": "llama",
        "tokenizer": True,
        "covers": "what a request can ask for, which no model changes",
        "engines": engines(REQUESTS),
    },
    "deepseek": {
        "model": "deepseek",
        "attention": "CPU_MLA",
        "covers": "latent attention, for which vLLM's backend for any CPU has neither prompt "
        "chunks nor prefix hits",
        "engines": engines(["one", "eight", "preempted", "sampled"]),
        # By name: on a CPU with AMX vLLM would take AMX_MLA, which takes no float32.
        "options": {
            "attention_config": {"backend": "CPU_MLA"},
            "max_num_batched_tokens": 288,
            "num_gpu_blocks_override": 52,
        },
    },
    "amx_mla": {
        "model": "deepseek",
        "attention": "AMX_MLA",
        "dtype": "bfloat16",
        "covers": "latent attention as vLLM has it on a CPU with AMX, in bfloat16 alone; where AMX "
        "is missing, vLLM is told otherwise while it chooses, and its kernels compute without",
        # This model repeats itself so well that no draft of "prefix" is ever wrong.
        "engines": engines([scenario for scenario in GRID if scenario != "prefix"]),
    },
    "bfloat16": {
        "model": "llama",
        "dtype": "bfloat16",
        "covers": "rows of 16 bits, whose rounding would show another order of sums",
        "engines": engines(["one", "eight"]),
    },
    "fp8": {
        "model": "llama",
        "covers": "rows of 8 bits, which no other schedule treats differently",
        "engines": engines(["one", "eight", "chunked", "same_step"]),
        "options": {"kv_cache_dtype": "fp8"},
    },
    "gemma2": {
        "model": "gemma2",
        "covers": "a soft cap; gemma3 has the schedules",
        "engines": engines(["one", "eight"]),
    },
    "gemma4": {
        "model": "gemma4",
        "covers": "two groups with different block sizes; gemma3 has the schedules",
        "engines": engines(["eight", "preempted"]),
    },
    "gemma3n": {
        "model": "gemma3n",
        "covers": "layers that share rows; gemma3 has the schedules",
        "engines": engines(["one", "eight"], ("undo",))
        | {"refused": ({"policy": "deferred"}, ["one"])},
    },
    "bloom": {
        "model": "bloom",
        "covers": "ALiBi; llama has the schedules",
        "engines": engines(["one", "eight"]),
    },
    "gptoss": {
        "model": "gptoss",
        "covers": "attention sinks; gemma3 has the schedules",
        "engines": engines(["one", "eight"]),
    },
    "every_row": {
        "model": "llama",
        "connector": "EveryRowConnector",
        "module": "every_row_connector",
        "covers": "a KV connector of the tests that takes every row of the cache it is called for",
        "engines": engines(["reused"]) | {"unknown": ({"policy": "undo"}, ["reused"])},
        "options": {"max_num_batched_tokens": 40, "num_gpu_blocks_override": 18},
    },
    "faults": {
        "model": "llama",
        "covers": "failures inside kvtxn",
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

#: Engines of ``tests/vllm_plugin/audit/watched_engines.py``.
WATCHED = (
    *("llama", "latent", "bytes", "fp8", "draft-model", "hybrid-windows", "shared-rows"),
    *("two-block-sizes", "gated-delta-net", "short-convolution", "mamba", "mamba-with-drafts"),
    *("example-connector", "offloading-connector", "several-connectors", "shared-store"),
    *("tensor-parallel", "pipeline-parallel", "ranks-raise", "ranks-fail", "fails", "sleeps"),
    *("planted-rows", "planted-forwards", "planted-blocks", "planted-states", "planted-bytes"),
    *("planted-single-states", "planted-transfers"),
    *("device-rows", "device-states", "device-transfers", "contained", "contained-offloading"),
    *("contained-example", "contained-several", "contained-ranks", "contained-process"),
    *("stale", "stale-alarm", "stale-contain", "stale-connector", "stale-states"),
    *("pictures", "shared-pictures", "lost-reuse", "lost-states"),
)

#: Engines of ``tests/vllm_plugin/states/state_jobs.py``.
STATES = (
    *("windows", "greedy", "stock", "chosen", "raise", "forced", "two-ranks", "two-ranks-greedy"),
    *("nemotron_h", "lfm2", "mamba2", "falcon_h1", "mamba2-stock"),
    *("nemotron_h-greedy", "lfm2-greedy", "mamba2-greedy", "falcon_h1-greedy"),
)

#: Engines of ``tests/vllm_plugin/connectors/connected_engines.py``, and the policies of each.
#: GPUs have both policies of each (``tests/gpu/connected_jobs.py``).
CONNECTED = {
    "plain": ("stock",),
    "offload": ("stock", *POLICIES),
    "several": ("deferred",),
    "second": ("undo",),
    "bench": ("stock", "deferred"),
}

#: Runs of ``tests/audit_command/audit_runs.py``.
AUDITS = (
    *("chat", "own-prompts", "refused", "trace", "pooling", "fault-mamba2", "fault-sessions"),
    *("fault-offloading", "fault-hybrid-sessions", "fault-stored-sessions", "fault-one-token"),
    *("fault-resumed", "fault-skipped", "fault-stored-chunks", "preempted-in-its-step"),
    *("failed-load", "replaced-adapter", "reset-connector", "stale-rows", "ended-by-session"),
    "left-out-of-hashes",
)

#: Runs of ``tests/command_runs.py``.
COMMANDS = (
    *("bench", "demo", "demo-real", "audit-real"),
    *("soak", "soak-SaysOther", "soak-LosesBlocks", "soak-KeepsBytes"),
)

#: Seconds that an engine of a job computes, where they are many.
SECONDS = {
    **{"ray": 45, "command-bench": 40, "served-one": 30, "command-demo-real": 30, "compile": 25},
    **{"states-windows": 22, "unchecked": 22, "audited-tests": 21, "command-audit-real": 20},
    **{"command-soak-KeepsBytes": 17, "command-soak": 14, "command-fault-resumed": 14},
    **{"command-refused": 11, "states-nemotron_h": 11, "states-greedy": 10},
}

#: Jobs whose engines fork their workers, see ``engine_child.fork_workers``. vLLM spawns all others,
#: such as those of "served-one" and of "audited-tests": there the plug-in has to come along by
#: itself.
FORKING = (
    *("tp2", "states-two-ranks", "states-two-ranks-greedy", "outlived", "starts", "served-many"),
    *("audit-tensor-parallel", "audit-pipeline-parallel", "audit-contained-ranks"),
    *("audit-ranks-raise", "audit-ranks-fail", "audit-contained-process", "audit-pictures"),
    *("audit-sessions", "audit-plain-sessions"),
)

#: Engines with tests of their own, by the name that ``pytest.mark.engines`` has. ``work`` is the
#: function that the process calls with its folder.
OTHERS: dict[str, dict[str, Any]] = {
    name: {"engines": {"alone": None}, "work": work}
    for name, work in (
        ("served-many", "api_server:serve_many"),
        ("served-one", "api_server:serve_one"),
        ("starts", "engine_starts:starts"),
        ("unhooking", "engine_starts:unhooking"),
        ("unchecked", "unchecked_engines:run"),
        ("outlived", "outlived_engines:counters"),
        ("audited-tests", "audited_tests:run"),
        ("audit-at-once", "engines_at_once:run"),
        ("audit-sessions", "session_engines:sessions_with_drafts"),
        ("audit-plain-sessions", "session_engines:plain_sessions"),
        *((f"audit-{name}", "watched_engines:run") for name in WATCHED),
        *((f"command-{name}", "audit_runs:run") for name in AUDITS),
        *((f"command-{name}", "command_runs:run") for name in COMMANDS),
        *((f"states-{name}", "state_engines:run") for name in STATES),
        *(
            (f"v1-{name}-{who}", "v1_states:run")
            for name in ("nemotron_h", "lfm2")
            for who in ("stock", "exact")
        ),
    )
}
OTHERS |= {
    f"connected-{name}": {"engines": dict.fromkeys(policies), "work": "connected_engines:run"}
    for name, policies in CONNECTED.items()
}
OTHERS["connected-nixl"] = {
    "engines": dict.fromkeys(("plain", "stock", *POLICIES)),
    "work": "nixl_engines:run",
}

for _name, _seconds in SECONDS.items():
    (JOBS | OTHERS)[_name]["seconds"] = _seconds

#: Jobs whose every scenario is compared with stock.
COMPARED = [name for name in JOBS if name != "faults"]


def stock_of(job: str) -> str:
    """The job that has the stock engine of a job."""
    return str(JOBS.get(job, {}).get("stock", job))


def covered(job: str) -> list[tuple[str, str]]:
    """The policies that a job puts to the test, each with its scenarios."""
    found = JOBS[job]["engines"]
    return [(policy, scenario) for policy in POLICIES if policy in found
            for scenario in found[policy][1]]  # fmt: skip


def wanted(names: dict[str, set[str] | None]) -> dict[str, dict[str, Any]]:
    """These jobs, with no scenarios but these; None stands for all."""
    return {
        name: JOBS[name]
        if scenarios is None
        else JOBS[name]
        | {
            "engines": {
                engine: (config, [one for one in all_ if one.partition("@")[0] in scenarios])
                for engine, (config, all_) in JOBS[name]["engines"].items()
            }
        }
        for name, scenarios in names.items()
    }
