"""Promise 1 at the sizes of engines: more layers, requests, drafts and bytes than a fixed table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from .batches import random_counts
from .caches import LayerSpec
from .kit import Kit, KitBase
from .number_formats import FORMATS

_SMALL: Final = LayerSpec(heads=1, size=2, block_size=4, num_blocks=4)

#: As many layers as deep models have, in two groups, and not all alike.
_LAYERS: Final = [
    attrs.evolve(_SMALL, group=("full", "sliding")[index % 2], size=2 + index % 3)
    for index in range(70)
]

#: Rows of thousands of elements: of 16 heads, of a width that nothing divides, of one latent.
_WIDE: Final = [
    LayerSpec(heads=16, size=128, block_size=4, num_blocks=3),
    LayerSpec("hnd", FORMATS["fp32"], group="b", heads=9, size=131, block_size=5, num_blocks=2),
    LayerSpec("latent", size=2305, block_size=4, num_blocks=3),
    LayerSpec("packed", FORMATS["fp8_e4m3-row"], heads=5, size=256, block_size=4, num_blocks=3),
]


class Sizes(KitBase):
    """Exactness has no upper bound but ``max_rows``."""

    def test_many_layers(self, kit: Kit, policy: str) -> None:
        """The last of many layers is committed and restored like the first."""
        # Writing through is a launch per layer, which an interpreter of kernels feels.
        layers = _LAYERS if policy == "deferred" else _LAYERS[:20]
        _commit_and_abort(kit, policy, layers, ((0, 0), (3, 2)))

    def test_many_requests(self, kit: Kit, policy: str) -> None:
        """The count of every request holds, the last one included."""
        spec = attrs.evolve(_SMALL, num_blocks=140)
        _commit_and_abort(kit, policy, [spec], ((1,) * 260, (1,) * 260), max_rows=520)

    def test_long_drafts(self, kit: Kit, policy: str) -> None:
        """A request may have many drafts, as prompt lookup proposes them."""
        spec = attrs.evolve(_SMALL, num_blocks=60)
        _commit_and_abort(kit, policy, [spec], ((1, 0, 1), (140, 40, 3)), max_rows=185)

    def test_wide_rows(self, kit: Kit, policy: str) -> None:
        """Every element of a wide row is committed."""
        _commit_and_abort(kit, policy, _WIDE, ((1, 1), (3, 2)))


def _commit_and_abort(
    kit: Kit,
    policy: str,
    specs: Sequence[LayerSpec],
    shape: tuple[Sequence[int], Sequence[int]],
    **config: Any,
) -> None:
    """Commit a window with every second request accepted whole, abort another, and compare."""
    rig = kit.rig(policy, specs, **config)
    batch = rig.batch(shape)
    counts = random_counts(batch, rig.rng)
    counts[::2] = batch.draft_len[::2]
    rig.commit(batch, counts, f"after commit of {sum(counts)} drafts")
    if policy == "direct":
        return
    batch = rig.batch(shape)
    rig.abort(batch, when="after abort")
