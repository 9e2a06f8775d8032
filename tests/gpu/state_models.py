"""Small dense models with recurrent layers, in the sizes of GPUs' kernels, and their engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from one_gpu_jobs import ENVIRONMENT, OPTIONS

DRAFTS: Final = 4

#: Of each scenario: requests, shortest and longest prompt, output tokens.
SCENARIOS: Final[dict[str, tuple[int, int, int, int]]] = {
    "one": (1, 30, 30, 40),
    "eight": (8, 8, 70, 48),
    "chunked": (12, 40, 300, 32),
    "many": (24, 5, 40, 40),
    # Past the end of a block of 272 tokens, and on from there: the second turn of each.
    "growing": (10, 225, 262, 56),
    "returning": (10, 0, 0, 40),
    # Every third request is aborted in the middle.
    "left": (12, 20, 60, 48),
}

_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_BASE: Final[dict[str, Any]] = {
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED: Final[dict[str, Any]] = {
    **_BASE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": _ROPE,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

#: ``config.json`` of each model.
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_next": {  # vLLM wants one mixture of experts at least
        **_GATED,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 2, 3],
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "qwen3_5": {
        **_GATED,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    },
    "olmo_hybrid": {
        **_BASE,
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "pad_token_id": 0,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_allow_neg_eigval": True,
    },
    "nemotron_h": {
        **_BASE,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "head_dim": 64,
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
        "use_conv_bias": True,
        "use_bias": False,
        "mamba_proj_bias": False,
        "layer_norm_epsilon": 1e-5,
        "mamba_ssm_cache_dtype": "float32",
        "num_nextn_predict_layers": 0,
    },
    "granite": {
        **_BASE,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "position_embedding_type": "nope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 0.125,
    },
    "falcon_h1": {  # each layer has a state and attention, side by side
        **_BASE,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "drafter": {  # one layer, which reads the hidden states of the model before it
        **_BASE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "lfm2": {
        **_BASE,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_dim": 256,
        "block_dim": 256,
        "block_multiple_of": 32,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}

#: Two groups, and blocks so short that answers cross their ends.
CONFIGS["nemotron_h_groups"] = {**CONFIGS["nemotron_h"], "n_groups": 2, "head_dim": 128}

_TRITON: Final = {"gdn_prefill_backend": "triton"}
_EXACT: Final = {"policy": "auto", "recurrent": "exact", "required": True}

#: Lets Qwen3.5 compute as Qwen3-Next does, without a mixture of experts.
_BY_TRITON: Final = {"environment": {"VLLM_GDN_DECODE_KERNEL": "triton"}}
_32: Final = {"mamba_ssm_cache_dtype": "float32"}
_16: Final = {"mamba_ssm_cache_dtype": "bfloat16"}

#: Drafts are accepted where the model says the same, so that a text does not depend on steps.
_BY_LOGITS: Final = {"rejection_sample_method": "standard", "synthetic_acceptance_rates": None}

#: The prefix cache keeps states at the ends of blocks.
_CACHED: Final[dict[str, Any]] = {
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": None,  # ends of blocks that answers cross are kept, too
    "max_num_batched_tokens": 1024,
    "scenarios": ["growing", "returning"],
}

#: Two tensor-parallel ranks on one GPU; what they say to each other goes through the host.
_RANKS: Final[dict[str, Any]] = {
    **OPTIONS,
    "environment": ENVIRONMENT,
    "tensor_parallel_size": 2,
}

_V1: Final[dict[str, Any]] = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
_BY_TRITON_V1: Final = {"environment": {**_BY_TRITON["environment"], **_V1["environment"]}}
_FEW: Final[dict[str, Any]] = {"blocks": True, "speculation": _BY_LOGITS, "scenarios": ["growing"]}

#: By name: model, options of the engine, and what runs beside stock. "auto" and "undo" are policies
#: with the setting "exact"; "fast" is that setting; "chosen" is the setting "auto", whose rule
#: takes "exact" here.
KINDS: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "triton_float32": (
        "qwen3_5",
        {**_TRITON, **_BY_TRITON, **_32},
        ("again", "auto", "undo", "fast"),
    ),
    "fused_float32": ("qwen3_5", {**_TRITON, **_32}, ("again", "auto", "undo", "fast", "chosen")),
    "nemotron": ("nemotron_h", {}, ("auto", "fast")),
    "lfm2": ("lfm2", {}, ("auto",)),
    "triton_bfloat16": ("qwen3_5", {**_TRITON, **_BY_TRITON, **_16}, ("again", "auto", "fast")),
    "fused_bfloat16": ("qwen3_5", {**_TRITON, **_16}, ("auto", "fast")),
    "granite": ("granite", {}, ("auto", "fast")),
    "nemotron_bfloat16": ("nemotron_h", _16, ("auto", "fast")),
    "olmo": ("olmo_hybrid", _32, ("auto",)),
    "olmo_bfloat16": ("olmo_hybrid", _16, ("auto",)),
    "olmo_cached": ("olmo_hybrid", {**_32, **_CACHED}, ("auto",)),
    "ahead": (
        "qwen3_5",
        {**_TRITON, **_32, "speculation": {"method": "ngram_gpu"}},
        ("auto", "fast"),
    ),
    "mtp": ("qwen3_5", {**_TRITON, "speculation": {"method": "mtp"}}, ("auto", "fast")),
    "eagle": (
        "qwen3_5",
        {**_TRITON, "speculation": {"method": "eagle", "model": "drafter"}},
        ("auto", "fast"),
    ),
    "few": ("qwen3_5", {**_TRITON, **_FEW}, ("auto", "fast")),
    "left": ("qwen3_5", {**_TRITON, **_32, "scenarios": ["left"]}, ("auto", "fast")),
    "left_cached": (
        "qwen3_5",
        {**_TRITON, **_32, **_CACHED, "scenarios": ["left"]},
        ("auto", "fast"),
    ),
    "nemotron_left": ("nemotron_h", {"scenarios": ["left"]}, ("auto", "fast")),
    "falcon": ("falcon_h1", {}, ("auto", "fast")),
    "experts": ("qwen3_next", {**_TRITON, **_32}, ("auto", "fast")),
    "experts_bfloat16": ("qwen3_next", {**_TRITON, **_16}, ("auto", "fast")),
    "ranks": ("qwen3_5", {**_TRITON, **_32, **_RANKS}, ("auto", "fast")),
    "fused_cached": ("qwen3_5", {**_TRITON, **_32, **_CACHED}, ("auto", "fast")),
    "nemotron_cached": ("nemotron_h", _CACHED, ("auto", "fast")),
    "nemotron_groups": ("nemotron_h_groups", _CACHED, ("auto", "fast")),
    "lfm2_cached": ("lfm2", _CACHED, ("auto",)),
    "fused_float32_v1": ("qwen3_5", {**_TRITON, **_32, **_V1}, ("auto", "undo", "fast")),
    "triton_bfloat16_v1": (
        "qwen3_5",
        {**_TRITON, **_BY_TRITON_V1, **_16},
        ("auto", "fast"),
    ),
    "nemotron_v1": ("nemotron_h", _V1, ("auto", "fast")),
    "granite_v1": ("granite", _V1, ("auto", "fast")),
    "lfm2_v1": ("lfm2", _V1, ("auto",)),
    "olmo_v1": ("olmo_hybrid", {**_32, **_V1}, ("auto",)),
    "ahead_v1": (
        "qwen3_5",
        {**_TRITON, **_32, **_V1, "speculation": {"method": "ngram_gpu"}},
        ("again", "auto", "fast"),
    ),
    "mtp_v1": ("qwen3_5", {**_TRITON, **_V1, "speculation": {"method": "mtp"}}, ("auto", "fast")),
    "few_v1": ("qwen3_5", {**_TRITON, **_V1, **_FEW}, ("auto", "fast")),
    "fused_cached_v1": ("qwen3_5", {**_TRITON, **_32, **_V1, **_CACHED}, ("auto", "fast")),
    "nemotron_cached_v1": ("nemotron_h", {**_V1, **_CACHED}, ("auto", "fast")),
    "nemotron_groups_v1": ("nemotron_h_groups", {**_V1, **_CACHED}, ("auto", "fast")),
    "lfm2_cached_v1": ("lfm2", {**_V1, **_CACHED}, ("auto",)),
}
#: Graphs of few sizes, so that engines start sooner.
_SIZES: Final = {"cudagraph_capture_sizes": [(DRAFTS + 1) * count for count in (1, 2, 4, 8, 16)]}
_FULL: Final = {**_SIZES, "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
#: Inductor chooses by time how a kernel runs that joins reductions with other work, also where it
#: is told to be deterministic (``pointwise_with_reduction`` of PyTorch 2.11): engines of stock then
#: differ in their last bits. So no kernels are joined.
_APART: Final = {"combo_kernels": False, "benchmark_combo_kernel": False}
#: "full" compiles nothing, and captures whole verify steps alone: such engines start soonest.
#: "pieces" captures the pieces of other steps, too, without Inductor.
_MODES: Final = {
    "graphs": {"compilation_config": {**_SIZES, "inductor_compile_config": _APART}},
    "eager": {"enforce_eager": True},
    "full": {"compilation_config": _FULL},
    "pieces": {"compilation_config": {**_SIZES, "backend": "eager"}},
}
#: Kinds that run with graphs alone.
_GRAPHS: Final = (
    "ahead",
    *("mtp", "eagle"),
    "few",
    *("left", "left_cached", "nemotron_left"),
    "experts",
    "experts_bfloat16",
    "fused_cached",
    "olmo_cached",
    *("nemotron_cached", "nemotron_groups"),
    "lfm2_cached",
    *("ahead_v1", "mtp_v1", "few_v1"),
    *("fused_cached_v1", "nemotron_cached_v1", "nemotron_groups_v1", "lfm2_cached_v1"),
)
#: Kinds that stock refuses where nothing is compiled: its V1 runner wants to compile what finds
#: n-grams on a GPU.
_COMPILED: Final = ("ahead_v1",)
#: Kinds that run without graphs alone: a graph cannot hold what goes through the host.
_EAGER: Final = ("ranks",)


def write(name: str, folder: Path) -> str:
    """Write a model's configuration; returns its folder. Weights are made in place."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    return str(path)


def engines(*, several: bool = False) -> dict[str, dict[str, Any]]:
    """The engines by name, the most telling ones first.

    Args:
        several: each rank of an engine has a GPU of its own, so that graphs hold what ranks say.
    """
    found: dict[str, dict[str, Any]] = {}
    for mode in ("eager", "graphs", "full", "pieces"):
        for kind, (model, options, others) in KINDS.items():
            v1 = kind.endswith("_v1")
            without = _GRAPHS if mode == "eager" else () if several else _EAGER
            if kind in without or (mode == "pieces" and not v1):
                continue
            if mode == "full" and kind in _COMPILED:
                continue
            for who in ("stock", *others):
                if mode == "eager" and who == "again":
                    continue
                policy = "undo" if who == "undo" else "auto"
                how = {"fast": "fast", "chosen": "auto"}.get(who, "exact")
                ours = {**_EXACT, "policy": policy, "recurrent": how}
                ours |= {"unchecked": True} if kind in _EAGER else {}
                kvtxn = {} if who in ("stock", "again") else ours
                more = {**options, **_MODES[mode]}
                if several and kind in _EAGER:
                    del more["environment"]
                scenarios = more.pop("scenarios", [])
                if who == "stock":
                    more.pop("blocks", None)  # the text is that of an engine with blocks for all
                found[f"{kind}.{mode}.{who}"] = {
                    "model": model,
                    "kvtxn": kvtxn,
                    "options": more,
                    "more": scenarios,
                    "v1": v1,
                    "several": several,
                }
    return found


def options_of(job: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a job's engine, beside its model and kvtxn's settings."""
    options = {name: value for name, value in job["options"].items() if name != "environment"}
    rates = [0.7, 0.5, 0.35, 0.25]
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    other = options.pop("speculation", {})
    speculation = {
        **({} if other.get("method") in ("mtp", "eagle") else ngram),
        "num_speculative_tokens": DRAFTS,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
        **other,
    }
    speculation = {name: value for name, value in speculation.items() if value is not None}
    if options.pop("blocks", False):
        options["num_gpu_blocks_override"] = 38  # too few for all: requests are preempted
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "logprobs_mode": "raw_logits",
        "speculative_config": speculation,
        **options,
    }
