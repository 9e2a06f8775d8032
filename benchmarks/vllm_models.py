"""Models and drafters that need no download.

Shapes of well-known models have random weights, which vLLM makes up from a configuration: the
text is noise, time per step is the real model's. The demo's model is small, and trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import ConfigError
from ..integrations import demo


@attrs.frozen
class Shape:
    """A model's size: a Llama's, or one with DeepSeek's latent attention and dense layers.

    Attributes:
        layers: number of layers.
        hidden: width.
        inner: width of the feed-forward part.
        heads: query heads.
        kv_heads: KV heads.
        vocab: number of tokens.
        latent: width of a latent, without its rotary part; 0 in a Llama.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    latent: int = 0

    @property
    def row_bytes(self) -> int:
        """What a token takes in a layer's cache, in bf16."""
        if self.latent:
            return 2 * (self.latent + _ROTARY)
        return 4 * self.kv_heads * (self.hidden // self.heads)


#: Width of a head's rotary part, where attention is latent; that of the rest of a head is twice.
_ROTARY: Final = 64

#: With random weights.
SHAPES: Final[Mapping[str, Shape]] = {
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "host-bound": Shape(8, 1024, 2816, 16, 8, 32000),
    "latent-2b": Shape(27, 2048, 10944, 16, 16, 102400, latent=512),
    "tiny": Shape(2, 128, 256, 4, 2, 512),
    "tiny-latent": Shape(2, 128, 256, 16, 16, 512, latent=512),
}

_DEMO: Final = Path(demo.__file__).parent


@attrs.frozen
class Model:
    """What an engine serves.

    Attributes:
        name: as on the command line.
        shape: its size.
        folder: where it is; None for random weights.
    """

    name: str
    shape: Shape
    folder: Path | None = None

    @property
    def token_bytes(self) -> int:
        """What a token takes in the cache in bf16, a drafter's layer included."""
        return (self.shape.layers + 1) * self.shape.row_bytes

    @property
    def about(self) -> str:
        """One line."""
        kind = "latent attention, " if self.shape.latent else ""
        weights = "random weights" if self.folder is None else "trained: real text and acceptance"
        return f"{self.shape.layers} layers of {self.shape.hidden}, {kind}{weights}"

    def arguments(self, folder: Path, max_length: int) -> dict[str, Any]:
        """What ``vllm.LLM`` has to know of it.

        Args:
            folder: for a configuration, where one has to be written.
            max_length: most tokens of a request.
        """
        if self.folder is not None:
            return {"model": str(self.folder)}
        path = _write(folder / self.name, self.shape, self.shape.layers, max_length)
        return {"model": str(path), "load_format": "dummy"}

    def text(self) -> Sequence[int] | int:
        """Token ids to cut prompts from; the size of the vocabulary where any ids will do."""
        if self.folder is None:
            return self.shape.vocab
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        prompts = json.loads((_DEMO / "prompts.json").read_text())
        return [token for text in prompts for token in tokenizer.encode(text).ids]


#: What can be served.
MODELS: Final[Mapping[str, Model]] = {
    **{name: Model(name, shape) for name, shape in SHAPES.items()},
    "demo": Model("demo", Shape(3, 256, 512, 4, 2, 2048), _DEMO / "model"),
}


def _ngram(folder: Path, model: Model, max_length: int) -> dict[str, Any]:
    """Drafts from the request's own text."""
    return {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


def _one_layer(folder: Path, model: Model, max_length: int) -> dict[str, Any]:
    """Drafts from one layer of the model's own width, with random weights."""
    if model.shape.latent:
        raise _refused(f"{model.name!r} has no drafter of its own but its last layer", "mtp")
    if model.folder is not None:
        raise _refused(f"nobody trained a drafter for {model.name!r}", "ngram")
    return {"model": str(_write(folder / f"{model.name}-drafter", model.shape, 1, max_length))}


def _mtp(folder: Path, model: Model, max_length: int) -> dict[str, Any]:
    """Drafts from the model's own extra layer."""
    if not model.shape.latent:
        raise _refused(f"{model.name!r} predicts one token at a time", "eagle or draft_model")
    return {}


def _refused(problem: str, instead: str) -> ConfigError:
    return ConfigError("bench vllm", problem, hint=f"take --drafter {instead}, or another model")


#: Method of speculation -> what vLLM has to know of it, given a folder, the model, and the most
#: tokens of a request.
DRAFTERS: Final[Mapping[str, Callable[[Path, Model, int], dict[str, Any]]]] = {
    "ngram": _ngram,
    "eagle": _one_layer,
    "draft_model": _one_layer,
    "mtp": _mtp,
}


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
    if shape.latent:
        settings |= {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "kv_lora_rank": shape.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": 2 * _ROTARY,
            "qk_rope_head_dim": _ROTARY,
            "v_head_dim": 2 * _ROTARY,
            "rope_interleave": True,
            "first_k_dense_replace": layers + 1,  # no experts, in the extra layer either
            "num_nextn_predict_layers": 1,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder
