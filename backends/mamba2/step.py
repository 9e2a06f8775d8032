"""``verify_mamba2``: a kernel on a GPU, torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from ..gated_delta.layers import DeltaRows, check_rows, check_state
from . import reference


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
    *,
    longest: int | None = None,
) -> None:
    """Compute the outputs of a verify step's rows in one layer; write no state; stage the rows.

    A row sees its request's state with the request's rows up to itself taken in. Sums are in
    float32. The outputs of a request without a state are zeros; ``kept`` is written for the rows
    of requests that have one, and is left alone elsewhere.

    Args:
        x: ``[num_rows, heads, head_size]``, after the convolution and its activation; rows any
            distance apart, a row contiguous.
        dt: ``[num_rows, heads]``, strides like ``x``'s, before its bias and softplus; the decay is
            ``exp(softplus(dt + dt_bias) * A)``.
        B: ``[num_rows, groups, state_size]``, strides like ``x``'s.
        C: like ``B``.
        A: ``[heads]``, negative.
        D: ``[heads]``, the factor of x in the output.
        dt_bias: ``[heads]``.
        state: ``[slots, heads, head_size, state_size]``, float32, bfloat16 or float16; one slot is
            contiguous, the distance between slots is any.
        sources: int32 ``[num_requests]``, any stride: the slot of each request; 0 or less is none.
        starts: int32 ``[num_requests + 1]``, the first row of each request, and the end.
        out: ``[num_rows, heads, head_size]``, rows any distance apart, a row contiguous.
        kept: room for the rows, at the same numbers: of ``groups`` key heads, ``heads`` heads, and
            keys and values as long as ``state_size`` and ``head_size``.
        longest: the most rows that a request may have, at most 16 on a GPU; the fewer, the faster.
            Rows beyond it are not computed. None is the number of rows of ``out``.

    Raises:
        LayerError: the state, the rows or the staged rows do not fit, or a request may have too
            many rows.
    """
    check_state("verify_mamba2", state, kept)
    rows = (x, dt, B, C, A, D, dt_bias)
    _, heads, head_size, state_size = state.shape
    values, keys = (heads, head_size), (kept.key.shape[1], state_size)
    sizes = values, (heads,), keys, keys, (), (), (), values
    names = "x", "dt", "B", "C", "A", "D", "dt_bias", "out"
    parts = dict(zip(names, zip((*rows, out), sizes, strict=True), strict=True))
    check_rows("verify_mamba2", heads, parts)
    where = (state, sources, starts, out, kept)
    if state.is_cuda:
        from .launch import launch_verify

        launch_verify(rows, *where, longest=longest)
    else:
        reference.verify_mamba2(*rows, *where)
