"""The kinds of engines that ``run_every_engine`` audits: tiny models, on a CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

#: Workloads of engines without a connector, and of those with one. Sessions come on their own:
#: up to 0.32.0 they are known to be wrong where drafts are.
SHAKEN: Final = "chat,prefix,preempt"
CONNECTED: Final = "chat,prefix,preempt,offload"

V1: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@attrs.frozen
class Kind:
    """A kind of engine.

    Attributes:
        model: the name of a tiny model.
        engine: changes of ``BASE``; None leaves an argument out.
        draft: the name of the drafter's model, if it has one.
        workloads: what ``kvtxn audit`` plays.
        environment: variables of its process.
    """

    model: str
    engine: Mapping[str, Any] = attrs.field(factory=dict)
    draft: str | None = None
    workloads: str = SHAKEN
    environment: Mapping[str, str] = attrs.field(factory=dict)


NGRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}

#: Of all engines: fewer blocks than eight long requests fill, so that some are preempted.
BASE: Final[dict[str, Any]] = {
    "skip_tokenizer_init": True,
    "seed": 0,
    "max_model_len": 288,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "speculative_config": NGRAM,
}
CPU: Final = {**BASE, "dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 44}
GPU: Final = {
    **BASE,
    **{"dtype": "bfloat16", "block_size": 16, "num_gpu_blocks_override": 90},
    **{"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.05},
}

PLAIN: Final = {"speculative_config": None}
#: Long prompts take several steps, in which more urgent requests want their blocks.
PRIORITIES: Final = {"scheduling_policy": "priority", "max_num_batched_tokens": 96}
BARE: Final = {"enable_prefix_caching": False}
#: vLLM chooses the size of blocks, which have room for a state.
STATES: Final[dict[str, Any]] = {
    **{"block_size": None, "num_gpu_blocks_override": 160},
    **{"max_num_batched_tokens": 1024, "max_model_len": 1024},
    "mamba_ssm_cache_dtype": "float32",
}
#: The states at the ends of blocks stay in the prefix cache.
ALIGN: Final = STATES | {"mamba_cache_mode": "align"}
#: With kvtxn's windows, of recurrent layers too.
WINDOWS: Final = {"additional_config": {"kvtxn": {"policy": "auto", "recurrent": "exact"}}}
#: Weights that vLLM makes up.
DUMMY: Final = {"load_format": "dummy"}
#: Fewer rows in a step than all requests want with their drafts: some sit a step out.
CROWDED: Final = STATES | BARE | {"max_num_batched_tokens": 40, "max_num_seqs": 14}
GRAPHS: Final = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def with_drafts(number: int) -> dict[str, Any]:
    """Return the change that lets an engine look up so many drafts."""
    return {"speculative_config": NGRAM | {"num_speculative_tokens": number}}


def drafting(method: str, **more: Any) -> dict[str, Any]:
    """Return the change that gives an engine a drafter, whose drafts are accepted by lot."""
    speculation = {"method": method, "num_speculative_tokens": 3, **more}
    rates = [0.7, 0.5, 0.4, 0.3][: speculation["num_speculative_tokens"]]
    by_lot = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return {"speculative_config": speculation | by_lot}


#: Drafts that are looked up: a model with weights that vLLM made up always says the same.
BY_LOT: Final = drafting(**NGRAM)


def connector(name: str, **extra: Any) -> dict[str, Any]:
    """Return the change that gives an engine a KV connector."""
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }


EXAMPLE: Final = connector("ExampleConnector", shared_storage_path="FOLDER/stored")
SIMPLE: Final = connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=8 << 20)
LAZY: Final = connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=8 << 20, lazy_offload=True)
OFFLOAD: Final = connector("OffloadingConnector", cpu_bytes_to_use=8 << 20)
OUTPUTS: Final = connector(
    "OffloadingConnector", cpu_bytes_to_use=8 << 20, offload_prompt_only=False
)
MEMORY: Final = connector(
    "OffloadingConnector",
    cpu_bytes_to_use=64 << 20,
    offload_prompt_only=False,
    spec_name="MemoryStoreSpec",
    spec_module_path="kvtxn.integrations.vllm_plugin.seam.memory_store",
)

#: Engines that start on a CPU, by name.
ON_CPU: Final[dict[str, Kind]] = {
    "llama": Kind("llama"),
    "llama, no drafts": Kind("llama", PLAIN),
    "llama, 1 draft": Kind("llama", with_drafts(1)),
    "llama, 8 drafts": Kind("llama", with_drafts(8)),
    "llama, no prefix cache": Kind("llama", BARE),
    "llama, priorities": Kind("llama", PRIORITIES),
    "llama, short steps": Kind("llama", {"max_num_batched_tokens": 40}),
    "llama, fp8 rows": Kind("llama", {"kv_cache_dtype": "fp8_e5m2", "dtype": "bfloat16"}),
    "qwen3": Kind("qwen3"),
    "mistral, sliding": Kind("mistral"),
    "gemma2": Kind("gemma2"),
    "gemma3, two groups": Kind("gemma3"),
    "gemma3, no drafts": Kind("gemma3", PLAIN),
    "gemma3n, shared rows": Kind("gemma3n"),
    "gptoss": Kind("gptoss"),
    "bloom": Kind("bloom"),
    "deepseek, latent": Kind("deepseek", {"dtype": "bfloat16"}),
    "llama4, chunked attention": Kind("llama4", DUMMY),
    "qwen3_next": Kind("qwen3_next", STATES | BARE | {"dtype": "bfloat16"}),
    "qwen3_next, no drafts": Kind("qwen3_next", STATES | BARE | PLAIN | {"dtype": "bfloat16"}),
    "nemotron_h": Kind("nemotron_h", STATES | BARE),
    "nemotron_h, no drafts": Kind("nemotron_h", STATES | BARE | PLAIN),
    "falcon_h1": Kind("falcon_h1", STATES | BARE),
    "mamba2": Kind("mamba2", STATES | BARE),
    "mamba2, no drafts": Kind("mamba2", STATES | BARE | PLAIN),
    "lfm2": Kind("lfm2", STATES | BARE),
    "lfm2, no drafts": Kind("lfm2", STATES | BARE | PLAIN),
    "nemotron_h, short steps": Kind("nemotron_h", CROWDED),
    "falcon_h1, short steps": Kind("falcon_h1", CROWDED),
    "lfm2, short steps": Kind("lfm2", CROWDED),
    "sessions, llama": Kind("llama", workloads="sessions"),
    "sessions, llama, no drafts": Kind("llama", PLAIN, workloads="sessions"),
    "sessions, gemma3": Kind("gemma3", workloads="sessions"),
    "sessions, lfm2": Kind("lfm2", STATES | BARE, workloads="sessions"),
    "llama, OffloadingConnector": Kind("llama", MEMORY, workloads=CONNECTED),
    "llama, no drafts, OffloadingConnector": Kind("llama", PLAIN | MEMORY, workloads=CONNECTED),
    "gemma3, OffloadingConnector": Kind("gemma3", MEMORY, workloads=CONNECTED),
    "llama, ExampleConnector": Kind("llama", EXAMPLE, workloads=CONNECTED),
}


#: By kind: the model runners that do not have it, or that would show nothing new.
LACKING: Final = {
    "llama, Medusa": ("V2",),
    "llama, 1 draft": ("V1",),
    "llama, 8 drafts": ("V1",),
    "llama, EAGLE, steady": ("V1",),
    "llama, EAGLE, no block dropped": ("V1",),
    "llama, fp8 rows": ("V1",),
    "olmo_hybrid, graphs": ("V1",),
}


def _on_gpu() -> dict[str, Kind]:
    """Return the engines that start on a GPU, by name."""
    mla = {"attention_config": {"backend": "TRITON_MLA"}, "block_size": None}
    kinds = {
        "llama": Kind("llama"),
        "llama, no drafts": Kind("llama", PLAIN),
        "llama, 1 draft": Kind("llama", with_drafts(1)),
        "llama, 8 drafts": Kind("llama", with_drafts(8)),
        "llama, no prefix cache": Kind("llama", BARE),
        "llama, short steps": Kind("llama", {"max_num_batched_tokens": 40}),
        "llama, priorities": Kind("llama", PRIORITIES),
        "llama, lookup on the GPU": Kind(
            "llama", {"speculative_config": NGRAM | {"method": "ngram_gpu"}}
        ),
        "llama, graphs": Kind("llama", GRAPHS),
        "llama, fp8 rows": Kind("llama", {"kv_cache_dtype": "fp8"}),
        "llama, EAGLE": Kind("llama", DUMMY | drafting("eagle"), "eagle"),
        "llama, EAGLE, graphs": Kind("llama", DUMMY | drafting("eagle") | GRAPHS, "eagle"),
        "llama, EAGLE, steady": Kind(
            "llama", DUMMY | drafting("eagle") | {"async_scheduling": False}, "eagle"
        ),
        "llama, EAGLE, no block dropped": Kind(
            "llama", DUMMY | drafting("eagle", disable_eagle_block_drop=True), "eagle"
        ),
        "llama, EAGLE-3": Kind("llama", DUMMY | drafting("eagle3"), "eagle3"),
        "llama, a draft model": Kind("llama", drafting("draft_model"), "draft"),
        "llama, Medusa": Kind("llama", DUMMY | drafting("medusa"), "medusa"),
        "mistral, sliding": Kind("mistral"),
        "gemma3, two groups": Kind("gemma3"),
        "gemma3, EAGLE": Kind("gemma3", DUMMY | drafting("eagle"), "eagle"),
        "gptoss": Kind("gptoss"),
        "llama4, chunked attention": Kind("llama4", DUMMY | BY_LOT),
        "deepseek, latent": Kind("deepseek", mla),
        "deepseek, MTP": Kind("deepseek_mtp", mla | drafting("mtp") | DUMMY),
    }
    for model in ("qwen3_5", "nemotron_h", "granite", "lfm2", "falcon_h1", "olmo_hybrid"):
        random = BY_LOT | DUMMY | {"gdn_prefill_backend": "triton"}
        kinds |= {
            model: Kind(model, random | STATES | BARE),
            f"{model}, no drafts": Kind(model, random | STATES | BARE | PLAIN),
            f"{model}, states cached": Kind(model, random | ALIGN),
            f"{model}, no drafts, states cached": Kind(model, random | ALIGN | PLAIN),
            f"{model}, graphs": Kind(model, random | STATES | BARE | GRAPHS),
            f"{model}, short steps": Kind(model, random | CROWDED),
            f"sessions, {model}": Kind(model, random | STATES | BARE, workloads="sessions"),
            f"sessions, {model}, no drafts": Kind(
                model, random | STATES | BARE | PLAIN, workloads="sessions"
            ),
            f"windows, {model}": Kind(model, random | STATES | BARE | WINDOWS),
            f"windows, {model}, states cached": Kind(model, random | ALIGN | WINDOWS),
            f"windows, {model}, short steps": Kind(model, random | CROWDED | WINDOWS),
            f"windows, sessions, {model}": Kind(
                model, random | STATES | BARE | WINDOWS, workloads="sessions"
            ),
        }
    mtp = STATES | DUMMY | {"gdn_prefill_backend": "triton"} | drafting("mtp")
    kinds |= {
        "qwen3_5, MTP": Kind("qwen3_5", mtp | BARE),
        "qwen3_5, MTP, states cached": Kind("qwen3_5", mtp | {"mamba_cache_mode": "align"}),
        "mamba2": Kind("mamba2", BY_LOT | STATES | BARE),
        "mamba2, no drafts": Kind("mamba2", STATES | PLAIN | BARE),
        "mamba2, no drafts, states cached": Kind("mamba2", ALIGN | PLAIN),
        "mamba2, states cached": Kind("mamba2", BY_LOT | ALIGN),
        "windows, llama": Kind("llama", WINDOWS),
        "windows, sessions, llama": Kind("llama", WINDOWS, workloads="sessions"),
        "windows, qwen3_5, MTP, states cached": Kind(
            "qwen3_5", mtp | {"mamba_cache_mode": "align"} | WINDOWS
        ),
        "sessions, llama": Kind("llama", workloads="sessions"),
        "sessions, llama, no drafts": Kind("llama", PLAIN, workloads="sessions"),
        "sessions, llama, EAGLE": Kind(
            "llama", DUMMY | drafting("eagle"), "eagle", workloads="sessions"
        ),
        "sessions, gemma3": Kind("gemma3", workloads="sessions"),
        "sessions, qwen3_5, states cached": Kind(
            "qwen3_5",
            BY_LOT | DUMMY | ALIGN | {"gdn_prefill_backend": "triton"},
            workloads="sessions",
        ),
        "sessions, nemotron_h, no drafts, states cached": Kind(
            "nemotron_h", DUMMY | ALIGN | PLAIN, workloads="sessions"
        ),
        "sessions, mamba2": Kind("mamba2", BY_LOT | STATES | BARE, workloads="sessions"),
        "sessions, llama, OffloadingConnector, outputs": Kind(
            "llama", OUTPUTS, workloads="sessions"
        ),
    }
    for name, change in {
        "ExampleConnector": EXAMPLE,
        "OffloadingConnector": OFFLOAD,
        "OffloadingConnector, outputs": OUTPUTS,
        "SimpleCPUOffloadConnector": SIMPLE,
        "SimpleCPUOffloadConnector, lazy": LAZY,
    }.items():
        kinds |= {
            f"llama, {name}": Kind("llama", change, workloads=CONNECTED),
            f"llama, EAGLE, {name}": Kind(
                "llama", change | DUMMY | drafting("eagle"), "eagle", workloads=CONNECTED
            ),
            f"gemma3, {name}": Kind("gemma3", change, workloads=CONNECTED),
        }
    return {
        f"{name}, {runner}": attrs.evolve(kind, environment=variables)
        for name, kind in kinds.items()
        for runner, variables in (("V1", V1), ("V2", V2))
        if runner not in LACKING.get(name, ())
    }


#: Engines that start on a GPU, each with both model runners.
ON_GPU: Final = _on_gpu()
