"""Layers of every kind for windows that mix them: paged rows, rings, and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import pytest

from .caches import LayerSpec
from .captured_forward import CapturedForward
from .kit import Kit, KitBase
from .number_formats import FORMATS
from .replayed_layers import ReplayedSpec, StateSpec
from .rig import VARIED, AnySpec, Rig

ROWS: Final = LayerSpec(group="rows", num_blocks=12)
RING: Final = LayerSpec(
    "hnd", kind="ring", ring_size=4, block_size=3, num_blocks=14, group="ring", value_size=3
)
LATENT_RING: Final = LayerSpec(
    "latent-gapped", kind="ring", ring_size=4, block_size=3, num_blocks=13, group="ring", size=7
)
STATE: Final = LayerSpec(
    "gapped", kind="recurrent", block_size=1, num_blocks=7, group="state", size=6, value_size=5
)
PERMUTED: Final = LayerSpec(
    "permuted", FORMATS["fp32"], kind="recurrent", block_size=1, num_blocks=6, group="state"
)

#: Replayed layers whose rows do not depend on the rows before them: any of them may be kept.
REPLAYED: Final = (
    ReplayedSpec(
        (
            StateSpec("short_conv", FORMATS["bf16"], "gapped", key_size=7),
            StateSpec("mamba2", FORMATS["fp16"], key_heads=1),
        ),
        group="replayed",
    ),
    ReplayedSpec((StateSpec("mamba2", layout="permuted"),), group="replayed", num_states=8),
)

#: Rows, rings that are lapped, states that are selected, and states that replay their rows.
MIXED: Final = (ROWS, RING, STATE, LATENT_RING, PERMUTED, *REPLAYED)

#: Layers that ``undo`` can take back: rings with a slot for every row of a request.
UNDONE: Final = (
    ROWS,
    attrs.evolve(RING, ring_size=9, num_blocks=12),
    attrs.evolve(LATENT_RING, ring_size=9, num_blocks=12),
)

#: Layers by a name for their kinds; no request laps its ring, as in a captured forward.
LAYERS: Final[dict[str, Sequence[AnySpec]]] = {
    "rows": VARIED,
    "rings": UNDONE,
    "mixed": (*UNDONE, STATE, PERMUTED, *REPLAYED),
}


def need_kinds(kit: Kit, *kinds: str) -> None:
    """Skip the test for executors that do not declare these kinds of layers."""
    missing = {*kinds} - kit.capabilities.kinds
    if missing:
        pytest.skip(f"{kit.name} declares no {' or '.join(sorted(missing))} layers")


def specs_for(kit: Kit, policy: str, specs: Sequence[AnySpec] = MIXED) -> Sequence[AnySpec]:
    """Return the layers that a policy can hold, without replayed ones if none are declared.

    Skips the test for executors that declare no layers of another kind among them.

    Args:
        kit: the kit.
        policy: the policy.
        specs: the layers, of which ``undo`` holds others.
    """
    held = UNDONE if policy == "undo" else specs
    replays = "replayed" in kit.capabilities.kinds and policy == "deferred"
    held = [spec for spec in held if replays or spec.kind != "replayed"]
    need_kinds(kit, *(spec.kind for spec in held))
    return held


def mixed_rig(kit: Kit, policy: str, specs: Sequence[AnySpec] = MIXED, **config: Any) -> Rig:
    """Make a rig over layers of every kind that the policy can hold; see ``specs_for``."""
    return kit.rig(policy, specs_for(kit, policy, specs), **config)


#: The layers of a test that a policy can hold; skips the test where there are none.
Layers = Callable[[str], Sequence[AnySpec]]


class MixedKit(KitBase):
    """Tests that ask for ``layers`` run over rows, over rings, and over every kind together.

    Tests of single windows ask for ``specs`` or ``lapping``, where a request may lap its ring.
    In a ring or state a write evicts a row that no counter restores. The replay oracle writes row
    after row, so a slot of the oracle holds its last kept row by itself; laps of a ring and states
    that replace each other need no rule of their own.
    """

    @pytest.fixture(params=["rows", "every-kind"])
    def specs(self, kit: Kit, policy: str, request: pytest.FixtureRequest) -> Sequence[AnySpec]:
        """Supply layers of rows; then layers of every kind that the policy holds."""
        return VARIED if request.param == "rows" else specs_for(kit, policy)

    @pytest.fixture
    def lapping(self, kit: Kit, policy: str, specs: Sequence[AnySpec]) -> Rig:
        """Make a rig over ``specs``, for tests that want nothing else of it."""
        return kit.rig(policy, specs)

    @pytest.fixture(params=LAYERS)
    def layers(self, kit: Kit, request: pytest.FixtureRequest) -> Layers:
        """Supply, for each name in ``LAYERS`` in turn, a function from a policy to the layers.

        The function skips the test where the policy or the executor cannot hold such layers.
        """

        def layers(policy: str) -> Sequence[AnySpec]:
            """Return the layers that the policy can hold, or skip the test."""
            if (policy, request.param) == ("undo", "mixed"):
                pytest.skip("undo holds no states")
            specs = LAYERS[request.param]
            return specs if request.param == "rows" else specs_for(kit, policy, specs)

        return layers

    @pytest.fixture
    def mixed(self, kit: Kit, policy: str, layers: Layers) -> Rig:
        """Make a rig over the layers of each name in ``LAYERS``, under each policy for them."""
        return kit.rig(policy, layers(policy))

    @pytest.fixture
    def forward(self, mixed: Rig) -> CapturedForward:
        """Make a captured forward of the rig over these layers."""
        return CapturedForward(mixed)
