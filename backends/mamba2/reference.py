"""Verify of Mamba-2 layers in torch: the specification of the kernel.

It computes the same as vLLM's ``selective_state_update``: ``dt`` gets its bias and goes through
softplus, and the decay is ``exp(dt * A)``, all in float32. This function reads numbers on the host,
so no CUDA graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...recurrent import Mamba2
from ..gated_delta.layers import DeltaRows
from ..gated_delta.reference import THRESHOLD


def verify_mamba2(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    sources: Tensor,
    starts: Tensor,
    out: Tensor,
    kept: DeltaRows,
) -> None:
    """Compute the outputs of all rows, and stage what a commit will need, request by request.

    It has the arguments and effects of ``step.verify_mamba2``, but for ``longest``. It checks
    nothing.
    """
    ends = starts.tolist()
    recurrence = Mamba2(A.float(), B.shape[1], D.float())
    for number, source in enumerate(sources.tolist()):
        rows = slice(ends[number], ends[number + 1])
        length = rows.stop - rows.start
        if length <= 0:
            continue
        if source <= 0:
            out[rows] = 0
            continue
        wide = dt[rows].float() + dt_bias.float()
        steps = torch.where(wide <= THRESHOLD, torch.log(1 + torch.exp(wide)), wide)
        given = x[rows].float(), steps, B[rows].float(), C[rows].float()
        outputs, staged = recurrence.outputs(state, [source], [length], *given)
        out[rows] = outputs.to(out.dtype)
        parts = kept.key, kept.corrected, kept.decay
        for target, made in zip(parts, recurrence.prepare(staged), strict=True):
            target[rows] = made
