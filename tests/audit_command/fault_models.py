"""Tiny models with random weights whose engines have known faults."""

from __future__ import annotations

from pathlib import Path

import model_files


def write(name: str, folder: Path) -> str:
    """Write a model into ``folder``; returns its path."""
    if name != "mamba2":
        return model_files.write(name, folder)
    import torch
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Mamba2Config(
        vocab_size=model_files.VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    model = hf.Mamba2ForCausalLM(config)
    model.lm_head.weight.data.mul_(8.0)
    path = folder / name
    model.save_pretrained(path)
    return str(path)
