"""Attention over a cache with all rows written: sums of products, in Python floats."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .batches import Batch
from .caches import TestCache
from .oracle import Replay, Row
from .rig import Rig


@attrs.frozen(eq=False)
class Sequences:
    """Requests with a past: tokens in the cache, and this window's rows after them.

    Attributes:
        batch: the window's rows, with finite payload and slots that follow the block table.
        block_table: by group, blocks per request; entries that a request does not use are stale.
        seq_lens: tokens per request, the window's included.
    """

    batch: Batch
    block_table: dict[str, list[list[int]]]
    seq_lens: list[int]

    def table(self, cache: TestCache) -> Tensor:
        """Return the block table of a layer, int32 ``[num_requests, max_blocks]`` on the host."""
        rows = self.block_table[cache.spec.group]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), len(rows[0]) if rows else 2)

    def slot(self, cache: TestCache, request: int, position: int) -> int:
        """Return the slot of a request's token."""
        block, offset = divmod(position, cache.spec.block_size)
        return self.block_table[cache.spec.group][request][block] * cache.spec.block_size + offset

    def stored(self, truth: Replay, cache: TestCache) -> list[list[Row]]:
        """Return, by request, the words of its tokens in ``truth``, a cache with all rows."""
        return [
            [truth.read(cache.name, self.slot(cache, request, at)) for at in range(length)]
            for request, length in enumerate(self.seq_lens)
        ]


def make_sequences(
    rig: Rig, shape: tuple[Sequence[int], Sequence[int]], prefixes: Sequence[int], payload: str
) -> Sequences:
    """Write prefixes of these lengths into the caches, and make a window that continues them.

    Only the prefixes become ordinary numbers; every other slot keeps its noise, NaN included, so
    that reading a wrong slot shows.
    """
    plain = rig.batch(shape, padding=0.0)
    lengths = [
        prefix + known + drafts
        for prefix, known, drafts in zip(prefixes, *map(list, shape), strict=True)
    ]
    tables: dict[str, list[list[int]]] = {}
    for cache in rig.caches:
        if cache.spec.group not in tables:
            tables[cache.spec.group] = _blocks(cache, lengths, rig.rng)
    tensors, rows = {}, {}
    for cache in rig.caches:
        parts = finite_parts(cache, plain.num_rows, rig.rng, payload)
        tensors[cache.name] = tuple(part.to(rig.device) for part in parts)
        rows[cache.name] = cache.rows(parts)
    sequences = Sequences(plain, tables, lengths)
    slots: dict[str, list[int]] = {}
    for cache in rig.caches:
        slots[cache.spec.group] = [
            sequences.slot(cache, request, position)
            for request, length in enumerate(lengths)
            for position in range(prefixes[request], length)
        ]
        _write_prefixes(rig, cache, sequences, prefixes)
    rig.truth.impose()
    batch = attrs.evolve(plain, slots=slots, tensors=tensors, rows=rows)
    return attrs.evolve(sequences, batch=batch)


def _blocks(cache: TestCache, lengths: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Deal out distinct blocks for sequences of these lengths, and behind them any numbers.

    All lines are equally long: two blocks more than the longest sequence needs.
    """
    size = cache.spec.block_size
    free = rng.sample(range(cache.spec.num_blocks), cache.spec.num_blocks)
    needed = [-(-length // size) for length in lengths]
    widest = max(needed, default=0) + 2
    table = []
    for count in needed:
        own = [free.pop() for _ in range(count)]
        wild = [-1, 2**31 - 1, rng.randrange(cache.spec.num_blocks)]
        stale = [rng.choice(wild) for _ in range(widest - count)]
        table.append(own + stale)
    return table


def finite_parts(
    cache: TestCache, rows: int, rng: random.Random, payload: str = "native"
) -> list[Tensor]:
    """Make parts for ``TestCache.rows``: numbers of ordinary size, codes with their scales.

    With the payload ``"cast"`` the numbers of 8-bit formats are float32, for the library to encode.
    """
    sides, beside = range(len(cache.sides)), cache.planes[len(cache.sides) :]
    if not beside or payload == "cast":
        return [_finite(cache, side, rows, rng, payload) for side in sides]
    scales = [
        torch.tensor([rng.uniform(0.01, 0.1) for _ in range(rows * plane.heads)]).view(
            rows, plane.heads
        )
        for plane in beside
    ]
    codes = [_finite(cache, side, rows, rng, payload, scales[side]) for side in sides]
    return [*codes, *scales]


def _finite(
    cache: TestCache,
    plane: int,
    rows: int,
    rng: random.Random,
    payload: str,
    beside: Tensor | None = None,
) -> Tensor:
    """Draw numbers of ordinary size ``[rows, heads, size]``.

    In the cache's dtype, as codes if of 8 bits. With the payload ``"cast"``, 8-bit formats get
    float32 numbers for the library to encode.
    """
    where, scales = cache.planes[plane], cache.scales[plane]
    shape = (rows, where.heads, where.size)
    count = rows * where.heads * where.size
    numbers = torch.tensor([rng.gauss(0, 1) for _ in range(count)]).view(shape)
    fmt = cache.spec.fmt
    if payload == "cast" and fmt.quantised:
        return numbers
    if not fmt.quantised:
        return numbers.to(fmt.dtype)
    scale = (torch.tensor(scales) if beside is None else beside).unsqueeze(-1)
    if fmt.dtype is torch.int8:
        return (numbers / scale).round().clamp(-128, 127).to(torch.int8)
    return (numbers / scale).clamp(-400, 400).to(fmt.dtype)


def _write_prefixes(
    rig: Rig, cache: TestCache, sequences: Sequences, prefixes: Sequence[int]
) -> None:
    """Write random tokens of the past into the oracle, ``prefixes`` of each request.

    Not into caches.
    """
    for request, prefix in enumerate(prefixes):
        rows = cache.rows(finite_parts(cache, prefix, rig.rng))
        for position in range(prefix):
            slot = sequences.slot(cache, request, position)
            rig.truth.write(cache.name, slot, rows[position])


def attention(
    cache: TestCache,
    stored: Sequence[Sequence[Row]],
    batch: Batch,
    query: Tensor,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    forest: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Compute the expected attention of a window's rows.

    With ``forest``, the parents of each request's drafts, a draft sees its own branch only.

    Args:
        cache: the layer.
        stored: by request, the words of its tokens, those of the window's rows included.
        batch: the window's rows.
        query: ``[num_rows, num_q_heads, size]``.
        scale: as in ``Window.attend``, like the others.
        sliding_window: the last tokens of the branch that a row sees.
        soft_cap: bounds the scores.
        forest: parents of each request's drafts.

    Returns:
        float64 ``[num_rows, num_q_heads, value_size]`` on the host.
    """
    queries = query.double().tolist()
    groups = query.shape[1] // cache.planes[0].heads
    factor = query.shape[2] ** -0.5 if scale is None else scale
    out: list[list[list[float]]] = []
    for request, tokens in enumerate(stored):
        rows = batch.settled[request] + batch.draft_len[request]
        keys = [cache.numbers(row, 0) for row in tokens]
        values = [cache.numbers(row, 1) for row in tokens]
        for position in range(len(tokens) - rows, len(tokens)):
            start = len(tokens) - batch.draft_len[request]
            seen = list(range(min(position + 1, start if forest is not None else len(tokens))))
            if forest is not None and position >= start:
                seen += [start + node for node in branch(forest[request], position - start)]
            if sliding_window is not None:
                seen = seen[-sliding_window:]
            line = []
            for head, vector in enumerate(queries[len(out)]):
                kv = head // groups
                scores = [factor * _dot(vector, keys[at][kv]) for at in seen]
                if soft_cap is not None:
                    scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
                line.append(_mix(scores, [values[at][kv] for at in seen]))
            out.append(line)
    shape = (len(out), query.shape[1], cache.planes[1].size)
    return torch.tensor(out, dtype=torch.float64).view(shape)


def branch(parents: Sequence[int], node: int) -> list[int]:
    """Return a node and its ancestors, from the root down."""
    above = branch(parents, parents[node]) if parents[node] >= 0 else []
    return [*above, node]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Compute the inner product in double precision."""
    return sum(a * b for a, b in zip(left, right, strict=True))


def _mix(scores: Sequence[float], vectors: Sequence[Sequence[float]]) -> list[float]:
    """Return the sum of the vectors, weighted by the softmax of the scores."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [_dot(weights, column) / total for column in zip(*vectors, strict=True)]
