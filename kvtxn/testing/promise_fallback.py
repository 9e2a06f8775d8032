"""Promise 7: whichever call of the executor fails, the accepted rows end up in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from ..errors import WindowStateError
from ..window import Window
from ..window_transitions import WindowState
from .batches import Batch
from .faults import MOMENTS, OPERATIONS, InjectedFault
from .kit import TRANSACTIONAL, Kit, KitBase
from .promise_all_or_nothing import leave_by
from .rig import VARIED, Rig

#: Calls of each method in one window over ``VARIED``: six layers in two groups.
_CALLS: Final = {
    "own_slots": (1, 2),
    "save": (1, 2),
    "stage": (1, 3, 5),
    "commit": (1,),
    "restore": (1,),
    "attend": (1,),
}

#: Faults: every method, at every moment, at each of its calls.
_FAULTS: Final = [(at, when, nth) for at in OPERATIONS for when in MOMENTS for nth in _CALLS[at]]

#: Lets a test run once with each of them.
every_fault = pytest.mark.parametrize(
    ("at", "when", "nth"), _FAULTS, ids=[f"{at}-{when}-{nth}" for at, when, nth in _FAULTS]
)


class Fallback(KitBase):
    """No failure of an executor loses an accepted row."""

    @every_fault
    def test_nothing_accepted_is_lost(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """on_error="fallback": no error surfaces; accepted and settled rows are in the caches.

        Rejected rows may be there as well, as in stock. The window ends in FELL_BACK, counted once.
        """
        rig, faults = kit.faulty_rig(policy, on_error="fallback")
        batch = rig.batch(((1, 2, 0), (3, 0, 4)))
        counts = [2, 0, 1]
        faults.arm(at, when, nth)
        window = _drive(rig, batch, counts if at != "restore" else None)
        if not faults.fired:
            assert window.state in (WindowState.COMMITTED, WindowState.ABORTED)
            pytest.skip(f"{policy} does not call {at} so often")
        assert faults.fired == [(at, when)]
        assert window.state is WindowState.FELL_BACK
        assert window.fallback_reason is not None
        rig.expect_settled(batch)
        kept = batch.kept(counts) if at != "restore" else [False] * batch.num_rows
        rig.write(batch, kept)
        if at != "restore":  # rejected rows may be there, as in stock
            either(rig, batch)
        rig.check(f"{at} failed")
        rig.check_rows(batch.count(kept))
        flat = rig.manager.snapshot()
        assert flat["kvtxn_fallbacks_total"] == 1
        assert flat["kvtxn_windows_total_fell_back"] == 1

    @every_fault
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_error_surfaces_after_restoring(
        self, kit: Kit, policy: str, at: str, when: str, nth: int
    ) -> None:
        """on_error="raise": the executor's own error surfaces, and no draft is in the caches.

        The window counts as aborted. A settled row may be old or new.
        """
        rig, faults = kit.faulty_rig(policy, on_error="raise")
        batch = rig.batch(((1, 2, 0), (3, 0, 4)))
        faults.arm(at, when, nth)
        settled = [not draft for draft in batch.drafts]
        try:
            window = _drive(rig, batch, [2, 0, 1] if at != "restore" else None)
        except InjectedFault:
            assert faults.fired == [(at, when)]
        else:
            assert not faults.fired, "an error was swallowed"
            assert window.state in (WindowState.COMMITTED, WindowState.ABORTED)
            pytest.skip(f"{policy} does not call {at} so often")
        assert rig.manager.current is None
        either(rig, batch, settled)
        rig.check(f"{at} failed")
        staged, committed, rejected = rig.rows()
        assert (staged, committed) == (rejected, 0)
        assert rig.manager.snapshot()["kvtxn_windows_total_aborted"] == 1

    @pytest.mark.parametrize("on_error", ["fallback", "raise"])
    def test_the_next_window_is_sound(self, kit: Kit, policy: str, on_error: str) -> None:
        """A window in which an operation failed half-way does not affect the next one."""
        rig, faults = kit.faulty_rig(policy, on_error=on_error)
        for at in OPERATIONS:
            faults.arm(at, "middle")
            try:
                _drive(rig, rig.batch(), [2, 1] if at != "restore" else None)
            except InjectedFault:
                assert on_error == "raise"
            faults.disarm()
            rig.truth = rig.truth_now()
            batch = rig.batch()
            rig.commit(batch, [1, 2], f"the window after one that failed at {at}")

    @pytest.mark.parametrize("layer", range(len(VARIED)))
    def test_abort_after_a_fallback(self, kit: Kit, policy: str, layer: int) -> None:
        """A window aborted after its staging failed keeps settled rows, and ends in FELL_BACK.

        Its drafts' slots hold old or staged words, and all others are untouched.
        """
        rig, faults = kit.faulty_rig(policy, on_error="fallback")
        batch = rig.batch()
        with rig.open(batch) as window:
            rig.stage(window, batch, range(layer))
            faults.arm("stage", "middle")
            rig.stage(window, batch, [layer])
            window.abort()
        assert window.state is WindowState.FELL_BACK
        rig.expect_settled(batch, range(layer + 1))
        either(rig, batch, layers=layer + 1)
        rig.check("aborted after a fallback")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_the_exception_of_the_body_wins_over_a_failing_abort(
        self, kit: Kit, policy: str
    ) -> None:
        """The body's exception surfaces, with the executor's error attached as a note.

        The window ends in ABORTED, without a draft in the caches.
        """
        rig, faults = kit.faulty_rig(policy, on_error="raise")
        batch = rig.batch()
        faults.arm("restore", "middle")
        window = rig.open(batch)
        with pytest.raises(KeyError) as caught:
            leave_by(KeyError("from the body"), rig, window, batch, len(rig.refs))
        assert bool(faults.fired) == bool(getattr(caught.value, "__notes__", []))
        assert window.state is WindowState.ABORTED
        rig.expect_settled(batch)
        rig.check("left by an exception, abort failing")

    def test_an_interrupt_claims_nothing(self, kit: Kit, policy: str) -> None:
        """A commit that is interrupted half-way ends in FAILED, and the interrupt surfaces.

        The window is closed then: another commit is refused.
        """
        rig, faults = kit.faulty_rig(policy, on_error="fallback")
        faults.error = KeyboardInterrupt
        faults.arm("commit", "middle")
        batch = rig.batch()
        window = rig.open(batch)
        rig.stage(window, batch)
        with pytest.raises(KeyboardInterrupt):
            window.commit(1)
        assert window.state is WindowState.FAILED
        with pytest.raises(WindowStateError):
            window.commit(1)


def _drive(rig: Rig, batch: Batch, counts: Sequence[int] | None) -> Window:
    """Run a whole window with one attention, if there is any; commit ``counts``, or abort if None.

    The slots come as late as they can, so that an earlier group's rows wait when a copy fails.
    Returns the ended window.
    """
    window = rig.manager.window(batch.draft_len, settled=batch.settled)
    rig.forget()
    late = rig.slots(batch)
    for index, ref in enumerate(rig.refs):
        rig.hand_in(window, batch, index, late.pop(ref.group, None))
    if rig.manager.executor.capabilities.attention:
        rig.attend(window, batch)
    if counts is None:
        window.abort()
    else:
        window.commit(rig.accepted(counts))
    return window


def either(
    rig: Rig, batch: Batch, mask: Sequence[bool] | None = None, layers: int | None = None
) -> None:
    """Make the oracle accept the old or the staged word, for each word of rows in paged caches.

    In rings and states a rejected row would have evicted a live one. ``mask``: these rows alone;
    ``layers``: the first so many layers alone.
    """
    for cache in (cache for cache in rig.caches[:layers] if cache.spec.kind == "paged"):
        slots = batch.slots[cache.spec.group]
        for number, row in enumerate(batch.rows[cache.name]):
            if mask is None or mask[number]:
                rig.truth.adopt(cache.name, slots[number], row)
