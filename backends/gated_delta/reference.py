"""Verify and commit of gated delta nets in torch: the specification of the kernels.

It computes the same as vLLM's ``fused_sigmoid_gating_delta_rule_update``: ``g = -exp(A_log) *
softplus(a + dt_bias)``, ``beta = sigmoid(b)``, all in float32. These functions read numbers on the
host, so no CUDA graph can capture them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...recurrent import GatedDelta
from ...recurrent.rank_one import take_in
from .layers import DeltaLayers, DeltaRows

#: Beyond this number softplus is the number itself.
THRESHOLD: Final = 20.0


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the strength ``sigmoid(b)`` and the decay ``exp(g)``; float32 ``[rows, heads]``."""
    x = a.float() + dt_bias.float()
    softplus = torch.where(x <= THRESHOLD, torch.log(1 + torch.exp(x)), x)
    return torch.sigmoid(b.float()), torch.exp(-torch.exp(A_log.float()) * softplus)


def verify_gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sources: Tensor,
    starts: Tensor,
    out: Tensor,
    kept: DeltaRows,
    *,
    scale: float,
    normalise: bool = True,
) -> None:
    """Compute the outputs of all rows, and stage what a commit will need, request by request.

    It has the arguments and effects of ``step.verify_gated_delta``, but for ``longest``. It checks
    nothing.
    """
    ends = starts.tolist()
    recurrence = GatedDelta(key.shape[1])
    for number, source in enumerate(sources.tolist()):
        rows = slice(ends[number], ends[number + 1])
        length = rows.stop - rows.start
        if source <= 0 or length <= 0:
            continue
        beta, decay = gates(a[rows], b[rows], A_log, dt_bias)
        outputs, staged = recurrence.outputs(
            state,
            [source],
            [length],
            query[rows],
            key[rows],
            value[rows],
            beta,
            decay,
            scale=scale,
            normalise=normalise,
        )
        out[rows] = outputs.to(out.dtype)
        for target, made in zip((kept.key, kept.corrected, kept.decay), staged, strict=True):
            target[rows] = made


def advance_gated_delta(
    layers: DeltaLayers,
    sources: Tensor,
    count: Tensor,
    starts: Tensor,
    boundary: Tensor | None = None,
    snapshots: Tensor | None = None,
) -> None:
    """Take the kept rows of each request into its state, one after another, on the host.

    It has the arguments and effects of ``step.advance_gated_delta``, but no ``longest``: it checks
    nothing, and takes any number of rows.
    """
    ends, counts = starts.tolist(), count.tolist()
    until = counts if boundary is None else boundary.tolist()
    for state, rows, group in zip(layers.states, layers.rows, layers.groups, strict=True):
        slots = sources[group].tolist()
        others = [0] * len(slots) if snapshots is None else snapshots[group].tolist()
        for number, slot in enumerate(slots):
            first = ends[number]
            last = min(first + counts[number], ends[number + 1])
            if slot <= 0 or last <= first:
                continue
            now = state[slot].float()
            for row in range(first, last):
                now = take_in(now, rows.key[row], rows.corrected[row], rows.decay[row])
                if others[number] > 0 and row + 1 - first == until[number]:
                    state[others[number]] = now.to(state.dtype)
            state[slot] = now.to(state.dtype)
