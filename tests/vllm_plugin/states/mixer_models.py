"""Tiny models with Mamba-2 layers or short convolutions, and random weights, as vLLM wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import model_files

COMMON: dict[str, Any] = {
    "vocab_size": model_files.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}


def write(name: str, folder: Path) -> str:
    """Write the model called ``name`` into ``folder``; returns the path.

    ``counting`` is ``falcon_h1``, but its text is told by ``counts_on``.
    """
    import torch
    import transformers as hf

    torch.manual_seed(0)
    model: Any
    if name == "nemotron_h":
        config = hf.NemotronHConfig(
            **COMMON,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
            mlp_hidden_act="relu2",
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=2,
            conv_kernel=4,
            chunk_size=32,
        )
        model = hf.NemotronHForCausalLM(config)
    elif name in ("falcon_h1", "counting"):
        config = hf.FalconH1Config(
            **COMMON,
            num_hidden_layers=2,
            mamba_d_ssm=128,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_chunk_size=32,
        )
        model = hf.FalconH1ForCausalLM(config)
    elif name == "mamba2":
        model = model_files.mamba2()
    elif name == "lfm2":
        config = hf.Lfm2Config(
            **COMMON,
            num_hidden_layers=4,
            layer_types=["conv", "conv", "conv", "full_attention"],
            conv_L_cache=3,
            conv_dim=64,
            block_dim=64,
            block_multiple_of=32,
            block_auto_adjust_ff_dim=False,
        )
        model = hf.Lfm2ForCausalLM(config)
    else:
        return model_files.write(name, folder)
    model.get_input_embeddings().weight.data.mul_(6.0)  # or else no draft is ever right
    model.lm_head.weight.data.mul_(8.0)
    if name == "counting":
        counts_on(model)
    path = folder / name
    model.save_pretrained(path)
    return str(path)


def counts_on(model: Any) -> None:
    """Let a model say the token that ``follows`` the last one, however a CPU rounds.

    With random weights another CPU may choose another token, and every token after it is another.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            weight.data.mul_(0.01)  # what layers add decides nothing
    order = [follows(token) for token in range(model_files.VOCAB)]
    model.lm_head.weight.data[order] = model.get_input_embeddings().weight.data


def follows(token: int) -> int:
    """Return the token after ``token``: tokens below 64 go round by four, the others by 64."""
    length = 4 if token < 64 else 64
    return token // length * length + (token + 1) % length
