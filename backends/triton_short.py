"""The window kernel for short requests: one program per row and KV head, and no loop over keys.

A verify pass gives a request a handful of rows. Then the products are few and what counts is
how soon the first byte is there: every load is under way at once, all sums are within a warp
or two, and even one request fills a device's worth of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attention import blend


@triton.jit
def keep_row(
    words: tl.tensor,
    cache: tl.tensor,
    buffer: tl.tensor,
    slot: tl.tensor,
    wanted: tl.tensor,
    row: tl.tensor,
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
    """Write one head of a row to the cache, if ``wanted``, and to the staging buffer.

    Slots of distinct rows are distinct (the window guarantees it), each row and head is one
    program's alone.
    """
    if WRITE:
        place = (slot // BLOCK_SIZE) * c_block + (slot % BLOCK_SIZE) * c_slot + head * c_head
        if wanted:
            tl.store(cache + place + columns, words, mask=columns < WIDTH)
    if COPY:
        place = (row * HEADS + head) * WIDTH
        tl.store(buffer + place + columns, words, mask=columns < WIDTH)


# Not specialised: what changes with the number of rows, so that none of it compiles anew.
@triton.jit(
    do_not_specialize=[
        *("window", "limit", "splits", "longest"),
        *("p_split", "l_split", "l_row", "l_head"),
    ]
)
def short_attention(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    prefix_out: tl.tensor,
    prefix_lse: tl.tensor,
    output: tl.tensor,
    starts: tl.tensor,
    request: tl.tensor,
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
    q_row: tl.int64,
    q_head: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    ks_row: tl.int64,
    ks_head: tl.int64,
    vs_row: tl.int64,
    vs_head: tl.int64,
    p_split: tl.int64,
    p_row: tl.int64,
    p_head: tl.int64,
    l_split: tl.int64,
    l_row: tl.int64,
    l_head: tl.int64,
    o_row: tl.int64,
    o_head: tl.int64,
    kc_block: tl.int64,
    kc_slot: tl.int64,
    kc_head: tl.int64,
    vc_block: tl.int64,
    vc_slot: tl.int64,
    vc_head: tl.int64,
    limit: tl.int64,
    splits: tl.int32,
    scale: tl.float32,
    cap: tl.float32,
    window: tl.int32,
    longest: tl.int32,
    TREE: tl.constexpr,
    CAPPED: tl.constexpr,
    SLIDING: tl.constexpr,
    WRITE: tl.constexpr,
    COPY: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    K_STEP: tl.constexpr,
    V_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EACH: tl.constexpr,
    MORE: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Causal attention over the window's fresh rows, merged with the prefix by log-sum-exp.

    Grid: (rows, KV heads). Arguments are those of ``window_attention``, which says what they
    are; no request has more than ``BLOCK_N`` rows, ``BLOCK_M`` holds the query heads of one KV
    head; both are 16 at least, as tensor cores want it. ``request`` is unread where ``EACH`` is
    not 0.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if EACH > 0:
        first = row // EACH * EACH
    else:
        first = tl.load(starts + tl.load(request + row)).to(tl.int64)
    mine = (row - first).to(tl.int32)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    heads = head * GROUP + m
    real = m < GROUP
    seen = n <= mine
    q_at = query + row * q_row + (heads * q_head)[:, None] + d[None, :]
    k_at = key + ((first + n) * k_row + head * k_head)[:, None] + (d * K_STEP)[None, :]
    v_at = value + ((first + n) * v_row + head * v_head)[:, None] + (dv * V_STEP)[None, :]
    lse_at = prefix_lse + row * l_row + heads * l_head
    part_at = prefix_out + row * p_row + (heads * p_head)[:, None] + dv[None, :]
    wide = real[:, None] & (dv < DV)[None, :]
    q = tl.load(q_at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
    k = tl.load(k_at, mask=seen[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(v_at, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
    lse = tl.load(lse_at, mask=real, other=float("-inf"))
    part = tl.load(part_at, mask=wide, other=0.0)
    if WRITE or COPY:
        slot = row * 0
        wanted = mine < 0
        if WRITE:
            slot = tl.load(slots + row).to(tl.int64)
            settled = tl.load(position + row) < 0
            wanted = settled & (slot >= 0) & (slot < limit)
            slot = tl.where(wanted, slot, 0)
        own_k = tl.load(key + row * k_row + head * k_head + d * K_STEP, mask=d < D, other=0.0)
        own_v = tl.load(value + row * v_row + head * v_head + dv * V_STEP, mask=dv < DV, other=0.0)
    numbers_k = k.to(tl.float32)
    numbers_v = v.to(tl.float32)
    k_scaled = scale
    if K_SCALES > 0:
        k_scaled = scale * tl.load(k_scale + (head if K_SCALES > 1 else 0))
    if K_SCALES < 0:
        ks_at = k_scale + (first + n) * ks_row + head * ks_head
        numbers_k = numbers_k * tl.load(ks_at, mask=seen, other=0.0)[:, None]
    if V_SCALES < 0:
        vs_at = v_scale + (first + n) * vs_row + head * vs_head
        numbers_v = numbers_v * tl.load(vs_at, mask=seen, other=0.0)[:, None]
    if TREE:
        seen = tl.load(visible + row * longest + n, mask=seen, other=0) != 0
    if SLIDING and TREE:
        key_at = tl.load(order + first + n, mask=seen, other=0)
        seen = seen & (key_at > tl.load(order + row) - window)
    elif SLIDING:
        seen = seen & (n > mine - window)
    keys = tl.trans(numbers_k.to(COMPUTE))
    scores = tl.dot(q, keys, input_precision="ieee") * k_scaled
    if CAPPED:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    top = tl.max(scores, axis=1)
    weights = tl.exp(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, axis=1)
    values = tl.where(seen[:, None], numbers_v, 0.0).to(COMPUTE)
    out = tl.dot(weights.to(COMPUTE), values, input_precision="ieee")
    if V_SCALES > 0:
        out = out * tl.load(v_scale + (head if V_SCALES > 1 else 0))
    top, total, out = blend(top, total, out, lse, part)
    if MORE:
        for split in range(1, splits):
            lse = tl.load(lse_at + split * l_split, mask=real, other=float("-inf"))
            part = tl.load(part_at + split * p_split, mask=wide, other=0.0)
            top, total, out = blend(top, total, out, lse, part)
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = output + row * o_row + (heads * o_head)[:, None] + dv[None, :]
    tl.store(out_at, out.to(output.dtype.element_ty), mask=wide)
    if WRITE or COPY:
        keep_row(
            own_k, key_cache, key_buffer, slot, wanted, row, d, head, kc_block, kc_slot, kc_head,
            WRITE, COPY, HEADS, D, BLOCK_SIZE,
        )  # fmt: skip
        keep_row(
            own_v, value_cache, value_buffer, slot, wanted, row, dv, head, vc_block, vc_slot,
            vc_head, WRITE, COPY, HEADS, DV, BLOCK_SIZE,
        )  # fmt: skip
