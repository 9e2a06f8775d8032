"""Promise 4, second half: rows that a query cannot see have no effect on its output.

A paged cache is full of garbage: rejected rows, other requests, blocks that were never cleared.
A weight of 0 makes finite garbage harmless, but neither NaN nor infinities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor

from .batches import Batch
from .caches import LayerSpec, TestCache
from .kit import Kit, KitBase
from .naive import Sequences, branch, make_sequences
from .number_formats import FORMATS
from .rig import Rig
from .trees import lengths

#: Settled and draft rows, and tokens before them; the second is longer than a kernel's tile.
_PASTS: Final[dict[str, tuple[tuple[Sequence[int], Sequence[int]], Sequence[int]]]] = {
    "short": (((1, 2), (3, 2)), (7, 0)),
    "long": (((1, 1), (19, 1)), (5, 21)),
}

#: Trees, with settled rows and tokens before them.
_FORESTS: Final[dict[str, tuple[Sequence[int], list[list[int]], Sequence[int]]]] = {
    "short": ((1, 1), [[-1, -1, 0, 1, 1], [-1, 0]], (6, 3)),
    "long": ((1,), [[-1, *(node // 2 for node in range(19))]], (9,)),
}

_HOW: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "window-3": {"sliding_window": 3},
    "all": {"scale": 0.9, "sliding_window": 6, "soft_cap": 2.0},
}

_NAMES: Final = ("fp32", "bf16", "fp8_e4m3-head", "fp8_e4m3-row", "int8-row")

_POISON: Final = (math.nan, math.inf, -math.inf)


class Unseen(KitBase):
    """Poison in every row that a query does not see changes no bit of its output."""

    @pytest.mark.parametrize("how", _HOW)
    @pytest.mark.parametrize("fmt", _NAMES)
    def test_poison_that_no_query_sees(self, kit: Kit, policy: str, fmt: str, how: str) -> None:
        """NaN or infinities in rows that a query does not see change no bit of its output.

        Such are other requests, later rows, stale slots, and rows outside the sliding window.
        """
        kit.need("attention")
        for name, (shape, prefixes) in _PASTS.items():
            rig = kit.rig(policy, [_spec(fmt)], seed=len(name))
            _compare(rig, shape, prefixes, _HOW[how], None)

    @pytest.mark.parametrize("how", _HOW)
    @pytest.mark.parametrize("fmt", _NAMES)
    def test_poison_in_other_branches(self, kit: Kit, fmt: str, how: str) -> None:
        """NaN or infinities in nodes that are no ancestors of a row change no bit of its output."""
        kit.need("attention", "trees")
        for name, (settled, forest, prefixes) in _FORESTS.items():
            rig = kit.rig("deferred", [_spec(fmt)], seed=len(name))
            _compare(rig, lengths(settled, forest), prefixes, _HOW[how], forest)


def _spec(fmt: str) -> LayerSpec:
    """Describe the layer of these tests in a format."""
    return LayerSpec("hnd", FORMATS[fmt], size=8, value_size=4, block_size=4, num_blocks=24)


def _compare(
    rig: Rig,
    shape: tuple[Sequence[int], Sequence[int]],
    prefixes: Sequence[int],
    how: dict[str, Any],
    forest: list[list[int]] | None,
) -> None:
    """Attend to clean caches, then, for many rows, with poison in all rows that one cannot see.

    Raises:
        AssertionError: poison changed a bit of the row's output, or the clean output is not finite.
    """
    sequences = make_sequences(rig, shape, prefixes, "native")
    batch, cache = sequences.batch, rig.caches[0]
    past, clean = rig.truth.copy(), _attend(rig, sequences, batch, how, forest)
    kinds = [value for value in _POISON if _can_hold(cache, value)]
    some = [row for row in range(batch.num_rows) if row < 6 or row % 5 == 0]
    for row, value in zip(some, itertools.cycle(kinds), strict=False):
        slots, rows = _seen(sequences, cache, row, how.get("sliding_window"), forest)
        bad = cache.rows(_poison(cache, 1, value))[0]
        rig.truth = past.copy()
        for slot in set(range(cache.num_slots)) - slots:
            rig.truth.write(cache.name, slot, bad)
        rig.truth.impose()
        parts = _poison(cache, batch.num_rows, value)
        for part, good in zip(parts, batch.tensors[cache.name], strict=True):
            part[sorted(rows)] = good.cpu()[sorted(rows)]
        given = tuple(part.to(rig.device) for part in parts)
        poisoned = attrs.evolve(batch, tensors={cache.name: given})
        out = _attend(rig, sequences, poisoned, how, forest)
        same = out[row].view(torch.int32).tolist() == clean[row].view(torch.int32).tolist()
        assert same, (
            f"{value} in rows that row {row} does not see changed its output: {out[row].tolist()} "
            f"in place of {clean[row].tolist()}"
        )
    assert bool(clean.isfinite().all())


def _attend(
    rig: Rig,
    sequences: Sequences,
    batch: Batch,
    how: dict[str, Any],
    forest: list[list[int]] | None,
) -> Tensor:
    """Attend in a window that is aborted; return the output on the host.

    float32 ``[num_rows, num_q_heads, value_size]``; the query is the same at each call.
    """
    cache = rig.caches[0]
    shape = (batch.num_rows, cache.spec.heads * 2, cache.spec.size)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    table = sequences.table(cache).to(rig.device)
    seq_lens = torch.tensor(sequences.seq_lens, dtype=torch.int32).to(rig.device)
    with rig.open(batch, forest) as window:
        rig.stage(window, batch)
        out = window.attend(cache.ref, query.to(rig.device), table, seq_lens, **how)
        window.abort()
    assert window.fallback_reason is None
    return out.cpu()


def _seen(
    sequences: Sequences,
    cache: TestCache,
    row: int,
    sliding_window: int | None,
    forest: list[list[int]] | None,
) -> tuple[set[int], set[int]]:
    """Return the slots of the past, and the rows of the window, that a row sees."""
    batch = sequences.batch
    owners = [request for request, _ in batch.owners]
    request, first = owners[row], owners.index(owners[row])
    past = sequences.seq_lens[request] - owners.count(request)
    start = first + batch.settled[request]
    if forest is None or row < start:
        rows = [*range(first, row + 1)]
    else:
        own = branch(forest[request], row - start)
        rows = [*range(first, start), *(start + node for node in own)]
    everything: list[tuple[str, int]] = [("past", position) for position in range(past)]
    everything += [("row", each) for each in rows]
    if sliding_window is not None:
        everything = everything[-sliding_window:]
    slots = {sequences.slot(cache, request, at) for kind, at in everything if kind == "past"}
    return slots, {at for kind, at in everything if kind == "row"}


def _can_hold(cache: TestCache, value: float) -> bool:
    """Tell whether rows of this format, or the scales beside them, can hold such a value."""
    return cache.spec.fmt.scaling == "row" or _fits(cache.spec.fmt.dtype, value)


def _poison(cache: TestCache, rows: int, value: float) -> list[Tensor]:
    """Make parts for ``TestCache.rows`` filled with ``value``: codes, and scales beside them.

    Codes that cannot hold it are 1.
    """
    fmt = cache.spec.fmt
    held = value if _fits(fmt.dtype, value) else 1.0
    parts = [
        torch.full((rows, plane.heads, plane.size), held).to(fmt.dtype) for plane in cache.sides
    ]
    beside = cache.planes[len(parts) :]
    return parts + [torch.full((rows, plane.heads), value) for plane in beside]


def _fits(dtype: torch.dtype, value: float) -> bool:
    """Tell whether a dtype can hold a NaN or an infinity: float8_e4m3fn has no infinities."""
    return dtype.is_floating_point and (math.isnan(value) or dtype is not torch.float8_e4m3fn)
