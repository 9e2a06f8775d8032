"""Attention of a window's rows: over the paged prefix, over the fresh rows, and merged.

Rows lie request by request; ``starts`` says where. One program handles one KV head of one
request (or a slice of it) with all query heads that share it. Strides are in elements, every
offset is computed in int64, heads and rows are masked, padding is never read.
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


@triton.jit(do_not_specialize=["window", "ring", "table_stride", "num_blocks"])
def paged_partial(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    q_row: tl.int64,
    q_head: tl.int64,
    k_block: tl.int64,
    k_slot: tl.int64,
    k_head: tl.int64,
    v_block: tl.int64,
    v_slot: tl.int64,
    v_head: tl.int64,
    ks_block: tl.int64,
    ks_slot: tl.int64,
    ks_head: tl.int64,
    vs_block: tl.int64,
    vs_slot: tl.int64,
    vs_head: tl.int64,
    table_stride: tl.int64,
    num_blocks: tl.int64,
    num_rows: tl.int64,
    scale: tl.float32,
    cap: tl.float32,
    window: tl.int32,
    ring: tl.int32,
    FRESH: tl.constexpr,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    RING: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COMPUTE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Attention over rows that are in the cache, one slice of them per program.

    Grid: (requests, KV heads, ``SPLITS`` x row blocks). Writes ``partial_out`` float32
    ``[SPLITS, num_rows, HEADS x GROUP, DV]`` and ``partial_lse`` float32
    ``[SPLITS, num_rows, HEADS x GROUP]``; a row that sees no key gets 0 and -inf.

    Pointers and lengths:
        query: ``[num_rows, HEADS x GROUP, D]``, innermost contiguous.
        key_cache: ``[num_blocks, BLOCK_SIZE, HEADS, D]``, any strides.
        value_cache: ``[num_blocks, BLOCK_SIZE, HEADS, DV]``, any strides.
        k_scale: float32 ``[K_SCALES]``, one or ``HEADS``; stored x scale = value. If negative,
            float32 ``[num_blocks, BLOCK_SIZE, HEADS]``, any strides; ``COMPUTE`` is float32 then.
        v_scale: likewise.
        block_table: int ``[requests, max_blocks]``; entries past the length may be anything.
        seq_lens: int ``[requests]``, the window's rows included.
        starts: int32 ``[requests + 1]``, first row of each request.
        order: int64 ``[num_rows]``, each row's place in its sequence, from the request's first
            row on; if ``TREE``, else rows follow each other. ``TREE`` comes with ``FRESH``.
        RING: position p lies at place ``p % ring`` of the request's blocks; what is evicted is
            beyond the sliding window, which is set.
        FRESH: the window's own rows are not in the cache and are left out.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2) % SPLITS
    base = (tl.program_id(2) // SPLITS) * BLOCK_R
    first = tl.load(starts + request).to(tl.int64)
    count = tl.load(starts + request + 1).to(tl.int64) - first
    if base < count:
        length = tl.load(seq_lens + request).to(tl.int64)
        before = length - count
        m = tl.arange(0, BLOCK_M)
        row = base + m // GROUP
        q_head_index = head * GROUP + m % GROUP
        real = (m < BLOCK_R * GROUP) & (row < count)
        position = before + row
        if TREE:
            position = before + tl.load(order + first + row, mask=real, other=0)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        q_at = query + ((first + row) * q_row + q_head_index * q_head)[:, None] + d[None, :]
        q = tl.load(q_at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
        end = before
        if not FRESH:
            end = tl.minimum(length, before + base + BLOCK_R)
        begin = end * 0
        if SLIDING:
            begin = tl.maximum(begin, before + (0 if TREE else base) - window + 1)
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), SPLITS), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
        k_scaled = scale
        if K_SCALES > 0:
            k_scaled = scale * tl.load(k_scale + (head if K_SCALES > 1 else 0))
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        for start in range(begin, end, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            inside = at < end
            place = at % ring if RING else at
            entry = block_table + request * table_stride + place // BLOCK_SIZE
            block = tl.load(entry, mask=inside, other=0).to(tl.int64)
            inside = inside & (block >= 0) & (block < num_blocks)
            slot = place % BLOCK_SIZE
            k_at = (block * k_block + slot * k_slot + head * k_head)[:, None] + (d * K_STEP)[
                None, :
            ]
            v_at = (block * v_block + slot * v_slot + head * v_head)[:, None] + (dv * V_STEP)[
                None, :
            ]
            k = tl.load(key_cache + k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(value_cache + v_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            k = k.to(tl.float32)
            v = v.to(tl.float32)
            if K_SCALES < 0:
                ks_at = k_scale + block * ks_block + slot * ks_slot + head * ks_head
                k = k * tl.load(ks_at, mask=inside, other=0.0)[:, None]
            if V_SCALES < 0:
                vs_at = v_scale + block * vs_block + slot * vs_slot + head * vs_head
                v = v * tl.load(vs_at, mask=inside, other=0.0)[:, None]
            allowed = inside[None, :] & real[:, None]
            if not FRESH:
                allowed = allowed & (at[None, :] <= position[:, None])
            if SLIDING:
                allowed = allowed & (at[None, :] > position[:, None] - window)
            if SLIDING or not FRESH:
                v, out = without_nan(v, allowed, out)
            top, total, out = fold(
                q,
                k.to(COMPUTE),
                v.to(COMPUTE),
                allowed,
                top,
                total,
                out,
                k_scaled,
                cap,
                CAPPED,
            )
        some = tl.where(total == 0.0, 1.0, total)
        out = out / some[:, None]
        if V_SCALES > 0:
            out = out * tl.load(v_scale + (head if V_SCALES > 1 else 0))
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log(some))
        place = (split * num_rows + first + row) * (HEADS * GROUP) + q_head_index
        tl.store(partial_lse + place, lse, mask=real)
        tl.store(
            partial_out + place[:, None] * DV + dv[None, :],
            out,
            mask=real[:, None] & (dv < DV)[None, :],
        )
