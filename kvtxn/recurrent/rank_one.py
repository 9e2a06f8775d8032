"""Rank-one recurrences: ``state = state * decay + value (x) key``, for each head and row.

Gated delta net, KDA and Mamba-2 all take a row in this way once its value, key and decay are
known; they differ in the way these three are computed. Commit needs only these three: it has no
sum over the key dimension, so the order of a sum cannot matter. Each product and each sum is
rounded to float32 by itself (no fused multiply-add): state * decay, value * key, and the sum of
the two. Every executor computes exactly these three numbers, and so leaves the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..recurrence import Recurrence, RowPart


def take_in(state: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Compute the states after one row each: ``state * decay + value (x) key`` in float32.

    Args:
        state: ``[..., num_heads, value_size, key_size]``.
        key: ``[..., num_key_heads, key_size]``; a key head serves as many heads of the state, one
            after another, as there are heads per key head.
        value: ``[..., num_heads, value_size]``.
        decay: ``[..., num_heads]``, or ``[..., num_heads, key_size]`` for one per channel.
    """
    per_key = state.shape[-3] // key.shape[-2]
    keys = key.repeat_interleave(per_key, dim=-2)
    factor = decay.unsqueeze(-2) if decay.ndim == value.ndim else decay[..., None, None]
    return state * factor + value.unsqueeze(-1) * keys.unsqueeze(-2)


class RankOne(Recurrence):
    """A recurrence whose rows wait as key, value and decay."""

    def parts_of(
        self, state: Tensor, key_heads: int, key_dtype: torch.dtype, *, per_channel: bool
    ) -> tuple[RowPart, ...]:
        """List key, value and decay of a row, for a state ``[num_states, heads, value, key]``."""
        heads, value_size, key_size = state.shape[1:]
        return (
            RowPart.of("key", key_dtype, key_heads, key_size),
            RowPart.of("value", torch.float32, heads, value_size),
            RowPart.of("decay", torch.float32, *([heads, key_size] if per_channel else [heads])),
        )

    def step(self, state: Tensor, row: Sequence[Tensor]) -> Tensor:
        """Take one row per request into its state, by the row's key, value and decay."""
        key, value, decay = row
        return take_in(state, key, value, decay)
