"""``DeltaRows``: what the rows of a verify step leave for the commit, in one gated delta net."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class DeltaRows:
    """The staged rows of one layer, float32 and contiguous.

    With them a commit needs no sum over keys: ``state = state * decay + corrected (x) key``.

    Attributes:
        key: ``[num_rows, key_heads, key_size]``, normalised as the layer normalises its keys.
        corrected: ``[num_rows, heads, value_size]``, ``beta * (value - state @ key)`` with the
            decayed state before the row.
        decay: ``[num_rows, heads]``, the factor ``exp(g)``.
    """

    key: Tensor
    corrected: Tensor
    decay: Tensor

    @classmethod
    def build(
        cls,
        rows: int,
        key_heads: int,
        heads: int,
        key_size: int,
        value_size: int,
        device: torch.device,
    ) -> DeltaRows:
        """Make room for the most rows of a step, filled with zeros."""
        sizes = (key_heads, key_size), (heads, value_size), (heads,)
        return cls(*(torch.zeros(rows, *size, device=device) for size in sizes))

    @staticmethod
    def row_bytes(key_heads: int, heads: int, key_size: int, value_size: int) -> int:
        """Return the bytes of one row of one layer."""
        return torch.float32.itemsize * (key_heads * key_size + heads * (value_size + 1))

    @property
    def num_rows(self) -> int:
        """Rows for which there is room."""
        return self.key.shape[0]
