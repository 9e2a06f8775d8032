"""Steps of attention that several kernels or loops share.

Memory contract: strides are in elements, every offset is computed in int64, and rows and columns
are masked, so that padding is never read. Nothing here writes memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    base: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load one head of some rows, ``[N, BLOCK]``; 0 for rows and columns that do not exist.

    Args:
        base: pointer to the first row.
        at: int64 ``[N]``, the offset of each row from ``base``.
        inside: bool ``[N]``, rows to load.
        columns: int32 ``[BLOCK]``, 0, 1, ...
        STEP: elements from one number of a row to the next.
        WIDTH: numbers per row.
    """
    places = base + at[:, None] + (columns * STEP)[None, :]
    return tl.load(places, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def as_numbers(
    stored: tl.tensor,
    scale: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    SCALES: tl.constexpr,
) -> tl.tensor:
    """Turn stored rows ``[N, BLOCK]`` into float32, times the rows' own scales if there are any.

    Args:
        stored: the rows.
        scale: pointer to float32 scales; read if ``SCALES`` is negative.
        at: int64 ``[N]``, the offset of each row's scale.
        inside: bool ``[N]``, rows that exist.
        SCALES: negative if each row has a scale of its own.
    """
    numbers = stored.to(tl.float32)
    if SCALES < 0:
        numbers = numbers * tl.load(scale + at, mask=inside, other=0.0)[:, None]
    return numbers


@triton.jit
def in_window(
    allowed: tl.tensor,
    key_at: tl.tensor,
    row_at: tl.tensor,
    window: tl.tensor,
    SLIDING: tl.constexpr,
) -> tl.tensor:
    """Take keys out of ``allowed`` ``[M, N]`` that lie ``window`` or more positions back.

    ``key_at`` ``[N]`` and ``row_at`` ``[M]`` are positions; nothing changes unless ``SLIDING``.
    """
    if SLIDING:
        allowed = allowed & (key_at[None, :] > row_at[:, None] - window)
    return allowed


@triton.jit
def fold(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    allowed: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
) -> tl.tensor:
    """Take one step of online softmax: keys ``[N, D]`` and values ``[N, DV]`` into ``out [M, DV]``.

    ``top`` and ``total`` are the running maximum and sum, float32 ``[M]``. Where ``allowed``
    ``[M, N]`` is false, the key does not exist for that query. Returns the new three.

    Source: Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
    scores = tl.where(allowed, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(top - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, out


@triton.jit
def without_nan(v: tl.tensor, allowed: tl.tensor, out: tl.tensor) -> tl.tensor:
    """Set infinities and NaN in the values ``v`` ``[N, DV]`` to 0, and ``out`` to NaN for them.

    A tile may hold keys that some queries see and others do not. An unseen key has weight 0, but
    0 times infinity or NaN is NaN. So such values become 0, and each row of ``out`` ``[M, DV]``
    whose query sees such a key becomes NaN. Returns the new ``v`` and the new ``out``.
    """
    finite = tl.abs(v) < float("inf")
    clean = tl.where(finite, v, 0.0)
    spoilt = 1 - finite.to(tl.int32)
    if tl.max(tl.max(spoilt, axis=1), axis=0) > 0:
        seen = tl.dot(allowed.to(tl.float16), spoilt.to(tl.float16))
        out = tl.where(seen > 0.0, float("nan"), out)
    return clean, out


@triton.jit
def fold_fresh(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    keys: tl.tuple,
    values: tl.tuple,
    order: tl.tensor,
    visible: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    base: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    dv: tl.tensor,
    longest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """Fold a request's fresh rows into ``out``; returns ``top``, ``total`` and ``out``.

    A query reads the fresh rows up to its own; of a tree only the ones ``visible`` to it;
    with ``SLIDING`` only those inside the window. NaN in values that no query of the tile reads
    counts as 0.

    Pointers, numbers and constants are those of ``paged_attention``, but for these:

    - ``q``: ``[M, D]``, the queries; ``row``: int32 ``[M]``, their rows within the request, from
      ``base`` on ``BLOCK_R`` of them; ``real``: bool ``[M]``, queries that exist.
    - ``top``, ``total``: float32 ``[M]``, running maximum and sum; ``out``: float32 ``[M, DV]``.
    - ``keys``: ``(rows, row stride, head stride, scales, row stride, head stride)``; ``values``:
      the same six. ``K_STEP``, ``V_STEP``: from one number of a key or value to the next.
    - ``first``: int64, first row of the request; ``count``: int32, its rows, 0 if there is nothing
      to fold; ``head``: the KV head; ``d``, ``dv``: int32, columns of keys and of values.
    - ``BLOCK_N``: rows per step; ``COMPUTE``: dtype of products.
    """
    k_rows, k_row, k_head, k_scale, ks_row, ks_head = keys
    v_rows, v_row, v_head, v_scale, vs_row, vs_head = values
    for start in range(0, tl.minimum(count, base + BLOCK_R), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < count
        at = first + n
        k = load_rows(k_rows, at * k_row + head * k_head, inside, d, K_STEP, D)
        v = load_rows(v_rows, at * v_row + head * v_head, inside, dv, V_STEP, DV)
        allowed = inside[None, :] & real[:, None] & (n[None, :] <= row[:, None])
        if TREE:
            seen = visible + (first + row)[:, None] * longest + n[None, :]
            allowed = allowed & (tl.load(seen, mask=allowed, other=0) != 0)
        if SLIDING and TREE:
            row_at = tl.load(order + first + row, mask=real, other=0)
            key_at = tl.load(order + at, mask=inside, other=0)
            allowed = in_window(allowed, key_at, row_at, window, SLIDING)
        else:
            allowed = in_window(allowed, n, row, window, SLIDING)
        k = as_numbers(k, k_scale, at * ks_row + head * ks_head, inside, K_SCALES)
        v = as_numbers(v, v_scale, at * vs_row + head * vs_head, inside, V_SCALES)
        v, out = without_nan(v, allowed, out)
        k = k.to(COMPUTE)
        v = v.to(COMPUTE)
        top, total, out = fold(q, k, v, allowed, top, total, out, scale, cap, CAPPED)
    return top, total, out
