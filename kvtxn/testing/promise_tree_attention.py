"""Own writes under a tree mask: a draft row sees the past, its ancestors and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from .caches import KEY_VALUE, LayerSpec
from .kit import Kit, KitBase
from .number_formats import FORMATS
from .promise_own_writes import SETTINGS, attend_and_compare
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
    """Each branch attends as if it were alone; positions follow depth, not row numbers."""

    @pytest.mark.parametrize("how", SETTINGS)
    @pytest.mark.parametrize("past", PASTS)
    def test_tree_mask(
        self, kit: Kit, attention_tolerance: float, policy: str, past: str, how: str
    ) -> None:
        """Grouped queries, sliding windows and soft caps over uneven trees."""
        kit.need("attention", "trees")
        specs = [
            _spec(fmt="fp32", size=8),
            _spec(fmt="fp32", heads=1, size=8, value_size=4),
        ]
        name, prefixes = PASTS[past]
        rig = kit.rig(policy, specs)
        _attend(rig, *FORESTS[name], prefixes, attention_tolerance, SETTINGS[how])

    @pytest.mark.parametrize("layout", KEY_VALUE)
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_tree_mask_layouts_and_formats(
        self, kit: Kit, attention_tolerance: float, fmt: str, layout: str
    ) -> None:
        """Staged rows are read as the cache would store them, in groups of their own."""
        kit.need("attention", "trees")
        specs = [
            _spec(layout, fmt, size=8),
            _spec(layout, fmt, heads=3, size=6, group="b", block_size=2, num_blocks=48),
        ]
        rig = kit.rig("deferred", specs)
        name, prefixes = PASTS["late-branch"]
        for payload in ("native", "cast"):
            _attend(rig, *FORESTS[name], prefixes, attention_tolerance, {}, payload)

    @pytest.mark.parametrize("nodes", [17, 40])
    def test_a_wide_tree(self, kit: Kit, attention_tolerance: float, nodes: int) -> None:
        """More nodes than a block of a kernel has rows."""
        kit.need("attention", "trees")
        rig = kit.rig("deferred", [_spec(fmt="fp32", size=8, num_blocks=40)], seed=nodes)
        forest = [[rig.rng.randint(-1, node - 1) for node in range(n)] for n in (nodes, 3)]
        for how in ({}, {"sliding_window": 5}):
            _attend(rig, (2, 1), forest, (5, 9), attention_tolerance, how)


def _attend(
    rig: Rig,
    settled: Sequence[int],
    forest: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    tolerance: float,
    settings: dict[str, Any],
    payload: str = "native",
) -> None:
    """Attend, and compare each row with a sequence that has its own branch only."""
    shape = lengths(settled, forest)
    attend_and_compare(rig, shape, prefixes, tolerance, settings, payload, forest=forest)
