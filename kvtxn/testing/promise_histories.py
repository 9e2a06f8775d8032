"""Rings and states over many windows: their content follows only from the accepted tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import attrs
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from ..window_transitions import WindowState
from .batches import Batch
from .caches import LayerSpec
from .faults import MOMENTS, Faults
from .histories import Histories, attend_and_compare
from .kit import TRANSACTIONAL, Kit, KitBase
from .mixed_layers import need_kinds
from .number_formats import FORMATS
from .rig import Rig
from .trees import FORESTS, lengths

_REQUESTS: Final = 2

#: Settled and draft tokens of each request, and the number accepted.
_TOKENS: Final = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))

_STEPS: Final = st.lists(
    st.tuples(
        st.lists(_TOKENS, min_size=_REQUESTS, max_size=_REQUESTS),
        st.sampled_from(["commit", "commit", "commit", "mask", "abort", "restart"]),
        st.none()
        | st.none()
        | st.tuples(
            st.sampled_from(["stage", "commit", "save", "restore"]),
            st.sampled_from(MOMENTS),
            st.integers(1, 4),
        ),
    ),
    min_size=1,
    max_size=7,
)

#: Tokens before the window, as a function of the ring's size: empty, half full, wrapped.
_PASTS: Final[dict[str, Callable[[int], tuple[int, ...]]]] = {
    "empty": lambda size: (0, 1),
    "almost-full": lambda size: (size - 1, size),
    "wrapped-once": lambda size: (size + 1, 2 * size - 1),
    "wrapped": lambda size: (2 * size, 5 * size + 2),
}


def _layers(policy: str, ring_size: int, fmt: str) -> list[LayerSpec]:
    """Describe rings, paged rows and, if deferred, states; undo has rings with room for all."""
    size = ring_size if policy == "deferred" else ring_size + 9
    rows = LayerSpec(fmt=FORMATS[fmt], group="rows", heads=1, size=2, num_blocks=40)
    ring = attrs.evolve(
        rows,
        layout="hnd",
        group="ring",
        kind="ring",
        ring_size=size,
        block_size=2,
        num_blocks=-(-size // 2) * _REQUESTS,
    )
    specs = [rows, ring]
    if policy == "deferred":
        state = attrs.evolve(
            rows, layout="gapped", kind="recurrent", group="state", block_size=1, num_blocks=3
        )
        specs.append(attrs.evolve(state, fmt=FORMATS["fp32"], size=3))
        specs.append(attrs.evolve(state, layout="permuted", fmt=FORMATS["bf16"], heads=2))
    return specs


class LongRuns(KitBase):
    """Many windows in a row, with laps, aborts, faults and requests that come and go."""

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_random_histories(
        self,
        kit: Kit,
        history_settings: hypothesis.settings,
        policy: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """After each window every word follows from the lists of accepted tokens.

        Windows are random; some are aborted, some fail and fall back, some requests begin anew.
        """
        caplog.set_level(logging.ERROR, logger="kvtxn")
        need_kinds(kit, "ring", *["recurrent"] * (policy == "deferred"))

        @history_settings
        @hypothesis.given(
            steps=_STEPS,
            ring_size=st.integers(1, 7),
            fmt=st.sampled_from(["bf16", "fp32", "int8-head"]),
            seed=st.integers(0, 2**20),
        )
        def run(steps: list[Any], ring_size: int, fmt: str, seed: int) -> None:
            """Serve one random history."""
            _serve(kit, policy, _layers(policy, ring_size, fmt), steps, seed)

        run()

    @pytest.mark.parametrize("past", _PASTS)
    @pytest.mark.parametrize("extra", [0, 1, 5])
    @pytest.mark.parametrize("window", [1, 3, 4])
    def test_attention_to_a_ring(
        self,
        kit: Kit,
        attention_tolerance: float,
        policy: str,
        window: int,
        extra: int,
        past: str,
    ) -> None:
        """Attention to a ring equals attention over all tokens so far, laps included."""
        kit.need("attention")
        need_kinds(kit, "ring")
        shape = ((extra + 1, 1 if extra else 0), (0, 2 * window + 3 if extra < 5 else 3))
        rows = max(shape[0]) if policy == "deferred" else max(map(sum, zip(*shape, strict=True)))
        size = window + max(rows, 1) - 1
        for layout, fmt in (("hnd", "fp32"), ("gapped", "fp8_e4m3-head")):
            spec = LayerSpec(layout, FORMATS[fmt], kind="ring", ring_size=size, window=window)
            spec = attrs.evolve(spec, block_size=3, num_blocks=2 * -(-size // 3))
            rig = kit.rig(policy, [spec], max_rows=128)
            attend_and_compare(rig, shape, _PASTS[past](size), attention_tolerance)

    @pytest.mark.parametrize("name", ["one", "uneven", "late-branch"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_tree_attention_over_a_ring(
        self, kit: Kit, attention_tolerance: float, policy: str, name: str
    ) -> None:
        """Each branch attends to a ring as if it were alone: past, settled rows, ancestors."""
        kit.need("attention")
        need_kinds(kit, "ring")
        kit.need("trees")
        settled, forest = FORESTS[name]
        for size in (3, 8):
            most = size + max(map(sum, zip(settled, map(len, forest), strict=True)))
            spec = LayerSpec(
                "hnd",
                FORMATS["fp32"],
                kind="ring",
                ring_size=most,
                window=size,
                block_size=3,
                num_blocks=30,
            )
            for past in (0, size, 3 * most + 1):
                rig = kit.rig(policy, [spec], seed=past)
                before = (past,) * len(forest)
                shape = lengths(settled, forest)
                attend_and_compare(rig, shape, before, attention_tolerance, forest)

    def test_attention_after_a_fallback(self, kit: Kit, attention_tolerance: float) -> None:
        """After a fallback drafts still wait outside the ring: attention sees every visible row."""
        kit.need("attention")
        need_kinds(kit, "ring")
        spec = LayerSpec("plain", FORMATS["fp32"], kind="ring", ring_size=4, num_blocks=4)
        for at in ("attend", "stage"):
            rig, faults = kit.faulty_rig("deferred", [spec], on_error="fallback")
            faults.arm(at, "middle")
            attend_and_compare(rig, ((1, 1), (6, 2)), (9, 3), attention_tolerance)
            assert faults.fired


def _serve(kit: Kit, policy: str, specs: list[LayerSpec], steps: list[Any], seed: int) -> None:
    """Run windows as ``steps`` says, and compare after each; stop where a request has no room.

    A window that was aborted is compared, and then repeated and committed.
    """
    rig, faults = kit.faulty_rig(policy, specs, seed=seed, on_error="fallback")
    histories = Histories(rig, _REQUESTS)
    for tokens, outcome, fault in steps:
        if outcome == "restart":
            histories.forget(len(tokens) % _REQUESTS)
        shape = tuple(t[0] for t in tokens), tuple(t[1] for t in tokens)
        counts = [min(accepted, drafts) for _, drafts, accepted in tokens]
        longest = max(len(past) + sum(t) for past, t in zip(histories.past, tokens, strict=True))
        if longest > histories.room:
            return
        batch = histories.batch(shape)
        if fault is not None:
            faults.arm(*fault)
        what = f"{outcome} of {shape}, {counts} accepted, fault {fault}"
        if outcome == "abort":
            if _falls_back(rig, batch, None, faults):
                histories.adopt_paged(batch)
            settled = histories.settled(batch)
            histories.check(what, settled)
            what = f"repeated after {what}"
        accepted = rig.accepted(counts)
        if outcome == "mask":
            accepted = torch.tensor(batch.kept(counts), dtype=torch.bool).to(rig.device)
        fell_back = _falls_back(rig, batch, accepted, faults)
        faults.disarm()
        histories.extend(batch, batch.kept(counts))
        if fell_back:
            histories.adopt_paged(batch)
        histories.check(what)


def _falls_back(rig: Rig, batch: Batch, accepted: Tensor | None, faults: Faults) -> bool:
    """Run a window, and commit or, without an acceptance, abort it; tell whether it fell back.

    It has to do so if and only if a fault fired.
    """
    fired = len(faults.fired)
    with rig.open(batch) as window:
        rig.stage(window, batch)
        if accepted is None:
            window.abort()
        else:
            window.commit(accepted)
    fell_back = window.state is WindowState.FELL_BACK
    assert fell_back == (len(faults.fired) > fired)
    return fell_back
