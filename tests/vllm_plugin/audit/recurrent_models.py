"""Tiny models with recurrent layers and random weights, written to disk as vLLM wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_files import VOCAB, mamba2

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}


def write(name: str, folder: Path) -> str:
    """Write the model called ``name`` into ``folder``; returns the path."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    if name == "qwen3_next":
        config = hf.Qwen3NextConfig(
            **COMMON,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            mlp_only_layers=[0, 1, 2],  # vLLM wants one layer with experts
        )
        model = hf.Qwen3NextForCausalLM(config)
    elif name == "mamba2":
        model = mamba2()
    elif name == "lfm2":
        config = hf.Lfm2Config(
            **COMMON,
            num_hidden_layers=4,
            layer_types=["conv", "conv", "conv", "full_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            conv_L_cache=3,
            conv_dim=128,
            block_dim=128,
            block_ffn_dim_multiplier=1.0,
            block_multiple_of=64,
            block_auto_adjust_ff_dim=False,
        )
        model = hf.Lfm2ForCausalLM(config)
    else:
        raise ValueError(name)
    # The likeliest token after a token is the next one of a cycle of five, mostly: so that n-grams
    # find drafts, of which some are wrong.
    cycle = torch.arange(VOCAB)
    following = torch.where(cycle % 5 == 4, cycle - 4, (cycle + 1) % VOCAB)
    embedding = model.get_input_embeddings().weight.data
    embedding.mul_(8.0)
    model.lm_head.weight.data.mul_(8.0)[following] += embedding
    path = folder / name
    model.save_pretrained(path)
    return str(path)
