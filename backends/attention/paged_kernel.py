"""Attention over the paged cache, the window's own rows included: one launch, or two.

Programs share a request's cached rows in slices; the last slice also takes the fresh rows. If there
is one slice only, that is all; else ``combine`` merges the slices' results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .online_softmax import as_numbers, fold, fold_fresh, in_window, load_rows, without_nan


@triton.jit
def in_ring(at: tl.tensor, ring: tl.tensor, RING: tl.constexpr) -> tl.tensor:
    """Return each position's place among its request's slots.

    Modulo ``ring``, or itself unless ``RING``.
    """
    return at % ring if RING else at


@triton.jit(
    do_not_specialize=[
        *("window", "ring", "table_row", "num_blocks", "longest"),
        *("num_rows", "splits", "o_split"),
    ]
)
def paged_attention(
    query: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    visible: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    k_fresh: tl.tensor,
    k_fresh_scale: tl.tensor,
    k_cache: tl.tensor,
    k_scale: tl.tensor,
    v_fresh: tl.tensor,
    v_fresh_scale: tl.tensor,
    v_cache: tl.tensor,
    v_scale: tl.tensor,
    q_row: tl.int64,
    q_head: tl.int64,
    o_split: tl.int64,
    o_row: tl.int64,
    o_head: tl.int64,
    table_row: tl.int64,
    k_fresh_row: tl.int64,
    k_fresh_head: tl.int64,
    k_fresh_scale_row: tl.int64,
    k_fresh_scale_head: tl.int64,
    k_cache_block: tl.int64,
    k_cache_slot: tl.int64,
    k_cache_head: tl.int64,
    k_scale_block: tl.int64,
    k_scale_slot: tl.int64,
    k_scale_head: tl.int64,
    v_fresh_row: tl.int64,
    v_fresh_head: tl.int64,
    v_fresh_scale_row: tl.int64,
    v_fresh_scale_head: tl.int64,
    v_cache_block: tl.int64,
    v_cache_slot: tl.int64,
    v_cache_head: tl.int64,
    v_scale_block: tl.int64,
    v_scale_slot: tl.int64,
    v_scale_head: tl.int64,
    num_blocks: tl.int32,
    num_rows: tl.int64,
    longest: tl.int32,
    splits: tl.int32,
    scale: tl.float32,
    cap: tl.float32,
    window: tl.int32,
    ring: tl.int32,
    K_SCALES: tl.constexpr,
    K_FRESH_STEP: tl.constexpr,
    K_CACHE_STEP: tl.constexpr,
    V_SCALES: tl.constexpr,
    V_FRESH_STEP: tl.constexpr,
    V_CACHE_STEP: tl.constexpr,
    FRESH: tl.constexpr,
    SHARED: tl.constexpr,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    RING: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Attend to cached rows, one slice of them per program, and to the window's fresh ones.

    Grid: (requests, KV heads, ``splits`` x row blocks). Each program writes ``output`` and ``lse``
    of its own slice, rows and heads, and nothing else is written; so no two write one place. A row
    that sees no key gets 0, and -inf for its log-sum-exp.

    Pointers:
        query: ``[num_rows, HEADS x GROUP, D]``, innermost contiguous.
        block_table: int ``[requests, table_row]``; entries past the length may be anything. One
            that is outside the cache is never followed: the nearest block is read instead.
        seq_lens: int ``[requests]``, the window's rows included.
        starts: int32 ``[requests + 1]``, first row of each request, and the end.
        order: int64 ``[num_rows]``, each row's place in its sequence, from the request's first
            row on; if ``TREE``, else rows follow each other. ``TREE`` comes with ``FRESH``.
        visible: uint8 ``[num_rows, longest]``, which rows of its request a row sees, none of them
            after it; if ``TREE``, else all up to itself.
        output: ``[splits, num_rows, HEADS x GROUP, DV]``, innermost contiguous; float32 if
            ``SHARED``.
        lse: float32 ``[splits, num_rows, HEADS x GROUP]``, contiguous; natural logarithm; written
            if ``SHARED``.
        k_fresh: ``[num_rows, HEADS, D]``, as the cache stores it, any strides; read if ``FRESH``.
        k_fresh_scale: float32 ``[num_rows, HEADS]``, any strides; read if ``FRESH`` and
            ``K_SCALES`` is negative.
        k_cache: ``[num_blocks, BLOCK_SIZE, HEADS, D]``, any strides.
        k_scale: float32 ``[K_SCALES]``, one or ``HEADS``, unread if 0; stored x scale = value. If
            ``K_SCALES`` is negative, float32 ``[num_blocks, BLOCK_SIZE, HEADS]``, any strides;
            ``COMPUTE`` is float32 then.
        v_fresh: ``[num_rows, HEADS, DV]``; all ``v_`` arguments are to values as the ``k_`` ones
            are to keys.

    Numbers:
        q_row, q_head, o_split, ...: strides in elements, of the tensor and the dimension that they
            are named after (``o`` is the output).
        table_row: entries between the lines of ``block_table``.
        num_blocks: of the cache.
        num_rows: of the window.
        longest: rows of the longest request.
        splits: slices of each request's cached rows.
        scale: of the scores.
        cap: soft cap of the scores, if ``CAPPED``.
        window: positions that a row sees, itself included, if ``SLIDING``.
        ring: slots of a request, if ``RING``.

    Constants:
        K_SCALES: static scales of keys: 0, 1 or ``HEADS``; negative if each row has its own.
        K_FRESH_STEP: from one number of a fresh key to the next.
        K_CACHE_STEP: from one number of a cached key to the next.
        FRESH: the window's own rows are not in the cache, but are taken from ``k_fresh`` and
            ``v_fresh``, by each request's last slice.
        SHARED: several slices share a row, so their log-sum-exp is written, too.
        TREE: the window has draft trees.
        RING: position p lies at place ``p % ring`` of the request's blocks; evicted positions are
            beyond the sliding window, which is set.
        GROUP: query heads of each KV head.
        HEADS: KV heads.
        D, DV: head size of keys and of values.
        BLOCK_R: rows of a request per program.
        BLOCK_M: room for their query heads.
        BLOCK_N: cached rows per step.
        BLOCK_W: fresh rows per step.
        BLOCK_D, BLOCK_DV: powers of two not below ``D`` and ``DV``.
        COMPUTE: dtype of products.
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
        q_at = (first + row) * q_row + q_head_index * q_head
        q = load_rows(query, q_at, real, d, 1, D).to(COMPUTE)
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
        blocks = block_table + request.to(tl.int64) * table_row
        at = begin + tl.arange(0, BLOCK_N)
        block = tl.load(blocks + in_ring(at, ring, RING) // BLOCK_SIZE, mask=at < end, other=0)
        for start in range(begin, end, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            inside = at < end
            slot = in_ring(at, ring, RING) % BLOCK_SIZE
            block_now = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
            k_at = block_now * k_cache_block + slot * k_cache_slot + head * k_cache_head
            v_at = block_now * v_cache_block + slot * v_cache_slot + head * v_cache_head
            k = load_rows(k_cache, k_at, inside, d, K_CACHE_STEP, D)
            v = load_rows(v_cache, v_at, inside, dv, V_CACHE_STEP, DV)
            at += BLOCK_N  # the next step's blocks, so that no load waits for another
            block = tl.load(blocks + in_ring(at, ring, RING) // BLOCK_SIZE, mask=at < end, other=0)
            at -= BLOCK_N
            k_scale_at = block_now * k_scale_block + slot * k_scale_slot + head * k_scale_head
            v_scale_at = block_now * v_scale_block + slot * v_scale_slot + head * v_scale_head
            k = as_numbers(k, k_scale, k_scale_at, inside, K_SCALES)
            v = as_numbers(v, v_scale, v_scale_at, inside, V_SCALES)
            allowed = inside[None, :] & real[:, None]
            if not FRESH:
                allowed = allowed & (at[None, :] <= place[:, None])
            allowed = in_window(allowed, at, place, window, SLIDING)
            if SLIDING or not FRESH:
                v, out = without_nan(v, allowed, out)
            k = k.to(COMPUTE)
            v = v.to(COMPUTE)
            top, total, out = fold(q, k, v, allowed, top, total, out, k_scaled, cap, CAPPED)
        if FRESH:
            mine = tl.where(split == splits - 1, count, 0)  # only the last slice
            top, total, out = fold_fresh(
                q, top, total, out,
                (
                    k_fresh, k_fresh_row, k_fresh_head,
                    k_fresh_scale, k_fresh_scale_row, k_fresh_scale_head,
                ),
                (
                    v_fresh, v_fresh_row, v_fresh_head,
                    v_fresh_scale, v_fresh_scale_row, v_fresh_scale_head,
                ),
                order, visible, first, mine, base, row, real, head, d, dv,
                longest, k_scaled, cap, window,
                TREE, CAPPED, SLIDING, K_SCALES, V_SCALES, D, DV,
                K_FRESH_STEP, V_FRESH_STEP, BLOCK_R, BLOCK_W, COMPUTE,
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

    Grid: (rows, query heads). Each program writes one row of one head.

    Args:
        partial_out: float32 ``[SPLITS, num_rows, HEADS, DV]``, contiguous.
        partial_lse: float32 ``[SPLITS, num_rows, HEADS]``, contiguous; -inf if a slice saw no
            key of this row, and then its output is 0.
        output: ``[num_rows, HEADS, DV]``, innermost contiguous.
        o_row: elements between rows of ``output``.
        o_head: elements between heads of ``output``.
        num_rows: rows of the window.
        HEADS: query heads.
        DV: head size of values.
        BLOCK_DV: the power of two not below ``DV``.
        SPLITS: slices, a power of two.
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
