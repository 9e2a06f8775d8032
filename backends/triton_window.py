"""The window kernel: attention over the fresh rows, merged with the prefix, in one launch.

It may also write settled rows into the cache and copy all rows to a staging buffer, so that
it takes the place of the cache-write kernel of each layer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attention import blend, fold_window


# Not specialised: what changes with the number of rows, so that none of it compiles anew.
@triton.jit(
    do_not_specialize=[
        *("window", "limit", "splits", "longest"),
        *("p_split", "l_split", "l_row", "l_head"),
    ]
)
def window_attention(
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
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    COMPUTE: tl.constexpr,
    EACH: tl.constexpr,
    MORE: tl.constexpr,
    ONCE: tl.constexpr,
) -> None:
    """Causal attention over the window's fresh rows, merged with the prefix by log-sum-exp.

    Grid: (requests, KV heads, row blocks of ``BLOCK_R``).

    Pointers and lengths:
        query: ``[num_rows, HEADS x GROUP, D]``, innermost contiguous.
        key: ``[num_rows, HEADS, D]`` as the cache stores it, any strides (``K_STEP`` the
            innermost).
        value: ``[num_rows, HEADS, DV]``, likewise.
        prefix_out: ``[splits, num_rows, HEADS x GROUP, DV]``, innermost contiguous.
        prefix_lse: float32 ``[splits, num_rows, HEADS x GROUP]``, any strides; natural
            logarithm; -inf or +inf where a row sees no key.
        output: ``[num_rows, HEADS x GROUP, DV]``, innermost contiguous; may be ``prefix_out``.
        starts: int32 ``[requests + 1]``, first row of each request.
        request: int64 ``[num_rows]``, the request of each row; for ``short_attention``.
        k_scale: float32 ``[K_SCALES]``, one or ``HEADS``, unread if 0; stored x scale = value.
            If negative, float32 ``[num_rows, HEADS]``, any strides; ``COMPUTE`` is float32 then.
        v_scale: likewise.
        key_cache: ``[num_blocks, BLOCK_SIZE, HEADS, D]``, innermost contiguous; if ``WRITE``,
            settled rows are written to it.
        value_cache: likewise.
        key_buffer: ``[max_rows, HEADS, D]``, contiguous; if ``COPY``, all rows are written.
        value_buffer: likewise.
        slots: int ``[num_rows]``, -1 is padding and is never written; if ``WRITE``.
        position: int64 ``[num_rows]``, -1 for settled rows; if ``WRITE``.
        order: int64 ``[num_rows]``, each row's place in its sequence; if ``TREE``.
        visible: uint8 ``[num_rows, longest]``, which rows of its request a row sees, none of them
            after it; if ``TREE``, else all up to itself.
        limit: slots of the cache.
        EACH: rows of every request where all are alike, else 0; ``starts`` is not read then.
        MORE: there are more splits than one.
        ONCE: no request has more rows than ``BLOCK_N``.
    """
    owner = tl.program_id(0)
    head = tl.program_id(1)
    base = tl.program_id(2) * BLOCK_R
    first = owner.to(tl.int64) * EACH
    count = EACH
    if EACH == 0:
        first = tl.load(starts + owner).to(tl.int64)
        count = tl.load(starts + owner + 1) - first.to(tl.int32)
    if base < count:
        m = tl.arange(0, BLOCK_M)
        row = base + m // GROUP
        q_head_index = head * GROUP + m % GROUP
        real = (m < BLOCK_R * GROUP) & (row < count)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        wide = real[:, None] & (dv < DV)[None, :]
        top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        lse_at = prefix_lse + (first + row) * l_row + q_head_index * l_head
        part_at = prefix_out + ((first + row) * p_row + q_head_index * p_head)[:, None]
        part_at = part_at + dv[None, :]
        # Loaded before they are needed: their way from memory overlaps with the products.
        lse = tl.load(lse_at, mask=real, other=float("-inf"))
        part = tl.load(part_at, mask=wide, other=0.0)
        q_at = query + ((first + row) * q_row + q_head_index * q_head)[:, None] + d[None, :]
        q = tl.load(q_at, mask=real[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
        k_scaled = scale
        if K_SCALES > 0:
            k_scaled = scale * tl.load(k_scale + (head if K_SCALES > 1 else 0))
        top, total, out = fold_window(
            q, top, total, out, key, value, k_scale, v_scale, key_cache, value_cache, key_buffer,
            value_buffer, slots, position, order, visible, first, base, count, row,
            real, head, d, dv, k_row, k_head, v_row, v_head, ks_row, ks_head, vs_row, vs_head,
            kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head, limit, longest, k_scaled, cap,
            window, TREE, CAPPED, SLIDING, WRITE, COPY, K_SCALES, V_SCALES, HEADS, D, DV, K_STEP,
            V_STEP, BLOCK_SIZE, BLOCK_R, BLOCK_N, COMPUTE, ONCE,
        )  # fmt: skip
        if V_SCALES > 0:
            out = out * tl.load(v_scale + (head if V_SCALES > 1 else 0))
        top, total, out = blend(top, total, out, lse, part)
        if MORE:
            for split in range(1, splits):
                lse = tl.load(lse_at + split * l_split, mask=real, other=float("-inf"))
                part = tl.load(part_at + split * p_split, mask=wide, other=0.0)
                top, total, out = blend(top, total, out, lse, part)
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (first + row) * o_row + q_head_index * o_head
        tl.store(output + place[:, None] + dv[None, :], out.to(output.dtype.element_ty), mask=wide)
