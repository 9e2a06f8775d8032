"""The engines of the grid on GPUs and their scenarios; each engine has a process of its own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvtxn.integrations.vllm_plugin.policy.release_records import number
from kvtxn.integrations.vllm_plugin.policy.supported import ROW_RELEASES
from scenarios import NGRAM

#: Variables of every engine.
ENVIRONMENT = {
    # Else each engine that compiles has a cache of kernels of its own, and compiles every Triton
    # kernel anew, vLLM's and kvtxn's, too: 80 of its 120 seconds.
    "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else what a batch holds depends on time
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_DETERMINISTIC": "1",  # else each engine times reductions, and sums its own way
}

SHORT = ["eight", "chunked", "prefix"]
FULL = [*SHORT, "preempted", "same_step"]

#: Here requests are admitted while others run: where vLLM schedules ahead of the GPU, as it does by
#: default unless drafts are n-grams, what a batch holds depends on time, and in bfloat16 a near-tie
#: on what a batch holds. Between engines, near-ties also fall as those kernels sum that each
#: compiles anew.
TIMED = ("chunked", "preempted", "same_step")

#: Engines without kvtxn: ``again`` says how far stock agrees with itself, and ``other``, whose
#: attention is Triton's, how far two of its attention backends agree.
STOCK = ("stock", "again", "other")


def timed(found: dict[str, Any], name: str, scenario: str) -> bool:
    """Tell whether what a batch of this engine holds depends on time."""
    return name == "apart" or (bool(found["ahead"]) and scenario in TIMED)


#: A part of vLLM's error for an attention backend whose package or kernels are not installed.
NOT_HERE = "is not valid for this configuration"


def installed() -> str | None:
    """Return the release of vLLM for GPUs that is installed; None without any."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
BOTH = ("undo", "deferred")
AGAIN = ("again", *BOTH)
OTHER = ("other", *BOTH)
UNDO = ("undo",)
DEFERRED = ("deferred",)
#: Under ``undo`` the first of two stages has windows, too: ``try_stages`` looks at both.
ON_LAST_STAGE = {"gpus": 2, "active": [False, True], "elsewhere": UNDO}
#: Where the attention is another one than FLASH_ATTN; in some releases its drafts may not wait.
ROWS = BOTH if installed() in (None, *ROW_RELEASES) else UNDO


def missing(name: str | None = None, count: int = 1) -> str | None:
    """Return the reason why a job cannot run here, or None.

    There may be no GPU, too few GPUs, no vLLM, or one whose release lacks what the job needs.
    """
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU"
    if name is not None:
        count = JOBS[name].get("gpus", 1)
    if torch.cuda.device_count() < count:
        return "there is one GPU"
    found = installed()
    if found is None:
        return "vllm is not installed"
    return None if name is None else lacking(name, found)


def lacking(name: str, found: str) -> str | None:
    """Return the reason why a release cannot run a job, or None."""
    first, last = JOBS[name].get("since", "0"), JOBS[name].get("until")
    if number(found) < number(first):
        return f"vLLM {found} cannot run this; {first} was the first that could"
    if last is not None and number(found)[:2] > number(last):
        return f"vLLM {found} cannot run this; {last} was the last that could"
    return None


def drafter(method: str, model: str | None = None, drafts: int = 3) -> dict[str, Any]:
    """Speculation by a model with random weights; which drafts are accepted is drawn by lot."""
    return {
        "draft": model,
        "speculation": {
            "method": method,
            "num_speculative_tokens": drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.6, 0.3, 0.2][:drafts],
        },
        "random": True,
    }


def job(model: str, attention: str, policies: tuple[str, ...], says: str, **more: Any) -> Any:
    """One kind of engine, in stock and under some policies."""
    return {"model": model, "attention": attention, "policies": policies, "says": says, **more}


def steady(found: dict[str, Any], says: str) -> dict[str, Any]:
    """The same without scheduling ahead of the GPU: what a batch holds depends on nothing."""
    options = found.get("options", {}) | {"async_scheduling": False}
    return found | {"says": says, "options": options, "policies": BOTH}


#: For as many requests as there are novels' sentences at a time.
ROOM = {
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": 512 << 20,
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2048,
}
#: Stock wants pipeline stages scheduled ahead: else it dies of an assertion in its first batch, as
#: with drafts from n-grams found on the host, which it never schedules ahead.
STAGES = {"pipeline_parallel_size": 2}
ON_GPU = NGRAM | {"method": "ngram_gpu"}
FP8 = {"kv_cache_dtype": "fp8"}
BLOCKS_OF_64 = {"block_size": 64, "num_gpu_blocks_override": 20}

#: By name. ``inside``: memory, late compilations, and each stage of a step made to fail once.
JOBS: dict[str, dict[str, Any]] = {
    "flash": job("llama", "FLASH_ATTN", OTHER, "every schedule", scenarios=FULL),
    "full_graphs": job(
        *("llama", "FLASH_ATTN", BOTH, "graphs that serve prompts and drafts together"),
        options={"compilation_config": {"cudagraph_mode": "FULL"}},
    ),
    "triton": job("llama", "TRITON_ATTN", ROWS, "another attention", scenarios=FULL),
    "flashinfer": job("llama", "FLASHINFER", UNDO, "another attention", scenarios=FULL),
    "flex": job("llama", "FLEX_ATTENTION", UNDO, "another attention", scenarios=SHORT),
    "gemma3": job(
        *("gemma3", "FLASH_ATTN", (*AGAIN, "other"), "two KV-cache groups, one of sliding windows"),
        scenarios=FULL,
        options={"prefix_cache_retention_interval": None},
    ),
    "triton_mla": job("deepseek", "TRITON_MLA", ROWS, "latent rows", scenarios=FULL),
    "flashmla": job(
        *("deepseek", "FLASHMLA", UNDO, "latent rows in blocks of 64"),
        scenarios=SHORT,
        options=BLOCKS_OF_64,
    ),
    "flash_mla": job("deepseek", "FLASH_ATTN_MLA", ROWS, "latent rows", scenarios=SHORT),
    "flash_fp8": job("llama", "FLASH_ATTN", BOTH, "rows of 8 bits", options=FP8),
    "triton_fp8": job("llama", "TRITON_ATTN", ROWS, "rows of 8 bits", options=FP8),
    "flashinfer_fp8": job("llama", "FLASHINFER", UNDO, "rows of 8 bits", options=FP8),
    "mla_fp8": job("deepseek", "TRITON_MLA", ROWS, "latent rows of 8 bits", options=FP8),
    "v1_flash": job("llama", "FLASH_ATTN", AGAIN, "the V1 runner", scenarios=FULL, environment=V1),
    "v1_triton": job("llama", "TRITON_ATTN", ROWS, "the V1 runner", environment=V1),
    "v1_flashinfer": job("llama", "FLASHINFER", UNDO, "the V1 runner", environment=V1),
    "v1_mla": job("deepseek", "TRITON_MLA", ROWS, "the V1 runner, latent rows", environment=V1),
    "v1_gemma3": job(
        *("gemma3", "FLASH_ATTN", AGAIN, "the V1 runner, two KV-cache groups"),
        environment=V1,
        scenarios=FULL,
        options={"prefix_cache_retention_interval": None},
    ),
    "draft": job(
        *("llama", "FLASH_ATTN", BOTH, "drafts from a model with layers of its own"),
        draft="draft",
        speculation={"method": "draft_model", "num_speculative_tokens": 3},
        scenarios=FULL,
    ),
    "eagle": job("llama", "FLASH_ATTN", BOTH, "EAGLE", **drafter("eagle", "eagle")),
    "eagle3": job("llama", "FLASH_ATTN", BOTH, "EAGLE-3", **drafter("eagle3", "eagle3")),
    "mtp": job("deepseek_mtp", "TRITON_MLA", ROWS, "MTP, latent rows", **drafter("mtp")),
    "v1_draft": job(
        *("llama", "FLASH_ATTN", BOTH, "the V1 runner, drafts from a model"),
        draft="draft",
        speculation={"method": "draft_model", "num_speculative_tokens": 3},
        environment=V1,
    ),
    "v1_eagle": job(
        *("llama", "FLASH_ATTN", BOTH, "the V1 runner, EAGLE"),
        environment=V1,
        **drafter("eagle", "eagle"),
    ),
    "v1_mtp": job(
        *("deepseek_mtp", "TRITON_MLA", ROWS, "the V1 runner, MTP, latent rows"),
        environment=V1,
        **drafter("mtp"),
    ),
    "trained": job(
        *("demo", "FLASH_ATTN", (*AGAIN, "other"), "a trained model, to look inside and compare"),
        scenarios=["novels"],
        options=ROOM,
        inside=True,
    ),
    "apart": job(
        *("demo", "FLASH_ATTN", AGAIN, "the same, with the core in a process of its own"),
        scenarios=["novels"],
        options=ROOM,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    ),
    "tp2": job(
        *("demo", "FLASH_ATTN", BOTH, "the same model on two GPUs"),
        scenarios=["novels"],
        options=ROOM | {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
        gpus=2,
    ),
    "pp2": job(
        *("llama", "FLASH_ATTN", DEFERRED, "two pipeline stages: windows on the last one alone"),
        options=STAGES,
        speculation=ON_GPU,
        since="0.32",
        **ON_LAST_STAGE,
    ),
    "pp2_eagle": job(
        *("llama", "FLASH_ATTN", DEFERRED, "the same, drafts from EAGLE"),
        options=STAGES,
        **ON_LAST_STAGE,
        **drafter("eagle", "eagle"),
    ),
    "medusa": job(
        *("llama", "FLASH_ATTN", BOTH, "Medusa, V1 alone"),
        until="0.32",
        **drafter("medusa", "medusa"),
    ),
}


#: Jobs in which requests come at times that depend on time, once more without that.
STEADY = {
    "gemma3": "two KV-cache groups",
    "draft": "drafts from a model",
    "v1_flash": "the V1 runner",
    "v1_eagle": "the V1 runner, EAGLE",
}
#: Kinds that are there for a schedule's sake.
PARTIAL = tuple(f"{name}_steady" for name in STEADY)

JOBS |= {
    f"{name}_steady": steady(JOBS[name], f"{says}, nothing scheduled ahead")
    for name, says in STEADY.items()
}


def scenarios(name: str) -> list[str]:
    """List the scenarios of a job."""
    found: list[str] = JOBS[name].get("scenarios", SHORT)
    return found


def attention(name: str, policy: str) -> str:
    """vLLM's name of the attention backend of an engine."""
    return "TRITON_ATTN" if policy == "other" else str(JOBS[name]["attention"])


def runner(name: str, release: str) -> str:
    """vLLM's runner of an engine; which drafters the V2 runner knows depends on the release."""
    method = JOBS[name].get("speculation", NGRAM)["method"]
    old = number(release) < (0, 32) and method.startswith("ngram")
    asked = V1.items() <= JOBS[name].get("environment", {}).items()
    return "v1" if asked or old or method == "medusa" else "v2"


def engines(names: list[str]) -> dict[str, dict[str, Any]]:
    """An engine for each policy of these jobs, and stock; the longest first."""
    found = {
        f"{name}.{policy}": JOBS[name]
        | {"policy": policy, "scenarios": scenarios(name), "attention": attention(name, policy)}
        for name in names
        for policy in ("stock", *JOBS[name]["policies"])
    }
    return dict(sorted(found.items(), key=lambda item: -weight(item[1])))


def weight(job: dict[str, Any]) -> int:
    """Roughly how long an engine takes; FLASHINFER compiles its kernels first."""
    return len(job["scenarios"]) + 10 * job.get("gpus", 1) + 5 * (job["attention"] == "FLASHINFER")
