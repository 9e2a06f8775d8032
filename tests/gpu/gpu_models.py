"""Tiny models for engines on a GPU, whose attention wants heads of at least 64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import kvtxn.integrations.demo
import model_files
import state_models

#: A small trained model, and prompts for it.
DEMO = Path(kvtxn.integrations.demo.__file__).parent

#: Latent attention in the sizes that the GPU's kernels are built for; all layers are dense.
LATENT: dict[str, Any] = {
    "vocab_size": model_files.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def write(name: str, folder: Path) -> str:
    """Write the model called ``name`` into ``folder``; returns the path.

    Those named after a drafter are configurations alone: their weights are made in place.
    """
    import transformers as hf

    path = folder / name
    if name == "demo":
        return str(DEMO / "model")
    if name == "deepseek":
        import torch

        torch.manual_seed(0)
        model = hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**LATENT))
        model.lm_head.weight.data.mul_(8.0)
        model.save_pretrained(path)
    elif name == "deepseek_mtp":
        config = hf.DeepseekV3Config(**LATENT, num_nextn_predict_layers=1)
        config.architectures = ["DeepseekV3ForCausalLM"]
        config.save_pretrained(path)
    elif name in state_models.CONFIGS:
        path.mkdir(parents=True, exist_ok=True)
        config = state_models.CONFIGS[name]
        (path / "config.json").write_text(json.dumps(config, indent=1))
    elif name in ("eagle", "eagle3"):
        config = hf.LlamaConfig(**model_files.COMMON | {"head_dim": 64}, num_hidden_layers=1)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(path)
    elif name == "medusa":
        path.mkdir(parents=True)
        settings = {"hidden_size": 64, "vocab_size": model_files.VOCAB, "medusa_num_heads": 3}
        (path / "config.json").write_text(
            json.dumps({"model_type": "medusa", "medusa_num_layers": 1, **settings})
        )
    else:
        with mock.patch.dict(model_files.COMMON, {"head_dim": 64}):
            return model_files.write(name, folder)
    return str(path)
