"""Attention that reads the window's own writes: the reference, in float32.

Softmax attention may be split in two parts without changing its result: the prefix in the paged
cache, and the window's own rows. The parts are merged by their log-sum-exp (Rabe and Staats,
2021, arXiv:2112.05682, as used by FlashAttention and FlashInfer's cascade). So drafts need not be
in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .cache_planes import decoded
from .errors import LayerError
from .executor import AttentionArgs
from .host_values import described, is_dense, is_plain
from .layers import LayerRef, Plane
from .layout import RowLayout
from .row_io import read

#: Scales, sliding windows and soft caps have to be smaller than this: kernels take int64.
_TOO_LARGE: Final = 2**63


def attend(
    layout: RowLayout,
    planes: tuple[Plane, ...],
    fresh: tuple[Tensor, ...] | None,
    query: Tensor,
    args: AttentionArgs,
) -> Tensor:
    """Compute causal attention of a batch's rows; see ``Window.attend`` for shapes.

    Args:
        layout: the request of each row.
        planes: the planes of the layer.
        fresh: the rows' own keys and values as the cache would store them,
            ``[num_rows, *row_shape]`` each; None if the cache has them already. Always given for
            a draft tree, in which a row sees its ancestors and itself.
        query: ``[num_rows, num_q_heads, head_size]``.
        args: block table, sequence lengths and the rest.

    Returns:
        ``[num_rows, num_q_heads, value_head_size]``, of the query's dtype and device.
    """
    out = query.new_empty(*query.shape[:2], planes[1].row_shape[1])
    for request in range(layout.num_requests):
        first, last = layout.starts[request : request + 2]
        rows = slice(first, last)
        length = args.seq_lens[request].to(torch.int64)
        own = torch.arange(last - first, device=query.device)
        if layout.tree is not None:
            own = layout.tree.order[rows]
        position = length - (last - first) + own
        end = length if fresh is None else length - (last - first)
        slots, where = _prefix(args, request, planes[0].block_size, length, end)
        # Slots past the request's length may be stale: they are not visible.
        key, value = decoded(planes, [read(plane, slots) for plane in planes])
        visible = (where >= 0) & (where < end)
        parts = [partial_attention(query[rows], key, value, position, where, visible, args)]
        if fresh is not None:
            key, value = decoded(planes, [stored[rows] for stored in fresh])
            visible = torch.ones_like(position, dtype=torch.bool)
            if layout.tree is not None:
                visible = layout.tree.visible[rows, : last - first]
            parts.append(
                partial_attention(query[rows], key, value, position, position, visible, args)
            )
        out[rows] = merge(parts).to(out.dtype)
    return out


def arguments(
    ref: LayerRef,
    layout: RowLayout,
    query: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    *,
    waiting: bool,
    evicting: Sequence[int] | None,
) -> AttentionArgs:
    """Check and complete the arguments of ``Window.attend``; see there.

    Without ``scale`` it is ``head_size ** -0.5``. ``waiting`` is True if draft rows are not in the
    cache. ``evicting`` is given for a ring layer alone: how many rows of each request evict others
    from its ring. Without ``sliding_window``, such a layer's own window is used.

    Raises:
        LayerError: an argument does not fit the layer or the window, or is out of range.
    """
    check_query(ref, layout, query, block_table, seq_lens, waiting)
    check_scores(scale, sliding_window, soft_cap)
    if evicting is not None:
        sliding_window = ref.window if sliding_window is None else sliding_window
        _check_ring(ref, sliding_window or 1, block_table.shape[1], evicting, waiting)
    return AttentionArgs(
        block_table=block_table,
        seq_lens=seq_lens,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        ring_size=ref.ring_size,
    )


def _check_ring(
    ref: LayerRef, window: int, blocks: int, evicting: Sequence[int], waiting: bool
) -> None:
    """Refuse a ring that has lost rows which a query sees, and a block table that is too short.

    Raises:
        LayerError: the ring has fewer than ``window`` plus the evicting rows less one, or the
            table's blocks have fewer slots than the ring.
    """
    size, slots = ref.kind.reuse, blocks * ref.planes[0].block_size
    needed = window + max(evicting, default=0) - 1
    if size < needed:
        writes = (
            "settled rows of this window" if waiting else "rows of this window, drafts included,"
        )
        if window > (ref.window or window):
            hint = f"pass the layer's own sliding_window, {ref.window}, or make the ring larger"
        elif waiting:
            hint = "make the ring larger"
        else:
            hint = "use policy='deferred', where draft rows wait outside the ring"
        raise LayerError(
            "attend",
            f"the {writes} evict rows of {ref.name!r} that its first query sees",
            expected=f"ring_size >= window + rows - 1 = {needed}",
            got=size,
            hint=hint,
        )
    if slots < size:
        raise LayerError(
            "attend",
            f"block_table does not name the whole ring of {ref.name!r}",
            expected=f"blocks of {size} slots per request",
            got=slots,
        )


def check_query(
    ref: LayerRef,
    layout: RowLayout,
    query: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    waiting: bool,
) -> None:
    """Refuse, with a LayerError, arguments that do not fit the layer or the window.

    Values are checked if they are on the host; the device is never waited for.

    Args:
        ref: the layer.
        layout: the window's.
        query: as for ``Window.attend``.
        block_table: as for ``Window.attend``.
        seq_lens: as for ``Window.attend``.
        waiting: draft rows are not in the cache, so they need no block.
    """
    row_shape, requests = ref.planes[0].row_shape, layout.num_requests
    fits = (
        not ref.is_latent
        and not ref.states
        and isinstance(query, Tensor)
        and is_dense(query)
        and query.ndim == 3
        and query.shape[0] == layout.num_rows
        and query.shape[1] % row_shape[0] == 0
        and query.shape[2] == row_shape[1]
        and query.is_floating_point()
        and query.device == ref.device
    )
    if not fits:
        raise LayerError(
            "attend",
            f"query does not fit layer {ref.name!r}",
            expected=f"dense floating [{layout.num_rows}, n x {row_shape[0]}, {row_shape[-1]}] on "
            f"{ref.device}, and a layer with keys and values",
            got=described(query, where=True),
        )
    for name, tensor, ndim in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        fits = (
            isinstance(tensor, Tensor)
            and is_plain(tensor)
            and tensor.ndim == ndim
            and tensor.shape[0] == requests
            and tensor.dtype in (torch.int32, torch.int64)
            and tensor.device == ref.device
        )
        if not fits:
            shape = f"[{requests}, max_blocks]" if ndim == 2 else f"[{requests}]"
            raise LayerError(
                "attend",
                f"{name} does not fit the window",
                expected=f"dense int32 or int64 {shape} on {ref.device}",
                got=described(tensor, where=True),
            )
    if ref.device.type == "cpu":
        lengths = seq_lens.tolist()
        room = block_table.shape[1] * ref.planes[0].block_size
        if ref.ring_size is not None:
            room = max([*lengths, 0])
        fresh = waiting or layout.tree is not None  # the window's own rows need no block
        ends = _check_lengths(layout, room, lengths, fresh)
        if ref.ring_size is None:
            _check_blocks(ref.planes[0], block_table, ends)


def _check_lengths(layout: RowLayout, room: int, lengths: list[int], fresh: bool) -> list[int]:
    """Refuse lengths out of range; return how many tokens of each request the table leads to.

    A request's blocks have ``room`` slots; ``fresh`` rows of the window are not read through them.

    Raises:
        LayerError: a length is below the request's rows in the window, or above its room.
    """
    ends = []
    for request, length in enumerate(lengths):
        own = layout.starts[request + 1] - layout.starts[request]
        capacity = room + own if fresh else room
        ends.append(length - own if fresh else length)
        if not own <= length <= capacity:
            raise LayerError(
                "attend",
                f"seq_lens of request {request} is out of range",
                expected=f"{own} (rows of the window) to {capacity} (slots of the block table"
                f"{', and those rows' if fresh else ''})",
                got=length,
                hint="count every token of the request, this window's rows included",
            )
    return ends


def _check_blocks(plane: Plane, block_table: Tensor, ends: list[int]) -> None:
    """Refuse, with a LayerError, blocks outside the cache among those of a request's first tokens.

    ``ends`` has the number of these tokens for each request; its further blocks are not checked.
    """
    count = plane.num_slots // plane.block_size
    for request, (blocks, end) in enumerate(zip(block_table.tolist(), ends, strict=True)):
        for block in blocks[: -(-end // plane.block_size)]:
            if not 0 <= block < count:
                raise LayerError(
                    "attend",
                    f"block_table of request {request} leaves the cache",
                    expected=f"blocks 0 to {count - 1} for its {end} tokens",
                    got=block,
                    hint="name the blocks of the layer's group that hold the request's tokens",
                )


def check_scores(scale: object, sliding_window: object, soft_cap: object) -> None:
    """Refuse, with a LayerError, settings that are no finite numbers; None is fine.

    ``soft_cap`` has to be above 0, and ``sliding_window`` an int above 0.
    """
    for name, value, least in (
        ("scale", scale, None),
        ("sliding_window", sliding_window, 1),
        ("soft_cap", soft_cap, 0),
    ):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        number = number and abs(value) < _TOO_LARGE  # type: ignore[arg-type]  # nor NaN
        whole = name != "sliding_window" or isinstance(value, int)
        positive = least is None or (number and value > 0)  # type: ignore[operator]
        if value is not None and not (number and whole and positive):
            raise LayerError(
                "attend",
                f"{name} is not valid",
                expected=f"a finite{'' if least is None else ' positive'} number, or None",
                got=repr(value),
            )


def _prefix(
    args: AttentionArgs, request: int, block_size: int, length: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Return slots and positions of a request's tokens, trimmed to its length if on the host.

    In a ring each ring position holds the last sequence position before ``end`` that maps to it;
    the number is negative if no position before ``end`` does.
    """
    blocks = args.block_table[request]
    if args.ring_size is not None:
        where = end - 1 - torch.arange(args.ring_size, device=blocks.device)
        place = where % args.ring_size
    else:
        capacity = blocks.numel() * block_size
        limit = min(int(length), capacity) if length.device.type == "cpu" else capacity
        place = where = torch.arange(limit, device=blocks.device)
    slots = blocks[place // block_size].to(torch.int64) * block_size + place % block_size
    return slots, where


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    visible: Tensor,
    args: AttentionArgs,
) -> tuple[Tensor, Tensor]:
    """Compute attention over some of the keys, with its log-sum-exp.

    Args:
        query: ``[num_rows, num_q_heads, head_size]``.
        key: float32 ``[num_keys, num_kv_heads, head_size]``.
        value: float32 ``[num_keys, num_kv_heads, value_head_size]``.
        query_position: int ``[num_rows]``, positions in the sequence.
        key_position: int ``[num_keys]``.
        visible: bool ``[num_keys]``, keys that belong to this part; or, under a tree,
            ``[num_rows, num_keys]``.
        args: scale, sliding window, soft cap.

    Returns:
        Output ``[num_q_heads, num_rows, value_head_size]`` and log-sum-exp
        ``[num_q_heads, num_rows]``; a row that sees no key has output 0 and -inf. Keys and values
        that a row does not see have no effect on it, NaN included. A row that sees a value that
        is not finite has output NaN.
    """
    groups = query.shape[1] // key.shape[1]
    heads = query.to(torch.float32).transpose(0, 1)
    keys = key.transpose(0, 1).repeat_interleave(groups, 0)
    finite = value.isfinite()
    values = value.masked_fill(~finite, 0.0).transpose(0, 1)
    scores = heads @ keys.transpose(1, 2) * args.scale
    if args.soft_cap is not None:
        scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
    mask = visible & (key_position <= query_position.view(-1, 1))
    if args.sliding_window is not None:
        mask &= key_position > query_position.view(-1, 1) - args.sliding_window
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1))
    out = weights @ values.repeat_interleave(groups, 0)
    # 0 x NaN is NaN: values that are not finite were zeroed, and now spoil the rows that see them.
    spoilt = torch.einsum("mn,nhd->hmd", mask.to(torch.float32), (~finite).to(torch.float32))
    return out.masked_fill(spoilt.repeat_interleave(groups, 0) > 0, torch.nan), lse


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge partial attentions by log-sum-exp to ``[num_rows, num_q_heads, value_head_size]``."""
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, 0).nan_to_num(neginf=0.0)
    weights = torch.exp(lse - total).unsqueeze(-1)
    outputs = torch.stack([part[0] for part in parts])
    return (outputs * weights).sum(0).transpose(0, 1)
