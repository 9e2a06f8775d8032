"""What the attention kernels share: a step of online softmax, merging, and the window's own rows.

Rows lie request by request; ``starts`` says where. Strides are in elements, every offset is
computed in int64, heads and rows are masked, padding is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """One step of online softmax: keys ``[N, D]`` and values ``[N, DV]`` into ``out [M, DV]``.

    ``top`` and ``total`` are the running maximum and sum, float32 ``[M]``; where ``allowed``
    ``[M, N]`` is false a key does not exist.
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
    """Values ``[N, DV]`` without what is not finite, and NaN in ``out [M, DV]`` where it is seen.

    For tiles in which some queries see a key and others do not: a weight of 0 takes out
    everything but NaN and infinities.
    """
    finite = tl.abs(v) < float("inf")
    clean = tl.where(finite, v, 0.0)
    spoilt = 1 - finite.to(tl.int32)
    if tl.max(tl.max(spoilt, axis=1), axis=0) > 0:
        seen = tl.dot(allowed.to(tl.float16), spoilt.to(tl.float16))
        out = tl.where(seen > 0.0, float("nan"), out)
    return clean, out


@triton.jit
def blend(
    top: tl.tensor, total: tl.tensor, out: tl.tensor, lse: tl.tensor, part: tl.tensor
) -> tl.tensor:
    """Merge a finished partial result, ``part [M, DV]`` with ``lse [M]``, into a running one.

    An infinite ``lse`` of either sign says that the part saw no key.
    """
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    weighed = tl.where((lse == float("-inf"))[:, None], 0.0, part.to(tl.float32))
    higher = tl.maximum(top, lse)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(top - safe)
    weight = tl.exp(lse - safe)
    total = total * shrink + weight
    return higher, total, out * shrink[:, None] + weighed * weight[:, None]


@triton.jit
def settled_slots(
    slots: tl.tensor, position: tl.tensor, rows: tl.tensor, mine: tl.tensor, limit: tl.tensor
) -> tl.tensor:
    """Where settled rows go, and which of ``mine`` do: those with slots in ``[0, limit)``."""
    slot = tl.load(slots + rows, mask=mine, other=-1)
    settled = tl.load(position + rows, mask=mine, other=0) < 0
    wanted = mine & settled & (slot >= 0) & (slot < limit)
    return tl.where(wanted, slot, 0).to(tl.int64), wanted


@triton.jit
def keep_rows(
    words: tl.tensor,
    cache: tl.tensor,
    buffer: tl.tensor,
    slot: tl.tensor,
    wanted: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    head: tl.tensor,
    c_block: tl.tensor,
    c_slot: tl.tensor,
    c_head: tl.tensor,
    WRITE: tl.constexpr,
    COPY: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Write one head of rows to the cache, where ``wanted``, and to the staging buffer.

    Slots of distinct rows are distinct (the window guarantees it), and each head is one program's
    alone.
    """
    if WRITE:
        place = (slot // BLOCK_SIZE) * c_block + (slot % BLOCK_SIZE) * c_slot + head * c_head
        mask = wanted[:, None] & (columns < WIDTH)[None, :]
        tl.store(cache + place[:, None] + columns[None, :], words, mask=mask)
    if COPY:
        place = (rows * HEADS + head) * WIDTH
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        tl.store(buffer + place[:, None] + columns[None, :], words, mask=mask)


@triton.jit
def fold_window(
    q: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_buffer: tl.tensor,
    value_buffer: tl.tensor,
    slots: tl.tensor,
    position: tl.tensor,
    order: tl.tensor,
    visible: tl.tensor,
    first: tl.tensor,
    base: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    real: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    dv: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    ks_row: tl.tensor,
    ks_head: tl.tensor,
    vs_row: tl.tensor,
    vs_head: tl.tensor,
    kc_block: tl.tensor,
    kc_slot: tl.tensor,
    kc_head: tl.tensor,
    vc_block: tl.tensor,
    vc_slot: tl.tensor,
    vc_head: tl.tensor,
    limit: tl.tensor,
    longest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    WRITE: tl.constexpr,
    COPY: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    ONCE: tl.constexpr,
) -> tl.tensor:
    """Fold the fresh rows of a request into ``out``, and keep those from ``base`` on, if asked to.

    Pointers and lengths are those of ``window_attention``; ``row`` ``[M]`` are the queries' rows
    within the request, of which ``BLOCK_R`` begin at ``base``. ``ONCE``: no request has more rows
    than ``BLOCK_N``.
    """
    end = tl.minimum(count, base + BLOCK_R)
    if ONCE:
        end = BLOCK_N
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < count
        k_at = ((first + n) * k_row + head * k_head)[:, None] + (d * K_STEP)[None, :]
        v_at = ((first + n) * v_row + head * v_head)[:, None] + (dv * V_STEP)[None, :]
        k = tl.load(key + k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(value + v_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        mine = inside & (n >= base) & (n < base + BLOCK_R)
        slot, wanted = n, mine
        if WRITE:  # asked for at once: their way from memory overlaps with the products
            slot, wanted = settled_slots(slots, position, first + n, mine, limit)
        allowed = inside[None, :] & real[:, None] & (n[None, :] <= row[:, None])
        if TREE:
            seen = visible + (first + row)[:, None] * longest + n[None, :]
            allowed = allowed & (tl.load(seen, mask=allowed, other=0) != 0)
        if SLIDING and TREE:
            row_at = tl.load(order + first + row, mask=real, other=0)
            key_at = tl.load(order + first + n, mask=inside, other=0)
            allowed = allowed & (key_at[None, :] > row_at[:, None] - window)
        elif SLIDING:
            allowed = allowed & (n[None, :] > row[:, None] - window)
        numbers_k = k.to(tl.float32)
        numbers_v = v.to(tl.float32)
        if K_SCALES < 0:
            ks_at = k_scale + (first + n) * ks_row + head * ks_head
            numbers_k = numbers_k * tl.load(ks_at, mask=inside, other=0.0)[:, None]
        if V_SCALES < 0:
            vs_at = v_scale + (first + n) * vs_row + head * vs_head
            numbers_v = numbers_v * tl.load(vs_at, mask=inside, other=0.0)[:, None]
        numbers_v, out = without_nan(numbers_v, allowed, out)
        numbers_k = numbers_k.to(COMPUTE)
        numbers_v = numbers_v.to(COMPUTE)
        top, total, out = fold(
            q, numbers_k, numbers_v, allowed, top, total, out, scale, cap, CAPPED
        )  # fmt: skip
        if WRITE or COPY:
            keep_rows(
                k, key_cache, key_buffer, slot, wanted, first + n, mine, d, head,
                kc_block, kc_slot, kc_head, WRITE, COPY, HEADS, D, BLOCK_SIZE,
            )  # fmt: skip
            keep_rows(
                v, value_cache, value_buffer, slot, wanted, first + n, mine, dv, head,
                vc_block, vc_slot, vc_head, WRITE, COPY, HEADS, DV, BLOCK_SIZE,
            )  # fmt: skip
    return top, total, out
