"""Models that vLLM can serve without weights: their configurations, written to a folder.

The dummy weights are random, so the text is noise; time per step is the real model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs


@attrs.frozen
class Shape:
    """A Llama's size.

    Attributes:
        layers: number of layers.
        hidden: width.
        inner: width of the feed-forward part.
        heads: query heads.
        kv_heads: KV heads.
        vocab: number of tokens.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def token_bytes(self) -> int:
        """What a token takes in the cache in bf16, a drafter's layer included."""
        return 4 * (self.layers + 1) * self.kv_heads * (self.hidden // self.heads)


SHAPES: Final[Mapping[str, Shape]] = {
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "host-bound": Shape(8, 1024, 2816, 16, 8, 32000),
    "tiny": Shape(2, 128, 256, 4, 2, 512),
}


def write_model(folder: Path, name: str, max_length: int) -> Path:
    """Write a model's configuration; returns its folder.

    Args:
        folder: where to put it.
        name: of a shape.
        max_length: most tokens of a request.
    """
    return _write(folder / name, SHAPES[name], SHAPES[name].layers, max_length)


def write_drafter(folder: Path, name: str, max_length: int) -> Path:
    """Write the configuration of an EAGLE head for a model: one layer of the same width."""
    return _write(folder / f"{name}-eagle", SHAPES[name], 1, max_length)


def _write(folder: Path, shape: Shape, layers: int, max_length: int) -> Path:
    settings: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder
