"""Own writes under a tree mask: a draft row sees the past, its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from .caches import KEY_VALUE, LayerSpec
from .kit import POLICIES, Kit, KitBase
from .naive import attention, make_sequences
from .number_formats import FORMATS
from .promise_own_writes import SETTINGS
from .rig import Rig
from .trees import FORESTS, lengths

#: Trees, and tokens before their windows.
PASTS: Final[dict[str, tuple[str, Sequence[int]]]] = {
    "one": ("one", (6,)),
    "uneven": ("uneven", (7, 0, 12)),
    "no-drafts": ("no-drafts", (3, 9, 0)),
    "only-roots": ("only-roots", (0, 5)),
    "chains": ("chains", (4, 1)),
    "late-branch": ("late-branch", (11, 2)),
    "no-requests": ("no-requests", ()),
}


def _spec(layout: str = "plain", fmt: str = "bf16", **rest: Any) -> LayerSpec:
    return LayerSpec(layout, FORMATS[fmt], **({"block_size": 4, "num_blocks": 24} | rest))


class TreeAttention(KitBase):
    """Each branch attends as if it were alone; positions follow depth, not the row's number."""

    @pytest.mark.parametrize("how", SETTINGS)
    @pytest.mark.parametrize("past", PASTS)
    @pytest.mark.parametrize("policy", POLICIES)
    def test_tree_mask(
        self, kit: Kit, attention_tolerance: float, policy: str, past: str, how: str
    ) -> None:
        """Grouped queries, sliding windows and soft caps over uneven trees."""
        kit.need_attention()
        kit.need_trees()
        specs = [
            _spec(fmt="fp32", size=8),
            _spec(fmt="fp32", heads=1, size=8, value_size=4),
        ]
        _attend(kit.rig(policy, specs), *PASTS[past], attention_tolerance, SETTINGS[how])

    @pytest.mark.parametrize("layout", KEY_VALUE)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_tree_mask_layouts_and_formats(
        self, kit: Kit, attention_tolerance: float, fmt: str, layout: str
    ) -> None:
        """Staged rows are read as the cache would store them, in groups of their own."""
        kit.need_attention()
        kit.need_trees()
        specs = [
            _spec(layout, fmt, size=8),
            _spec(layout, fmt, heads=3, size=6, group="b", block_size=2, num_blocks=48),
        ]
        rig = kit.rig("deferred", specs)
        for payload in ("native", "cast"):
            _attend(rig, *PASTS["late-branch"], attention_tolerance, {}, payload)

    @pytest.mark.parametrize("nodes", [17, 40])
    def test_a_wide_tree(self, kit: Kit, attention_tolerance: float, nodes: int) -> None:
        """More nodes than a block of a kernel has rows."""
        kit.need_attention()
        kit.need_trees()
        rig = kit.rig("deferred", [_spec(fmt="fp32", size=8, num_blocks=40)], seed=nodes)
        forest = [[rig.rng.randint(-1, node - 1) for node in range(n)] for n in (nodes, 3)]
        for how in ({}, {"sliding_window": 5}):
            _attend_forest(rig, (2, 1), forest, (5, 9), attention_tolerance, how)


def _attend(
    rig: Rig,
    name: str,
    prefixes: Sequence[int],
    tolerance: float,
    settings: dict[str, Any],
    payload: str = "native",
) -> None:
    settled, forest = FORESTS[name]
    _attend_forest(rig, settled, forest, prefixes, tolerance, settings, payload)


def _attend_forest(
    rig: Rig,
    settled: Sequence[int],
    forest: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    tolerance: float,
    settings: dict[str, Any],
    payload: str = "native",
) -> None:
    """Stage, attend and compare, each row with a sequence that has its own branch only."""
    sequences = make_sequences(rig, lengths(settled, forest), prefixes, payload)
    batch = sequences.batch
    with rig.open(batch, forest) as window:
        for index, cache in enumerate(rig.caches):
            rig.stage(window, batch, [index])
            generator = torch.Generator().manual_seed(index)
            shape = (batch.num_rows, cache.spec.heads * 2, cache.spec.size)
            query = torch.randn(shape, generator=generator)
            table = sequences.table(cache).to(rig.device)
            seq_lens = torch.tensor(sequences.seq_lens, dtype=torch.int32).to(rig.device)
            out = window.attend(cache.ref, query.to(rig.device), table, seq_lens, **settings)
            full = rig.truth.copy()
            for slot, row in zip(
                batch.slots[cache.spec.group], batch.rows[cache.name], strict=True
            ):
                full.write(cache.name, slot, row)
            expected = attention(full, cache, sequences, query, forest=forest, **settings)
            assert out.shape == expected.shape
            wrong = (out.double().cpu() - expected).abs()
            scale = expected.abs().max().clamp(min=1.0) if expected.numel() else 1.0
            assert bool((wrong <= tolerance * scale).all()), (
                f"{cache.name} ({cache.spec.layout}, {cache.spec.fmt.name}) is off by "
                f"{float(wrong.max()):.3g} where {tolerance * float(scale):.3g} is allowed"
            )
        assert window.fallback_reason is None
        window.abort()
