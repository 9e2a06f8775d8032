"""Tiny models of families with something of their own in the cache."""

from __future__ import annotations

import torch
import transformers
from tiny_models import COMMON, WINDOW
from transformers import PreTrainedModel

HEAD = {"head_dim": 8}
SLIDES = {**HEAD, "sliding_window": WINDOW}

LAST = ["sliding_attention", "full_attention"]  # these read what the second and third wrote

#: name: (what is special, model class, config class, settings)
FAMILIES = {
    "qwen2": (
        "slides from a layer on",
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": WINDOW}
        | {"max_window_layers": 1},
    ),
    "gpt_oss": (
        "attention sinks",
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SLIDES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "values smaller than keys",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "n_group": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    "llama4": (
        "attends in chunks",
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**HEAD, "num_hidden_layers": 4, "attention_chunk_size": WINDOW, "num_local_experts": 2}
        | {"intermediate_size_mlp": 32, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "gemma3n": (
        "later layers share earlier ones' rows",
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**SLIDES, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "altup_num_inputs": 2}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", *LAST]}
        | {"vocab_size_per_layer_input": COMMON["vocab_size"], "laurel_rank": 4}
        | {"hidden_size_per_layer_input": 8, "activation_sparsity_pattern": [0.0] * 5},
    ),
}


def build(name: str) -> PreTrainedModel:
    """A model of the family, random weights."""
    _, model, config, settings = FAMILIES[name]
    torch.manual_seed(0)
    settings = {**COMMON, **settings}
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
