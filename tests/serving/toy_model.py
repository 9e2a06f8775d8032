"""A toy language model: full attention, attention over a sliding window, and a short convolution.

``ToyModel.alone`` runs a whole text at once, without a cache: what engines are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY, DIM, WINDOW, LONGEST, WIDTH = 16, 8, 5, 64, 3
LAYERS = ("full", "ring", "state")


class ToyModel:
    """Random weights.

    Args:
        layers: which of ``LAYERS`` there are.
    """

    def __init__(self, layers=LAYERS) -> None:
        generator = torch.Generator().manual_seed(11)

        def weights(*shape):
            return torch.randn(shape, generator=generator)

        self.layers = layers
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._tokens, self._positions = weights(VOCABULARY, DIM), weights(LONGEST, DIM)
        self._qkv = {name: weights(DIM, 3 * DIM) / 2 for name in ("full", "ring")}
        self._taps, self._out = weights(WIDTH, DIM), weights(DIM, VOCABULARY)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._tokens[tokens] + self._positions[positions]

    def query_key_value(self, layer: str, x: Tensor) -> tuple[Tensor, ...]:
        """Three tensors ``[num_rows, 1, DIM]``."""
        return tuple(part.unsqueeze(1) for part in (x @ self._qkv[layer]).tanh().split(DIM, -1))

    def convolve(self, past: Tensor, x: Tensor) -> Tensor:
        """Add to each row its convolution with the rows before it, ``[WIDTH - 1, DIM]`` first."""
        rows = torch.cat([past, x])
        return x + sum(tap * rows[i : i + len(x)] for i, tap in enumerate(self._taps)).tanh()

    def logits(self, x: Tensor) -> Tensor:
        return x @ self._out

    def alone(self, tokens: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits of each position, and by layer the rows that a cache has of them.

        Of attention ``[2, num_rows, DIM]``, of the convolution its inputs.
        """
        position = torch.arange(len(tokens))
        x, rows = self.embed(torch.tensor(tokens), position), {}
        for layer in self.layers:
            if layer == "state":
                rows[layer] = x
                x = self.convolve(torch.zeros(WIDTH - 1, DIM), x)
                continue
            query, key, value = (part[:, 0] for part in self.query_key_value(layer, x))
            rows[layer] = torch.stack([key, value])
            back = position[:, None] - position
            seen = (back >= 0) & (back < (WINDOW if layer == "ring" else LONGEST))
            scores = (query @ key.T / DIM**0.5).masked_fill(~seen, float("-inf"))
            x = x + scores.softmax(-1) @ value
        return self.logits(x), rows

    def text(self, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Decode greedily, token by token, up to a length."""
        tokens = self._texts.setdefault(prompt, list(prompt))
        while len(tokens) < length:
            tokens.append(int(self.alone(tokens)[0][-1].argmax()))
        return tuple(tokens[:length])
