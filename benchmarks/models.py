"""Shapes of real models, for the kernel benchmarks; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

BLOCK_SIZE: Final = 16


@attrs.frozen
class Model:
    """What a model stores per token, on one GPU.

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


MODELS: Final[Mapping[str, Model]] = {
    "llama3-8b": Model(32, 8, 128, 32),
    "llama3-70b-tp8": Model(80, 1, 128, 8),
    "qwen3-32b-tp2": Model(64, 4, 128, 32),
    "llama3-1b": Model(16, 8, 64, 32),
    "deepseek-v3-mla": Model(61, 0, 576, 128),
}


@attrs.frozen
class Case:
    """One point of the benchmark.

    Attributes:
        model: a name in ``MODELS``.
        requests: requests of the batch.
        drafts: draft rows per request; one settled row comes on top.
        accepted: share of the draft rows that is kept.
        layers: layers, where not the model's own number.
    """

    model: str
    requests: int
    drafts: int
    accepted: float
    layers: int | None = None

    @property
    def shape(self) -> Model:
        """The model, with as many layers as the case wants."""
        model = MODELS[self.model]
        return model if self.layers is None else attrs.evolve(model, layers=self.layers)

    @property
    def rows(self) -> int:
        """Rows of the window."""
        return self.requests * (self.drafts + 1)
