"""Tiny models with random weights, written to disk as vLLM wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 128

#: What all of them share; the spread of the weights makes some n-gram drafts right, most wrong.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}


def write(name: str, folder: Path, seed: int = 0) -> str:
    """Write the model called ``name`` into ``folder``; returns the path.

    ``draft`` is ``llama`` with noise on its weights: right often, not always.
    """
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    layers = {"num_hidden_layers": 3}
    if name in ("llama", "draft"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON, **layers))
    elif name == "mistral":
        torch.manual_seed(seed + 1)  # or else it is the same model as llama
        model = hf.MistralForCausalLM(hf.MistralConfig(**COMMON, **layers, sliding_window=96))
    elif name == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, **layers))
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        config = hf.Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=4,
            layer_types=kinds,
            sliding_window=40,
            query_pre_attn_scalar=32,
        )
        model = hf.Gemma3ForCausalLM(config)
    else:
        raise ValueError(name)
    model.lm_head.weight.data.mul_(8.0)  # sharp enough that sampling accepts some drafts, too
    if name == "draft":
        for weight in model.parameters():
            weight.data.add_(torch.randn_like(weight) * weight.std() * 0.1)
    path = folder / name
    model.save_pretrained(path)
    return str(path)
