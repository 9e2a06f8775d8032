"""Attention over the paged cache, the window's own rows included: one launch, or two.

Programs share a request's cached rows in slices; the last slice takes the fresh rows as well.
Where there is one slice only, that is all; else ``combine`` merges what the slices found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attention import fold, fold_window, without_nan


@triton.jit
def in_ring(at: tl.tensor, ring: tl.tensor, RING: tl.constexpr) -> tl.tensor:
    """Where positions lie among a request's slots."""
    return at % ring if RING else at


@triton.jit(
    do_not_specialize=[
        *("window", "ring", "table_stride", "num_blocks", "limit", "longest"),
        *("num_rows", "splits", "o_split"),
    ]
)
def paged_attention(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    fresh_k_scale: tl.tensor,
    fresh_v_scale: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    position: tl.tensor,
    order: tl.tensor,
    visible: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    q_row: tl.int64,
    q_head: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    fks_row: tl.int64,
    fks_head: tl.int64,
    fvs_row: tl.int64,
    fvs_head: tl.int64,
    kc_block: tl.int64,
    kc_slot: tl.int64,
    kc_head: tl.int64,
    vc_block: tl.int64,
    vc_slot: tl.int64,
    vc_head: tl.int64,
    ks_block: tl.int64,
    ks_slot: tl.int64,
    ks_head: tl.int64,
    vs_block: tl.int64,
    vs_slot: tl.int64,
    vs_head: tl.int64,
    o_split: tl.int64,
    o_row: tl.int64,
    o_head: tl.int64,
    table_stride: tl.int64,
    num_blocks: tl.int32,
    limit: tl.int64,
    num_rows: tl.int64,
    longest: tl.int32,
    splits: tl.int32,
    scale: tl.float32,
    cap: tl.float32,
    window: tl.int32,
    ring: tl.int32,
    FRESH: tl.constexpr,
    JOIN: tl.constexpr,
    WRITE: tl.constexpr,
    SHARED: tl.constexpr,
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
    KC_STEP: tl.constexpr,
    VC_STEP: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Attention over rows that are in the cache, one slice of them per program, and fresh ones.

    Grid: (requests, KV heads, ``splits`` x row blocks). A row that sees no key gets 0, and -inf
    for its log-sum-exp.

    Pointers and lengths:
        query: ``[num_rows, HEADS x GROUP, D]``, innermost contiguous.
        key: ``[num_rows, HEADS, D]``, as the cache stores it, any strides; if ``JOIN``.
        value: ``[num_rows, HEADS, DV]``, likewise.
        key_cache: ``[num_blocks, BLOCK_SIZE, HEADS, D]``, any strides; innermost contiguous if
            ``WRITE``.
        value_cache: ``[num_blocks, BLOCK_SIZE, HEADS, DV]``, likewise.
        k_scale: float32 ``[K_SCALES]``, one or ``HEADS``, unread if 0; stored x scale = value. If
            negative, float32 ``[num_blocks, BLOCK_SIZE, HEADS]``, any strides; ``COMPUTE`` is
            float32 then.
        v_scale: likewise.
        fresh_k_scale: float32 ``[num_rows, HEADS]``, any strides; if there are such in the cache.
        fresh_v_scale: likewise.
        block_table: int ``[requests, max_blocks]``; entries past the length may be anything. One
            that is outside the cache is never followed: the nearest block is read instead.
        seq_lens: int ``[requests]``, the window's rows included.
        starts: int32 ``[requests + 1]``, first row of each request.
        slots: int ``[num_rows]``, -1 is padding and is never written; if ``WRITE``.
        position: int64 ``[num_rows]``, -1 for settled rows; if ``WRITE``.
        order: int64 ``[num_rows]``, each row's place in its sequence, from the request's first
            row on; if ``TREE``, else rows follow each other. ``TREE`` comes with ``FRESH``.
        visible: uint8 ``[num_rows, longest]``, which rows of its request a row sees, none of them
            after it; if ``TREE``, else all up to itself.
        output: ``[splits, num_rows, HEADS x GROUP, DV]``, innermost contiguous; float32 if
            ``SHARED``.
        lse: float32 ``[splits, num_rows, HEADS x GROUP]``, contiguous; natural logarithm; if
            ``SHARED``.
        limit: slots of the cache.
        FRESH: the window's own rows are not in the cache and are left out ...
        JOIN: ... but are taken from ``key`` and ``value``, by each request's last slice.
        WRITE: settled rows are written to the cache; distinct rows have distinct slots (the
            window guarantees it), and no other program reads them there.
        SHARED: there is more to come for these rows, so that their log-sum-exp is written, too.
        RING: position p lies at place ``p % ring`` of the request's blocks; what is evicted is
            beyond the sliding window, which is set.
    """
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2) % splits
    base = (tl.program_id(2) // splits) * BLOCK_R
    first = tl.load(starts + request).to(tl.int64)
    count = tl.load(starts + request + 1) - first.to(tl.int32)
    if base < count:
        length = tl.load(seq_lens + request).to(tl.int32)
        before = length - count
        m = tl.arange(0, BLOCK_M)
        row = base + m // GROUP
        q_head_index = head * GROUP + m % GROUP
        real = (m < BLOCK_R * GROUP) & (row < count)
        place = before + row
        if TREE:
            place = before + tl.load(order + first + row, mask=real, other=0).to(tl.int32)
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
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
        k_scaled = scale
        if K_SCALES > 0:
            k_scaled = scale * tl.load(k_scale + (head if K_SCALES > 1 else 0))
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        blocks = block_table + request.to(tl.int64) * table_stride
        at = begin + tl.arange(0, BLOCK_N)
        block = tl.load(blocks + in_ring(at, ring, RING) // BLOCK_SIZE, mask=at < end, other=0)
        for start in range(begin, end, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            inside = at < end
            slot = in_ring(at, ring, RING) % BLOCK_SIZE
            block_now = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
            k_at = (block_now * kc_block + slot * kc_slot + head * kc_head)[:, None]
            v_at = (block_now * vc_block + slot * vc_slot + head * vc_head)[:, None]
            k_at = key_cache + k_at + (d * KC_STEP)[None, :]
            v_at = value_cache + v_at + (dv * VC_STEP)[None, :]
            k = tl.load(k_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_at, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            at += BLOCK_N  # the next step's blocks, so that no load waits for another
            block = tl.load(blocks + in_ring(at, ring, RING) // BLOCK_SIZE, mask=at < end, other=0)
            at -= BLOCK_N
            k = k.to(tl.float32)
            v = v.to(tl.float32)
            if K_SCALES < 0:
                ks_at = k_scale + block_now * ks_block + slot * ks_slot + head * ks_head
                k = k * tl.load(ks_at, mask=inside, other=0.0)[:, None]
            if V_SCALES < 0:
                vs_at = v_scale + block_now * vs_block + slot * vs_slot + head * vs_head
                v = v * tl.load(vs_at, mask=inside, other=0.0)[:, None]
            allowed = inside[None, :] & real[:, None]
            if not FRESH:
                allowed = allowed & (at[None, :] <= place[:, None])
            if SLIDING:
                allowed = allowed & (at[None, :] > place[:, None] - window)
            if SLIDING or not FRESH:
                v, out = without_nan(v, allowed, out)
            k = k.to(COMPUTE)
            v = v.to(COMPUTE)
            top, total, out = fold(q, k, v, allowed, top, total, out, k_scaled, cap, CAPPED)
        if JOIN:
            mine = tl.where(split == splits - 1, count, 0)  # the last slice alone
            top, total, out = fold_window(
                q, top, total, out, key, value, fresh_k_scale, fresh_v_scale,
                key_cache, value_cache, key, value, slots, position, order, visible, first, base,
                mine, row, real, head, d, dv, k_row, k_head, v_row, v_head,
                fks_row, fks_head, fvs_row, fvs_head, kc_block, kc_slot, kc_head, vc_block, vc_slot,
                vc_head, limit, longest, k_scaled, cap, window, TREE, CAPPED, SLIDING, WRITE, False,
                K_SCALES, V_SCALES, HEADS, D, DV, K_STEP, V_STEP, BLOCK_SIZE, BLOCK_R, BLOCK_W,
                COMPUTE, False,
            )  # fmt: skip
        some = tl.where(total == 0.0, 1.0, total)
        out = out / some[:, None]
        if V_SCALES > 0:
            out = out * tl.load(v_scale + (head if V_SCALES > 1 else 0))
        if SHARED:
            found = tl.where(total == 0.0, float("-inf"), top + tl.log(some))
            at = (split * num_rows + first + row) * (HEADS * GROUP) + q_head_index
            tl.store(lse + at, found, mask=real)
        at = split * o_split + (first + row) * o_row + q_head_index * o_head
        tl.store(
            output + at[:, None] + dv[None, :],
            out.to(output.dtype.element_ty),
            mask=real[:, None] & (dv < DV)[None, :],
        )


@triton.jit(do_not_specialize=["num_rows"])
def combine(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    output: tl.tensor,
    o_row: tl.int64,
    o_head: tl.int64,
    num_rows: tl.int64,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Merge finished slices by log-sum-exp.

    Grid: (rows, query heads).

    Pointers:
        partial_out: float32 ``[SPLITS, num_rows, HEADS, DV]``, contiguous.
        partial_lse: float32 ``[SPLITS, num_rows, HEADS]``, contiguous; -inf where a slice saw no
            key of this row, and then its output is 0.
        output: ``[num_rows, HEADS, DV]``, innermost contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    at = (tl.arange(0, SPLITS) * num_rows + row) * HEADS + head
    lse = tl.load(partial_lse + at)
    parts = partial_out + at[:, None] * DV + dv[None, :]
    part = tl.load(parts, mask=(lse == lse)[:, None] & (dv < DV)[None, :], other=0.0)
    top = tl.max(lse, axis=0)
    weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    out = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    place = output + row * o_row + head * o_head + dv
    tl.store(place, out.to(output.dtype.element_ty), mask=dv < DV)
