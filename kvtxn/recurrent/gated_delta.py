"""Gated delta net and Kimi delta attention: states that forget, correct and write.

The algorithm is that of Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with
Delta Rule" (2024), in the recurrent form of its section 3; with a decay per channel it is
Kimi delta attention (Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture",
2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import attrs
import torch
from torch import Tensor

from ..draft_tree import Parents
from ..recurrence import (
    FLOATS,
    Paths,
    RowPart,
    by_request,
    check_heads,
    check_rows,
    check_state,
    one_of,
    positive,
    states_of,
)
from .rank_one import RankOne, take_in

#: Added to the sum of squares before a key or query is normalised.
_NORM_EPSILON: Final = 1e-6


@attrs.frozen
class GatedDelta(RankOne):
    """Describe the state ``[num_states, num_heads, value_size, key_size]`` of a gated delta net.

    A row is staged as three tensors, in this order:

    - key, ``[num_rows, key_heads, key_size]``: normalised, in ``key_dtype``;
    - value, float32 ``[num_rows, num_heads, value_size]``: corrected, which is
      ``beta * (value - state @ key)`` with the state as it was before the row, decayed;
    - decay, float32 ``[num_rows, num_heads]``, the factor ``exp(g)`` and not its logarithm; with
      ``decay="channel"`` ``[num_rows, num_heads, key_size]``.

    ``outputs`` computes them. A corrected value depends on the rows before it, so only a prefix
    of a request's drafts, or a path of a tree, can be accepted; a mask with gaps is wrong, because
    the corrected values would depend on rows that are not kept.

    Attributes:
        key_heads: heads of keys and queries; divides the heads of the state.
        decay: ``"head"``: one number per head; ``"channel"``: one per head and key channel.
        key_dtype: the dtype in which keys wait for the commit.

    Raises:
        LayerError: an attribute does not have one of these values.
    """

    key_heads: int = attrs.field(validator=positive)
    decay: Literal["head", "channel"] = attrs.field(
        default="head", validator=one_of("head", "channel")
    )
    key_dtype: torch.dtype = attrs.field(default=torch.float32, validator=one_of(*FLOATS))

    def check(self, layer: str, state: Tensor) -> None:
        """Refuse a state of another rank or dtype, or that ``key_heads`` do not divide.

        Raises:
            LayerError: it is another one.
        """
        check_state(layer, state, "[num_states, num_heads, value_size, key_size]", FLOATS)
        check_heads(layer, "key_heads", self.key_heads, state.shape[1])

    def given(self, state: Tensor) -> tuple[RowPart, ...]:
        """List key, corrected value and decay."""
        per_channel = self.decay == "channel"
        return self.parts_of(state, self.key_heads, self.key_dtype, per_channel=per_channel)

    def outputs(
        self,
        state: Tensor,
        slots: Tensor | Sequence[int],
        lengths: Sequence[int],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        decay: Tensor,
        *,
        scale: float | None = None,
        normalise: bool = True,
        parents: Parents | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Compute the outputs of a window's rows, and the tensors that the rows stage.

        A row sees its request's state with all rows of the window up to itself taken in. Nothing
        is written. This is the reference: one row after another, in float32, with sums over
        the key dimension in torch's order; a kernel with another order of sums agrees within
        1e-5 of the largest output.

        Args:
            state: ``[num_states, num_heads, value_size, key_size]``, any strides.
            slots: int ``[num_requests]``, the state of each request; -1 starts from zeros.
            lengths: rows of each request, settled and draft; they lie request by request.
            query: ``[num_rows, key_heads, key_size]``.
            key: ``[num_rows, key_heads, key_size]``.
            value: ``[num_rows, num_heads, value_size]``.
            beta: ``[num_rows, num_heads]``, the strength of a row's write, after its sigmoid.
            decay: the factor ``exp(g)``, in the shape of a staged decay.
            scale: factor of the queries; None is 1 / sqrt(key_size).
            normalise: divide each query and key by its Euclidean length first.
            parents: the parent of each draft row, if drafts are trees: as ``tree`` of
                ``TransactionManager.window``, with one draft row for each parent. A row then sees
                the settled rows and its own path. Waits for the device.

        Returns:
            Outputs, float32 ``[num_rows, num_heads, value_size]``, and the tensors to stage: key,
            corrected value, decay.

        Raises:
            LayerError: the state is not a gated delta net's, the rows do not fit it or the lengths,
                or the slots are not the requests'.
            TreeError: the trees are malformed, or do not fit the lengths.
        """
        self.check("outputs", state)
        num_heads, value_size, key_size = state.shape[1:]
        per_channel = (key_size,) if self.decay == "channel" else ()
        lengths = check_rows(
            lengths,
            query=(query, (self.key_heads, key_size)),
            key=(key, (self.key_heads, key_size)),
            value=(value, (num_heads, value_size)),
            beta=(beta, (num_heads,)),
            decay=(decay, (num_heads, *per_channel)),
        )
        if parents is not None:
            paths = Paths.of(slots, lengths, parents)
            taken = (paths.take(part) for part in (query, key, value, beta, decay))
            outputs, (k, v, e) = self.outputs(
                state, paths.slots, paths.lengths, *taken, scale=scale, normalise=normalise
            )
            first = paths.first
            return outputs[first], (k[first], v[first], e[first])
        factor = state.shape[-1] ** -0.5 if scale is None else scale
        queries, keys = query.float(), key.float()
        if normalise:
            queries, keys = _unit(queries), _unit(keys)
        keys = keys.to(self.key_dtype).float()  # rounded like the keys that wait for the commit
        rows = (queries * factor, keys, value.float(), beta.float(), decay.float())
        each = zip(*(by_request(part, lengths) for part in rows), strict=True)
        per_key = state.shape[1] // self.key_heads
        outputs, corrected = torch.empty_like(rows[2]), torch.empty_like(rows[2])
        number = 0
        for now, parts in zip(states_of(state, slots, lengths, torch.float32), each, strict=True):
            for q, k, v, b, e in zip(*parts, strict=True):
                decayed = now * (e.unsqueeze(-2) if e.ndim == 2 else e[:, None, None])
                wide = k.repeat_interleave(per_key, dim=0).unsqueeze(-2)
                fresh = b.unsqueeze(-1) * (v - (decayed * wide).sum(-1))
                now = take_in(now, k, fresh, e)
                seen = q.repeat_interleave(per_key, dim=0).unsqueeze(-2)
                outputs[number], corrected[number] = (now * seen).sum(-1), fresh
                number += 1
        return outputs, (keys.to(self.key_dtype), corrected, rows[4])


def _unit(vectors: Tensor) -> Tensor:
    """Divide the vectors along the last dimension by their Euclidean length, zeros by no zero."""
    squares = (vectors * vectors).sum(-1, keepdim=True)
    return vectors * torch.rsqrt(squares + _NORM_EPSILON)
