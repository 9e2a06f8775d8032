"""Shapes of models: of whole ones for engines, and of their rows for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

BLOCK_SIZE: Final = 16


@attrs.frozen
class States:
    """The recurrent states that a hybrid model keeps for each request on one GPU.

    Attributes:
        kind: ``"gated_delta"`` or ``"mamba2"``.
        layers: layers that have a state.
        heads: heads of a state.
        key_heads: heads of keys and queries; of Mamba-2, groups that share B and C.
        value_size: values of a head; of Mamba-2, the size of a head.
        key_size: keys of a value; of Mamba-2, the size of a value's state.
    """

    kind: str
    layers: int
    heads: int
    key_heads: int
    value_size: int
    key_size: int


@attrs.frozen
class Experts:
    """The mixture of experts in each layer of a model.

    Attributes:
        number: the experts of a layer.
        chosen: experts that each token takes.
        inner: width of an expert, and of the one that every token takes.
    """

    number: int
    chosen: int
    inner: int


@attrs.frozen
class Shape:
    """A model's size: a Llama's, or a hybrid's.

    Attributes:
        layers: number of layers.
        hidden: width.
        inner: width of the feed-forward part.
        heads: query heads.
        kv_heads: KV heads.
        vocab: number of tokens.
        states: the recurrent states of a hybrid, whose other layers have attention.
        head_size: width of a head; 0 for that part of ``hidden``.
        feeding: layers that have a feed-forward part alone; 0: each layer has one.
        experts: in place of a dense feed-forward part; None in a dense model.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    states: States | None = None
    head_size: int = 0
    feeding: int = 0
    experts: Experts | None = None

    @property
    def attention(self) -> int:
        """Layers with attention."""
        return self.layers - self.feeding - (0 if self.states is None else self.states.layers)

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a layer's cache, in bf16."""
        return 4 * self.kv_heads * self.head

    @property
    def rows(self) -> Rows:
        """Rows of the whole model on one GPU, as if each layer had attention."""
        return Rows(self.layers, self.kv_heads, self.head, self.heads)


#: By name; shapes from the models' configurations.
STATES: Final[Mapping[str, States]] = {
    "qwen3.5-9b": States("gated_delta", 24, 32, 16, 128, 128),
    "qwen3-next-a3b": States("gated_delta", 36, 32, 16, 128, 128),
    "nemotron-h-8b": States("mamba2", 24, 128, 8, 64, 128),
    "tiny-gated-delta": States("gated_delta", 2, 4, 2, 16, 16),
    "tiny-mamba2": States("mamba2", 2, 4, 2, 16, 16),
}

#: By name; engines serve them with random weights.
SHAPES: Final[Mapping[str, Shape]] = {
    "llama3-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "host-bound": Shape(8, 1024, 2816, 16, 8, 32000),
    "tiny": Shape(2, 128, 256, 4, 2, 512),
    # Its vocabulary is cut, so that dummy weights and logits take less.
    "qwen3.5-9b": Shape(32, 4096, 12288, 16, 4, 32000, states=STATES["qwen3.5-9b"], head_size=256),
    # As many active parameters as Qwen3-Next 80B-A3B, of 64 experts in place of 512.
    "qwen3-next-a3b": Shape(
        *(48, 2048, 5120, 16, 2, 32000),
        states=STATES["qwen3-next-a3b"],
        head_size=256,
        experts=Experts(64, 10, 512),
    ),
    "nemotron-h-8b": Shape(
        *(52, 4096, 21504, 32, 8, 32000),
        states=STATES["nemotron-h-8b"],
        head_size=128,
        feeding=24,
    ),
}


@attrs.frozen
class Rows:
    """The rows that a model stores per token on one GPU.

    Attributes:
        layers: number of layers.
        kv_heads: KV heads on this GPU; 0 for latents.
        head_size: elements per head, or of the latent.
        q_heads: query heads on this GPU.
    """

    layers: int
    kv_heads: int
    head_size: int
    q_heads: int


#: By name; whole models, or a GPU's share of one.
MODELS: Final[Mapping[str, Rows]] = {
    "llama3-8b": SHAPES["llama3-8b"].rows,
    "llama3-70b-tp8": Rows(80, 1, 128, 8),
    "qwen3-32b-tp2": Rows(64, 4, 128, 32),
    "llama3-1b": Rows(16, 8, 64, 32),
    "deepseek-v3-mla": Rows(61, 0, 576, 128),
}


@attrs.frozen
class Case:
    """A point of the kernel benchmarks: a model and a window.

    Attributes:
        model: a name in ``MODELS``.
        requests: requests of the batch.
        drafts: draft rows per request; one settled row comes on top.
        accepted: share of the draft rows that is kept.
    """

    model: str
    requests: int
    drafts: int
    accepted: float

    @property
    def shape(self) -> Rows:
        """The model."""
        return MODELS[self.model]

    @property
    def rows(self) -> int:
        """Rows of the window."""
        return self.requests * (self.drafts + 1)


@attrs.frozen
class StateCase:
    """A point of the benchmark of recurrent states: a model and a step.

    Attributes:
        model: a name in ``STATES``.
        dtype: dtype of the states, by torch's name.
        requests: requests of the batch.
        drafts: draft rows per request; one settled row comes on top.
    """

    model: str
    dtype: str
    requests: int
    drafts: int

    @property
    def shape(self) -> States:
        """The states of the model."""
        return STATES[self.model]

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return self.requests * (self.drafts + 1)
