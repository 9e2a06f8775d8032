"""Rings and states by themselves: laps, layouts, and what ``undo`` refuses; see ``MixedKit``."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

from ..errors import BackendUnavailableError, CapacityError
from .kit import Kit, KitBase
from .mixed_layers import (
    PERMUTED,
    RING,
    STATE,
    mixed_rig,
    specs_for,
)
from .number_formats import FORMATS


class Overwriting(KitBase):
    """Exactness of rings and states of every size and layout."""

    @pytest.mark.parametrize("ring_size", range(1, 6))
    def test_wrap_around(self, kit: Kit, ring_size: int) -> None:
        """Commits are exact for every number of rows around one and two laps of a ring.

        Every number of the drafts is accepted, each by a request of its own; of some drafts a mask
        keeps the first and the last alone.
        """
        most = 2 * ring_size + 1
        ring = attrs.evolve(RING, ring_size=ring_size, num_blocks=2 * (most + 1))
        state = attrs.evolve(STATE, num_blocks=most + 1)
        rig = mixed_rig(kit, "deferred", [ring, state], max_rows=256)
        for settled, drafts in itertools.product((0, 1, ring_size), range(most + 1)):
            counts = range(drafts + 1)  # one request for each number that can be accepted
            batch = rig.batch(([settled] * len(counts), [drafts] * len(counts)), padding=0.0)
            rig.commit(batch, counts, f"{settled} settled, {drafts} drafts")
        batch = rig.batch(([0], [most]), padding=0.0)
        kept = [True, *[False] * (most - 2), True]  # two laps apart, with a gap between them
        rig.commit(batch, given=torch.tensor(kept).to(rig.device), kept=kept)

    @pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp8_e4m3-head", "int8-tensor", "int8-row"])
    @pytest.mark.parametrize("layout", ["plain", "packed", "transposed", "interleaved", "latent"])
    def test_layouts(self, kit: Kit, layout: str, fmt: str) -> None:
        """Commits are exact with any strides and formats in rings, and any strides in states.

        The states have more than 1 024 elements.
        """
        state = fmt if not FORMATS[fmt].quantised else "bf16"
        rig = mixed_rig(
            kit,
            "deferred",
            [
                attrs.evolve(RING, layout=layout, fmt=FORMATS[fmt]),
                attrs.evolve(STATE, layout=layout, fmt=FORMATS[state], heads=3, size=350),
                attrs.evolve(PERMUTED, fmt=FORMATS[state], heads=3, size=180),
            ],
        )
        for payload in ("native", "cast"):
            batch = rig.batch(((1, 2), (6, 1)), payload=payload)
            rig.commit(batch, when=payload)

    def test_undo_refuses_what_it_cannot_take_back(self, kit: Kit) -> None:
        """Undo refuses a window that laps a ring (CapacityError), and a manager with a state.

        The latter with BackendUnavailableError; both say the reason.
        """
        rig = mixed_rig(kit, "undo")
        with pytest.raises(CapacityError, match="more rows than its ring"):
            rig.open(rig.batch(((1,), (9,)), padding=0.0))
        assert rig.manager.current is None
        with pytest.raises(BackendUnavailableError, match="recurrent state"):
            kit.rig("undo", specs_for(kit, "deferred"))
