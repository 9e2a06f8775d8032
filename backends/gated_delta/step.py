"""``verify_gated_delta`` and ``advance_gated_delta``: kernels on a GPU, torch on a CPU."""

from __future__ import annotations

from torch import Tensor

from ...errors import LayerError
from . import reference
from .layers import DeltaLayers, DeltaRows, check_rows, check_state


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
    longest: int | None = None,
) -> None:
    """Compute the outputs of a verify step's rows in one layer; write no state; stage the rows.

    A row's output is computed from the state after its request's rows up to and including it. Sums
    are in float32. Only rows of requests that have a state are written in ``out`` and ``kept``.

    Args:
        query: ``[num_rows, key_heads, key_size]``; rows any distance apart, a row contiguous.
        key: like ``query``.
        value: ``[num_rows, heads, value_size]``, strides like ``query``'s.
        a: ``[num_rows, heads]``, strides like ``query``'s; the decay is ``exp(-exp(A_log) *
            softplus(a + dt_bias))``.
        b: like ``a``; a row is written with the strength ``sigmoid(b)``.
        A_log: ``[heads]``.
        dt_bias: ``[heads]``.
        state: ``[slots, heads, value_size, key_size]``, of a dtype of ``STATES``; one slot is
            contiguous, the distance between slots is any.
        sources: int32 ``[num_requests]``, any stride: the slot of each request; 0 or less for a
            request without a state.
        starts: int32 ``[num_requests + 1]``, the first row of each request, and the end.
        out: ``[num_rows, heads, value_size]``, rows any distance apart, a row contiguous.
        kept: room for the rows, at the same numbers.
        scale: factor of the queries.
        normalise: divide queries and keys by their Euclidean length.
        longest: the most rows that a request may have, at most 16 on a GPU; the fewer, the faster.
            Rows beyond it are not computed. None is the number of rows of ``out``.

    Raises:
        LayerError: the state, the rows or the staged rows do not fit, or a request may have too
            many rows.
    """
    check_state("verify_gated_delta", state, kept)
    rows = (query, key, value, a, b, A_log, dt_bias)
    _, heads, value_size, key_size = state.shape
    keys, values = (kept.key.shape[1], key_size), (heads, value_size)
    sizes = keys, keys, values, (heads,), (heads,), (), (), values
    names = "query", "key", "value", "a", "b", "A_log", "dt_bias", "out"
    parts = dict(zip(names, zip((*rows, out), sizes, strict=True), strict=True))
    check_rows("verify_gated_delta", heads, parts)
    where = (state, sources, starts, out, kept)
    if state.is_cuda:
        from .launch import launch_verify

        launch_verify(rows, *where, scale=scale, normalise=normalise, longest=longest)
    else:
        reference.verify_gated_delta(*rows, *where, scale=scale, normalise=normalise)


def advance_gated_delta(
    layers: DeltaLayers,
    sources: Tensor,
    count: Tensor,
    starts: Tensor,
    *,
    longest: int | None = None,
    boundary: Tensor | None = None,
    snapshots: Tensor | None = None,
) -> None:
    """Update the states of all layers by the kept rows of each request, in one launch.

    If no row of a request is kept, its state is neither read nor written. A state is rounded to its
    dtype once, after its last row. A compiler may fuse products and sums.

    If a request has a slot in ``snapshots`` and keeps at least ``boundary`` rows, the state after
    exactly ``boundary`` rows is also written to that slot.

    Args:
        layers: states and staged rows of all layers.
        sources: int32 ``[groups, num_requests]``, any strides: the slot of each request's state
            in the layers of each group; 0 or less for a request without a state. Requests have
            distinct slots.
        count: int32 ``[num_requests]``, contiguous, the rows that each request keeps, from its
            first row on: accepted drafts and the settled row before them; 0 leaves the state as it
            is. More than the request has count as all.
        starts: int32 ``[num_requests + 1]``, as for ``verify_gated_delta``.
        longest: the most rows that a request may have; None is the number of staged rows.
        boundary: int32 ``[num_requests]``, contiguous, 1 or more.
        snapshots: int32 ``[groups, num_requests]``, a group contiguous; 0 or less for no snapshot.
            No request has these slots as its own. Given with ``boundary`` or not at all.

    Raises:
        LayerError: a request may have too many rows, or a layer's group has no line of ``sources``.
    """
    if max(layers.groups) >= sources.shape[0]:
        raise LayerError(
            "advance_gated_delta",
            "a layer's group has no slots",
            expected=f"sources of {max(layers.groups) + 1} groups",
            got=list(sources.shape),
        )
    if layers.states[0].is_cuda:
        from .launch import launch_advance

        launch_advance(layers, sources, count, starts, boundary, snapshots, longest=longest)
    else:
        reference.advance_gated_delta(layers, sources, count, starts, boundary, snapshots)
