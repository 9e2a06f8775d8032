"""Promises 2 and 7 for replayed layers: after any failure a state takes its rows in once.

A row can be repaired by writing it again, a state cannot, so these tests look for rows that a
state takes in twice, or only in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from ..states import WindowState
from ..window import Window
from .faults import MOMENTS, Faults, InjectedFault, faulty
from .kit import Kit, KitBase
from .promise_replay import EVERY, SHAPES
from .replay_rig import ReplayBatch, ReplayRig
from .rig import registered

#: Method, moment and call at which an executor fails.
_FAULTS: Final = [
    (at, when, nth) for at, nth in (("stage", 1), ("advance", 1), ("commit", 1)) for when in MOMENTS
]

_failing = pytest.mark.parametrize(
    ("at", "when", "nth"), _FAULTS, ids=["-".join(map(str, fault)) for fault in _FAULTS]
)


class ReplayFaults(KitBase):
    """Fallbacks and errors where commit replays rows."""

    @pytest.mark.parametrize("shape", ["uneven", "none-settled", "many-settled"])
    @pytest.mark.parametrize("committed", [True, False])
    @_failing
    def test_a_fallback_replays_once(
        self, kit: Kit, at: str, when: str, nth: int, committed: bool, shape: str
    ) -> None:
        """After a fallback states and rows are exact, committed or aborted; later ones too."""
        rig, faults = faulty_replay_rig(kit, "fallback")
        for armed in (True, False):
            batch = rig.batch(SHAPES[shape])
            if armed:
                faults.arm(at, when, nth)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                if committed:
                    window.commit(rig.accepted(batch.counts))
                else:
                    window.abort()
            expected = WindowState.COMMITTED if committed else WindowState.ABORTED
            fired = armed and bool(faults.fired)
            assert window.state is (WindowState.FELL_BACK if fired else expected)
            faults.disarm()
            _expect(rig, batch, committed, written_through=fired and at == "stage")
            rig.check(f"{at} failed: {fired}, committed: {committed}")
        drafts, kept = 2 * sum(batch.rows.draft_len), _kept_so_far(rig)
        assert kept[0] == drafts
        assert kept[1] + kept[2] == drafts

    @pytest.mark.parametrize("shape", ["uneven", "none-settled", "many-settled"])
    @_failing
    def test_an_error_takes_no_draft_in(
        self, kit: Kit, at: str, when: str, nth: int, shape: str
    ) -> None:
        """on_error="raise": every state is as it was before the window, settled rows included."""
        rig, faults = faulty_replay_rig(kit, "raise")
        batch = rig.batch(SHAPES[shape])
        staged: list[int] = []
        faults.arm(at, when, nth)
        try:
            with rig.open(batch) as window:
                for index in range(len(rig.refs)):
                    rig.stage(window, batch, [index])
                    staged.append(index)
                window.commit(rig.accepted(batch.counts))
        except InjectedFault:
            assert faults.fired
            assert window.state is WindowState.ABORTED
        else:
            assert not faults.fired
            rig.expect_ended(batch)
            rig.check("nothing failed")
            return
        rig.expect_staged(batch, staged)
        if at == "stage":  # a paged row may be half written where its own staging failed
            rig.truth = type(rig.truth)(rig.caches)
        rig.check(f"{at} failed")

    def test_the_caller_gives_up(self, kit: Kit) -> None:
        """After ``fall_back`` commit still advances the states that were staged."""
        rig, _ = faulty_replay_rig(kit, "fallback")
        batch = rig.batch(SHAPES["uneven"])
        with rig.open(batch) as window:
            rig.stage(window, batch, range(len(EVERY)))
            window.fall_back("forward", ValueError("no such kernel"))
            window.commit(rig.accepted(batch.counts))
        rig.expect_ended(batch, None, range(len(EVERY)))
        rig.check("the caller gave up")

    def test_the_body_raises(self, kit: Kit) -> None:
        """An exception in the ``with`` block aborts: no state changes, and the step is repeated."""
        rig, _ = faulty_replay_rig(kit, "fallback")
        batch = rig.batch(SHAPES["many-settled"])
        staged = range(len(EVERY) - 1)
        with pytest.raises(ZeroDivisionError), rig.open(batch) as window:
            _stage_and_fail(rig, window, batch, staged)
        rig.expect_staged(batch, staged)
        rig.check("the body raised")
        rig.run(batch)
        rig.expect_ended(batch)
        rig.check("repeated")


def _stage_and_fail(
    rig: ReplayRig, window: Window, batch: ReplayBatch, order: Sequence[int]
) -> None:
    """Stage some layers, then raise an error as a failing forward does."""
    rig.stage(window, batch, order)
    raise ZeroDivisionError


def faulty_replay_rig(kit: Kit, on_error: str) -> tuple[ReplayRig, Faults]:
    """Make a rig whose executor fails on command, and its faults; skip as ``replay_rig`` does."""
    if "replayed" not in kit.capabilities.kinds:
        pytest.skip(f"{kit.name} declares no replayed layers")
    executor = faulty(kit.executor)
    name = kit.enter(registered(executor))
    return ReplayRig(name, kit.device, EVERY, on_error=on_error), executor.faults


def _expect(rig: ReplayRig, batch: ReplayBatch, committed: bool, *, written_through: bool) -> None:
    """Expect the result of a failed window: paged rows written through or not, states exact."""
    if committed:
        rig.expect_ended(batch)
    else:
        rig.expect_staged(batch)
    if written_through:
        rig.expect_rows(batch, [True] * len(batch.kept), range(len(rig.refs)))


def _kept_so_far(rig: ReplayRig) -> tuple[int, int, int]:
    """Return the draft rows staged, committed and rejected."""
    flat = rig.manager.snapshot()
    names = ("staged", "committed", "rejected")
    staged, committed, rejected = (int(flat[f"kvtxn_rows_{name}_total"]) for name in names)
    return staged, committed, rejected
