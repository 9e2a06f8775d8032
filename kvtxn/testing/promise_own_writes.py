"""Promise 4: attention through the window is attention over a cache with all rows written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest
import torch
from torch import Tensor

from .batches import spread, turned
from .caches import KEY_VALUE, LayerSpec
from .kit import TRANSACTIONAL, Kit, KitBase
from .naive import attention, make_sequences
from .number_formats import FORMATS
from .rig import Rig
from .trees import FORESTS, lengths

#: Settled and draft rows, and tokens before them: empty prefixes, full blocks, odd ends.
PASTS: Final[dict[str, tuple[tuple[Sequence[int], Sequence[int]], Sequence[int]]]] = {
    "one": (((1,), (3,)), (6,)),
    "from-nothing": (((1, 1), (2, 0)), (0, 0)),
    "uneven": (((1, 1, 1), (4, 0, 2)), (7, 1, 12)),
    "none-settled": (((0, 0), (3, 1)), (0, 9)),
    "many-settled": (((4, 2), (1, 3)), (3, 5)),
    "no-drafts": (((1, 3), (0, 0)), (5, 2)),
    "an-empty-request": (((0, 1), (0, 2)), (4, 4)),
    "nothing": (((), ()), ()),
}

#: Arguments of attention beside query, table and lengths.
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "scale": {"scale": -12.0},  # of large scores, and turned round
    "window-1": {"sliding_window": 1},
    "window-3": {"sliding_window": 3},
    "window-wide": {"sliding_window": 99},
    "soft-cap": {"soft_cap": 1.5},
    "all": {"scale": 0.9, "sliding_window": 4, "soft_cap": 2.0},
}


#: Tokens before the windows of the trees in ``FORESTS``.
_TREE_PASTS: Final[dict[str, Sequence[int]]] = {
    "one": (6,),
    "uneven": (7, 0, 12),
    "no-drafts": (3, 9, 0),
    "only-roots": (0, 5),
    "chains": (4, 1),
    "late-branch": (11, 2),
    "no-requests": (),
}


def _spec(layout: str = "plain", fmt: str = "bf16", **rest: Any) -> LayerSpec:
    """Describe a layer of a layout and format, with 24 blocks of 4 slots unless said."""
    return LayerSpec(layout, FORMATS[fmt], **({"block_size": 4, "num_blocks": 24} | rest))


#: Two layers whose queries are grouped, and whose keys and values differ in one.
_GROUPED: Final = (
    _spec(fmt="fp32", size=8),
    _spec(fmt="fp32", heads=1, size=8, value_size=4),
)


def _two_groups(layout: str, fmt: str) -> list[LayerSpec]:
    """Describe two layers of one layout and format, with blocks of their own."""
    other = _spec(layout, fmt, heads=3, size=6, group="b", block_size=5, num_blocks=20)
    return [_spec(layout, fmt, size=8), other]


#: Layouts and formats: every pair for staged rows, fewer for rows in the cache.
_STORED: Final = [
    *itertools.product(["deferred"], FORMATS, KEY_VALUE),
    *(
        (policy, fmt, layout)
        for policy in ("undo", "direct")
        for fmt, layout in zip(FORMATS, itertools.cycle(KEY_VALUE), strict=False)
    ),
]


def _slice(dense: Tensor) -> Tensor:
    """Return a copy as a slice of a wider tensor, like a part of a fused projection."""
    wide = dense.new_zeros(dense.shape[0], dense.shape[1] + 3, *dense.shape[2:])
    view = wide[:, 2:-1]
    view.copy_(dense)
    return view


#: Heads, and query heads of each, by layer: one to one, one for all, groups of four and of eight.
_GROUPINGS: Final = ((3, 1), (1, 8), (2, 4), (2, 8))


class OwnWrites(KitBase):
    """A verify pass sees its own drafts as if they were in the cache."""

    @pytest.mark.parametrize("how", SETTINGS)
    @pytest.mark.parametrize("past", PASTS)
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_lengths_and_settings(
        self, kit: Kit, attention_tolerance: float, policy: str, past: str, how: str
    ) -> None:
        """Grouped queries over mixed lengths, with sliding windows and soft caps, are right."""
        kit.need("attention")
        rig = kit.rig(policy, _GROUPED)
        attend_and_compare(rig, *PASTS[past], attention_tolerance, SETTINGS[how])

    @pytest.mark.parametrize("how", [{}, {"sliding_window": 90}], ids=["plain", "window-90"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_groupings_and_long_prefixes(
        self, kit: Kit, attention_tolerance: float, policy: str, how: dict[str, Any]
    ) -> None:
        """Query heads find their KV head, and a prefix of many blocks is read to its start."""
        kit.need("attention")
        specs = [_spec(fmt="fp32", heads=heads, size=8, num_blocks=60) for heads, _ in _GROUPINGS]
        specs[0] = attrs.evolve(specs[0], group="b", block_size=20, num_blocks=16)
        rig = kit.rig(policy, specs)
        groups = [queries for _, queries in _GROUPINGS]
        past = (((1, 1), (3, 1)), (150, 67))
        attend_and_compare(rig, *past, attention_tolerance, how, groups=groups)

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_strided_arguments(self, kit: Kit, attention_tolerance: float, policy: str) -> None:
        """Queries, block tables and lengths may be strided views; heads may be wide.

        Keys may be wider than values, and values wider than keys.
        """
        kit.need("attention")
        sizes = ((8, 8), (16, 136), (136, 72))
        rig = kit.rig(policy, [_spec(fmt="fp16", size=k, value_size=v) for k, v in sizes])
        views = (_slice, turned, spread)
        attend_and_compare(rig, *PASTS["uneven"], attention_tolerance, {}, views=views)

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_many_requests_and_rows(
        self, kit: Kit, attention_tolerance: float, policy: str
    ) -> None:
        """Attention is right for a request of 70 settled rows, and for the last of 70 requests.

        That one has a prefix of 1100 tokens. Queries of double precision get an output of their
        dtype.
        """
        kit.need("attention")
        rig = kit.rig(policy, [_spec(fmt="fp32", heads=1, size=4, num_blocks=370)], max_rows=144)
        past = (((70, *[1] * 69), (1, *[0] * 68, 2)), (5, *[0] * 68, 1100))
        attend_and_compare(rig, *past, attention_tolerance, {}, dtype=torch.float64)

    @pytest.mark.parametrize(("policy", "fmt", "layout"), _STORED)
    def test_layouts_and_formats(
        self, kit: Kit, attention_tolerance: float, policy: str, fmt: str, layout: str
    ) -> None:
        """Own rows are read as the cache would store them: quantised once, scaled back.

        For rows given in the cache's dtype, and for wider ones that the library encodes.
        """
        kit.need("attention")
        specs = _two_groups(layout, fmt)
        rig = kit.rig(policy, specs)
        for payload in ("native", "cast"):
            attend_and_compare(rig, *PASTS["uneven"], attention_tolerance, {}, payload)

    @pytest.mark.parametrize("fmt", ["fp16", "bf16"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_queries(
        self, kit: Kit, policy: str, dtype: torch.dtype, fmt: str
    ) -> None:
        """The output of 16-bit queries has their dtype, and is right to 2 %."""
        kit.need("attention")
        rig = kit.rig(policy, [_spec(fmt=fmt, size=16)])
        attend_and_compare(rig, *PASTS["uneven"], 2e-2, {}, dtype=dtype)

    def test_reading_writes_nothing(self, kit: Kit, policy: str) -> None:
        """Attention between the stagings changes neither caches nor commit nor counters."""
        kit.need("attention")
        rig = kit.rig(policy, [_spec(), _spec("hnd")])
        sequences = make_sequences(rig, *PASTS["uneven"], "native")
        batch = sequences.batch
        with rig.open(batch) as window:
            for index, ref in enumerate(rig.refs):
                rig.stage(window, batch, [index])
                rig.expect_staged(batch, [index])
                query = torch.ones(batch.num_rows, 2, 5, device=kit.device)
                table = sequences.table(rig.caches[index]).to(kit.device)
                window.attend(ref, query, table, rig.accepted(sequences.seq_lens))
                rig.check(f"after attention to layer {index}")
            window.commit([2, 0, 1])
        rig.expect_committed(batch, batch.kept([2, 0, 1]))
        rig.check("after commit")


class TreeAttention(KitBase):
    """Each branch attends as if it were alone; positions follow depth, not row numbers."""

    @pytest.mark.parametrize("how", SETTINGS)
    @pytest.mark.parametrize("past", _TREE_PASTS)
    def test_tree_mask(
        self, kit: Kit, attention_tolerance: float, policy: str, past: str, how: str
    ) -> None:
        """A row sees the past, settled rows and its own branch alone, in uneven trees.

        With grouped queries, sliding windows that count along the branch, and soft caps.
        """
        kit.need("attention", "trees")
        settled, forest = FORESTS[past]
        batch = lengths(settled, forest), _TREE_PASTS[past]
        rig = kit.rig(policy, _GROUPED)
        attend_and_compare(rig, *batch, attention_tolerance, SETTINGS[how], forest=forest)

    @pytest.mark.parametrize("layout", KEY_VALUE)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_tree_mask_layouts_and_formats(
        self, kit: Kit, attention_tolerance: float, fmt: str, layout: str
    ) -> None:
        """Staged nodes of a tree are read as the cache would store them, in two groups."""
        kit.need("attention", "trees")
        specs = _two_groups(layout, fmt)
        rig = kit.rig("deferred", specs)
        settled, forest = FORESTS["late-branch"]
        batch = lengths(settled, forest), _TREE_PASTS["late-branch"]
        for payload in ("native", "cast"):
            attend_and_compare(rig, *batch, attention_tolerance, {}, payload, forest=forest)

    @pytest.mark.parametrize("nodes", [17, 70])
    def test_a_wide_tree(self, kit: Kit, attention_tolerance: float, nodes: int) -> None:
        """Attention is right in trees with more nodes than a block of a kernel has rows."""
        kit.need("attention", "trees")
        layer = _spec(fmt="fp32", size=8, num_blocks=40)
        rig = kit.rig("deferred", [layer], seed=nodes, max_rows=80)
        forest = [[rig.rng.randint(-1, node - 1) for node in range(n)] for n in (nodes, 3)]
        shape = lengths((2, 1), forest)
        for how in ({}, {"sliding_window": 5}):
            attend_and_compare(rig, shape, (5, 9), attention_tolerance, how, forest=forest)


def attend_and_compare(
    rig: Rig,
    shape: tuple[Sequence[int], Sequence[int]],
    prefixes: Sequence[int],
    tolerance: float,
    settings: dict[str, Any],
    payload: str = "native",
    dtype: torch.dtype = torch.float32,
    forest: Sequence[Sequence[int]] | None = None,
    groups: Sequence[int] = (2,),
    views: Sequence[Callable[[Tensor], Tensor]] = (),
) -> None:
    """Stage, attend and compare, layer by layer as a forward does; then abort.

    The comparison is with attention over a cache with all rows written. An AssertionError names the
    layer that is off, by how much, or an output of another shape or dtype.

    Args:
        rig: the layers.
        shape: settled and draft rows per request.
        prefixes: tokens before the window, per request.
        tolerance: the allowed error, relative to the values.
        settings: further arguments of attention.
        payload: see ``make_batch``.
        dtype: the dtype of the queries.
        forest: parents of each request's drafts; each row is compared with attention over a
            sequence that has its own branch only.
        groups: query heads of each KV head, by layer; repeated if there are more layers.
        views: by layer, the function that makes query and block table strided; lengths are always
            strided.
    """
    sequences = make_sequences(rig, shape, prefixes, payload)
    batch = sequences.batch
    full = rig.truth.copy()
    for cache in rig.caches:
        slots = batch.slots[cache.spec.group]
        for slot, row in zip(slots, batch.rows[cache.name], strict=True):
            full.write(cache.name, slot, row)
    with rig.open(batch, forest) as window:
        for index, cache in enumerate(rig.caches):
            rig.stage(window, batch, [index])
            generator = torch.Generator().manual_seed(index)
            heads = cache.spec.heads * groups[index % len(groups)]
            query_shape = (batch.num_rows, heads, cache.spec.size)
            query = torch.randn(query_shape, generator=generator).to(dtype)
            kind = (torch.int32, torch.int64)[index % 2]
            table = sequences.table(cache).to(rig.device, kind)
            seq_lens = torch.tensor(sequences.seq_lens, dtype=kind).to(rig.device)
            given = query.to(rig.device)
            if views:
                given, table, seq_lens = views[index](given), views[index](table), spread(seq_lens)
            out = window.attend(cache.ref, given, table, seq_lens, **settings)
            stored = sequences.stored(full, cache)
            expected = attention(cache, stored, batch, query, forest=forest, **settings)
            assert out.dtype is dtype
            assert out.shape == expected.shape
            wrong = (out.double().cpu() - expected).abs()
            scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
            assert bool((wrong <= tolerance * scale).all()), (
                f"{cache.name} ({cache.spec.layout}, {cache.spec.fmt.name}) is off by "
                f"{float(wrong.max()):.3g} where {tolerance * float(scale):.3g} is allowed"
            )
        assert window.fallback_reason is None
        window.abort()
