"""Small models for engines of SGLang, and the engines themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sglang_weights import DRAWN, weights

VOCABULARY: Final = 2048
_COMMON: Final = {
    "hidden_size": 512,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}
LLAMA: Final = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
#: DeepSeek's latent attention.
MLA: Final = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "rope_scaling": None,
}
#: Every other layer has a sliding window, and its rows lie in a pool of their own.
WINDOWS: Final = {
    **LLAMA,
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 4,
    "sliding_window": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "attention_bias": False,
    "rope_parameters": {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": 10000.0}
        for kind in ("full", "sliding")
    },
}
GPT_OSS: Final = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 48,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
#: A hybrid with recurrent states, and a drafter of its own.
NEXT: Final = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 8,  # a choice would turn over with the last bits of the sums
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
}
#: A hybrid of Mamba-2 and attention.
MAMBA2: Final = {
    **_COMMON,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "ssm_state_size": 64,
    "mlp_hidden_act": "relu2",
    "layer_norm_epsilon": 1e-5,
}
#: A hybrid of Kimi's delta attention, whose other layers have latent attention.
KDA: Final = {
    **_COMMON,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        **{"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
        **{"num_heads": 8, "head_dim": 128, "short_conv_kernel_size": 4},
    },
}
#: A drafter of EAGLE-3 that sees the first three layers of the target.
DRAFTER3: Final = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "draft_vocab_size": VOCABULARY,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
DRAFTER: Final = {**LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
MODELS: Final[Mapping[str, dict[str, Any]]] = {
    **{"llama": LLAMA, "mla": MLA, "next": NEXT, "eagle": DRAFTER},
    **{"windows": WINDOWS, "gpt-oss": GPT_OSS, "mamba2": MAMBA2, "kda": KDA, "eagle3": DRAFTER3},
}

ARGUMENTS: Final = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "context_length": 2048,
    "max_running_requests": 24,
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.8,
    "random_seed": 0,
    "log_level": "info",
    "watchdog_timeout": 600,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_max_bs_decode": 24,
}
EAGLE: Final = {
    "draft": "eagle",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
EAGLE3: Final = {**EAGLE, "draft": "eagle3", "speculative_algorithm": "EAGLE3"}
TREE: Final = {**EAGLE, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
NGRAM: Final = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
CHUNKED: Final = {"chunked_prefill_size": 64}
MIXED: Final = {"chunked_prefill_size": 48, "enable_mixed_chunk": True}
SYNC: Final = {"disable_overlap_schedule": True}
EAGER: Final = {"disable_cuda_graph": True, "disable_radix_cache": True}
#: So few slots of windows that the tree gives some back; so many states, kept so often.
FEW: Final = {"max_total_tokens": 16384, "swa_full_tokens_ratio": 0.2}
STATES: Final = {"max_mamba_cache_size": 160, "mamba_track_interval": 64}
#: SGLang's own choice for these models needs FlashInfer.
MAMBA2_STATES: Final = {
    **STATES,
    "moe_runner_backend": "triton",
    "disable_flashinfer_autotune": True,
}
MTP: Final = {**EAGLE, "draft": "next", **STATES}
RETRACT: Final = {"SGLANG_TEST_RETRACT": "1"}
BYTES: Final = {"AUDIT": "bytes"}


def _faults(which: str) -> dict[str, str]:
    """Let an engine live on after the faults of one set of ``sglang_faults.SETS``."""
    return {"FAULTS": which, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}


#: A cache in the host's memory that holds more than the GPU's, which is small.
HICACHE: Final = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
    "max_total_tokens": 8192,
    "max_running_requests": 8,
    "cuda_graph_max_bs_decode": 8,
}
FILES: Final = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
}
#: So few rows on the device that prompts come back from the host.
HOST: Final = {**HICACHE, "max_total_tokens": 4096, "max_running_requests": 12}
BACK: Final = {**HOST, "hicache_write_policy": "write_back"}
#: Texts are those of the engine without faults, which is what a plain run of it is.
CONTAIN: Final = {**_faults("contain"), "ON_VIOLATION": "contain"}
#: By name: the model, arguments, and variables of an engine.
ENGINES: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "radix": ("llama", {}, {}),
    "chunked": ("llama", MIXED, {}),
    "retract": ("llama", {"max_total_tokens": 2600}, RETRACT),
    "sync": ("llama", {**SYNC, **CHUNKED}, {}),
    "page16": ("llama", {"page_size": 16, **CHUNKED}, {}),
    "eager": ("llama", EAGER, {}),
    "eagle": ("llama", EAGLE, {}),
    "eagle3": ("llama", EAGLE3, {}),
    "eagle3-sync": ("llama", {**EAGLE3, **SYNC, **CHUNKED}, {}),
    "eagle3-tree": (
        "llama",
        {**EAGLE3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6},
        {},
    ),
    "faults-eagle3": ("llama", EAGLE3, _faults("chain")),
    "eagle-sync": ("llama", {**EAGLE, **SYNC, **CHUNKED}, {}),
    "eagle-retract": ("llama", {**EAGLE, "max_total_tokens": 3200, **CHUNKED}, RETRACT),
    "mla": ("mla", CHUNKED, {}),
    "faults": ("llama", {}, _faults("all")),
    "faults-eagle": ("llama", EAGLE, _faults("chain")),
    "contain-llama": ("llama", {}, CONTAIN),
    "contain-sync": ("llama", {**SYNC, **CHUNKED}, CONTAIN),
    "contain-page16": ("llama", {"page_size": 16, **CHUNKED}, CONTAIN),
    "contain-eagle": ("llama", EAGLE, CONTAIN),
    "host": ("llama", HOST, {}),
    "host-back": ("llama", {**BACK, **CHUNKED}, {}),
    "host-page16": ("llama", {**HOST, "page_size": 16}, {}),
    "host-mla": ("mla", HOST, {}),
    "host-eagle": ("llama", {**EAGLE, **HOST}, {}),
    "host-windows": ("windows", {**HOST, "swa_full_tokens_ratio": 0.5}, {}),
    "host-next": ("next", {**HOST, **STATES}, {}),
    "host-files": ("llama", {**HOST, **FILES, "page_size": 16, "hicache_ratio": 2.0}, {}),
    "faults-host": ("llama", HOST, _faults("host")),
    "faults-host-back": ("llama", BACK, _faults("host")),
    "contain-host": ("llama", HOST, CONTAIN),
    "bytes": ("llama", CHUNKED, BYTES),
    "bytes-eagle": ("llama", EAGLE, BYTES),
    "bytes-mla": ("mla", CHUNKED, BYTES),
    "windows": ("windows", {}, {}),
    "windows-chunked": ("windows", {**FEW, **CHUNKED}, {}),
    "windows-sync": ("windows", {**FEW, **SYNC}, {}),
    "windows-page16": ("windows", {"page_size": 16, **CHUNKED}, {}),
    "windows-retract": ("windows", {"max_total_tokens": 2600, **CHUNKED}, RETRACT),
    "windows-eagle": ("windows", {**EAGLE, **FEW}, {}),
    "windows-tree": ("windows", TREE, {}),
    "windows-ngram": ("windows", {**NGRAM, **FEW, **CHUNKED}, {}),
    "bytes-windows": ("windows", {**FEW, **CHUNKED}, BYTES),
    "gpt-oss": ("gpt-oss", {"moe_runner_backend": "triton", **CHUNKED}, {}),
    "faults-windows": ("windows", {}, _faults("windows")),
    "faults-windows-ngram": ("windows", NGRAM, _faults("windows")),
    "qwen3-next": ("next", STATES, {}),
    "next-sync": ("next", {**STATES, **SYNC, **CHUNKED}, {}),
    "next-chunked": ("next", {**STATES, **CHUNKED}, {}),
    "next-retract": ("next", {**STATES, "max_total_tokens": 2600}, RETRACT),
    "next-plain": ("next", {**STATES, "disable_radix_cache": True}, {}),
    "next-mtp": ("next", MTP, {}),
    "next-mtp-sync": ("next", {**MTP, **SYNC, **CHUNKED}, {}),
    "next-ngram": ("next", {**NGRAM, **STATES}, {}),
    "mamba2": ("mamba2", MAMBA2_STATES, {}),
    "mamba2-chunked": ("mamba2", {**MAMBA2_STATES, **CHUNKED}, {}),
    "mamba2-sync": ("mamba2", {**MAMBA2_STATES, **SYNC, **CHUNKED}, {}),
    "mamba2-retract": ("mamba2", {**MAMBA2_STATES, "max_total_tokens": 2600}, RETRACT),
    "mamba2-plain": ("mamba2", {**MAMBA2_STATES, "disable_radix_cache": True}, {}),
    "mamba2-ngram": ("mamba2", {**NGRAM, **MAMBA2_STATES}, {}),
    "kda": ("kda", STATES, {}),
    "kda-chunked": ("kda", {**STATES, **CHUNKED}, {}),
    "faults-mamba2": ("mamba2", MAMBA2_STATES, _faults("mamba2")),
    "faults-next": ("next", STATES, _faults("states")),
    "faults-next-mtp": ("next", MTP, _faults("commits")),
    "eagle-tree": ("llama", TREE, {}),
    "ngram": ("llama", NGRAM, {}),
    "ngram-chunked": ("llama", {**NGRAM, **CHUNKED}, {}),
    "mla-ngram": ("mla", NGRAM, {}),
    "faults-tree": ("llama", TREE, _faults("tree")),
}

STATES: Final = {"max_mamba_cache_size": 48}
GRAPH: Final = {**STATES, "max_total_tokens": 8192, "cuda_graph_backend_prefill": "breakable"}
#: Engines of ``sglang_known.py``.
KNOWN: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "hicache": ("llama", HICACHE, {}),
    "next-hicache": ("next", {**HICACHE, **STATES}, {}),
    "next-graph": ("next", GRAPH, {}),
    "salts": ("llama", {**HICACHE, **FILES, "page_size": 64}, {}),
}


def arguments(name: str, models: Path) -> dict[str, Any]:
    """Return the arguments of an engine, whose model is made if it is not there."""
    model, more, _ = {**ENGINES, **KNOWN}[name]
    folder = make(model, models)
    found = {**ARGUMENTS, "model_path": str(folder), **more}
    found["load_format"] = "auto" if model in DRAWN else "dummy"
    if draft := found.pop("draft", None):
        found["speculative_draft_model_path"] = str(make(draft, models))
    return found


def make(name: str, models: Path) -> Path:
    """Write a checkpoint; models with dummy weights have a config alone."""
    folder = models / name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        if name in DRAWN:
            from safetensors.torch import save_file

            drawn = weights(name, MODELS[name])
            tensors = {key: each.bfloat16().contiguous() for key, each in drawn.items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "done").touch()
    return folder
