"""Small models for engines of SGLang, and the engines themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
#: A hybrid with recurrent states.
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
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
}
DRAFTER: Final = {**LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
MODELS: Final[Mapping[str, dict[str, Any]]] = {
    **{"llama": LLAMA, "mla": MLA, "next": NEXT, "eagle": DRAFTER},
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
TREE: Final = {**EAGLE, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
NGRAM: Final = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
CHUNKED: Final = {"chunked_prefill_size": 64}
MIXED: Final = {"chunked_prefill_size": 48, "enable_mixed_chunk": True}
SYNC: Final = {"disable_overlap_schedule": True}
EAGER: Final = {"disable_cuda_graph": True, "disable_radix_cache": True}
RETRACT: Final = {"SGLANG_TEST_RETRACT": "1"}
BYTES: Final = {"AUDIT": "bytes"}


def _faults(which: str) -> dict[str, str]:
    """Let an engine live on after the faults of one set of ``sglang_faults.SETS``."""
    return {"FAULTS": which, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0"}


#: By name: the model, arguments, and variables of an engine.
ENGINES: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "radix": ("llama", {}, {}),
    "chunked": ("llama", MIXED, {}),
    "retract": ("llama", {"max_total_tokens": 2600}, RETRACT),
    "sync": ("llama", {**SYNC, **CHUNKED}, {}),
    "page16": ("llama", {"page_size": 16, **CHUNKED}, {}),
    "eager": ("llama", EAGER, {}),
    "eagle": ("llama", EAGLE, {}),
    "eagle-sync": ("llama", {**EAGLE, **SYNC, **CHUNKED}, {}),
    "eagle-retract": ("llama", {**EAGLE, "max_total_tokens": 3200, **CHUNKED}, RETRACT),
    "mla": ("mla", CHUNKED, {}),
    "faults": ("llama", {}, _faults("all")),
    "faults-eagle": ("llama", EAGLE, _faults("chain")),
    "bytes": ("llama", CHUNKED, BYTES),
    "bytes-eagle": ("llama", EAGLE, BYTES),
    "bytes-mla": ("mla", CHUNKED, BYTES),
    "qwen3-next": ("next", {"max_mamba_cache_size": 64}, {}),  # not watched: says so, and runs
    "eagle-tree": ("llama", TREE, {}),
    "ngram": ("llama", NGRAM, {}),
    "ngram-chunked": ("llama", {**NGRAM, **CHUNKED}, {}),
    "mla-ngram": ("mla", NGRAM, {}),
    "faults-tree": ("llama", TREE, _faults("tree")),
}

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
STATES: Final = {"max_mamba_cache_size": 48}
GRAPH: Final = {**STATES, "max_total_tokens": 8192, "cuda_graph_backend_prefill": "breakable"}
RANDOM: Final = {"WEIGHTS": "random"}
#: Engines of ``sglang_known.py``.
KNOWN: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, str]]]] = {
    "hicache": ("llama", HICACHE, {}),
    "next-hicache": ("next", {**HICACHE, **STATES}, RANDOM),
    "next-graph": ("next", GRAPH, RANDOM),
    "next-untracked": ("next", GRAPH, {**RANDOM, "UNDO": "34043"}),
    "salts": ("llama", {**HICACHE, **FILES, "page_size": 64}, {}),
}


def arguments(name: str, models: Path) -> dict[str, Any]:
    """Return the arguments of an engine, whose model is made if it is not there."""
    model, more, _ = {**ENGINES, **KNOWN}[name]
    folder = make(model, models)
    found = {**ARGUMENTS, "model_path": str(folder), **more}
    found["load_format"] = "auto" if model == "llama" else "dummy"
    if draft := found.pop("draft", None):
        found["speculative_draft_model_path"] = str(make(draft, models))
    return found


def make(name: str, models: Path) -> Path:
    """Write a checkpoint; models with dummy weights have a config alone."""
    folder = models / name
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        if name in ("llama", "eagle"):
            from safetensors.torch import save_file

            tensors = {key: each.bfloat16().contiguous() for key, each in weights(name).items()}
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "done").touch()
    return folder


def weights(name: str) -> dict[str, Any]:
    """Draw weights.

    The next token follows from the last one and, less, from the context; ties are rare. The drafter
    sees the last token through some noise, so that some drafts are rejected.
    """
    import torch

    torch.manual_seed(0)
    config = MODELS[name]
    hidden, size = config["hidden_size"], config["vocab_size"]
    embed = torch.randn(size, hidden)
    head = embed[torch.randperm(size)]
    tensors = {}
    for number in range(config["num_hidden_layers"]):
        prefix = "model." if name == "llama" else ""
        layer = f"{prefix}layers.{number}."
        for part, (rows, columns) in shapes(config).items():
            scale = 1.5
            if part.endswith(("o_proj", "down_proj")):
                scale = {"llama": 0.6, "eagle": 0.9}[name]
            tensor = torch.randn(rows, columns) * (scale / columns**0.5)
            tensors[f"{layer}{part}.weight"] = tensor
        norms = ["post_attention_layernorm", *(["input_layernorm"] * (name == "llama"))]
        tensors |= {f"{layer}{norm}.weight": torch.ones(hidden) for norm in norms}
    if name == "llama":
        ends = {"model.embed_tokens": embed, "lm_head": head, "model.norm": torch.ones(hidden)}
        return tensors | {f"{part}.weight": each for part, each in ends.items()}
    joined = 0.11 * torch.randn(hidden, 2 * hidden)
    joined[:, :hidden] += torch.eye(hidden)
    return tensors | {"fc.weight": joined, "fc.bias": torch.zeros(hidden)}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's matrices."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
