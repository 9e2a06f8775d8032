"""Promise 7: whichever call of the executor fails, the accepted rows end up in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pytest

from ..errors import WindowStateError
from ..window import Window
from ..window_transitions import WindowState
from .batches import Batch, random_counts
from .faults import ADVANCE, MOMENTS, OPERATIONS, InjectedFault
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import MixedKit
from .promise_all_or_nothing import leave_by
from .rig import VARIED, AnySpec, Rig

#: Calls of each method in one window over six layers in two groups, or over every kind of layer.
_CALLS: Final = {
    "own_slots": (1, 2),
    "save": (1, 2),
    "stage": (1, 2, 3, 4, 5),  # with states, the last two are of them, at the commit
    "commit": (1,),
    "restore": (1,),
    "attend": (1,),
    ADVANCE: (1,),
}

#: Settled and draft rows of three requests: drafts that lap a ring of four, and settled rows.
_LAPS: Final = (((1, 2, 0), (3, 0, 8)), ((6, 4, 1), (2, 0, 5)))

#: Faults: every method, at every moment, at each of its calls.
_FAULTS: Final = [(at, when, nth) for at in _CALLS for when in MOMENTS for nth in _CALLS[at]]

#: Lets a test run once with each of them.
every_fault = pytest.mark.parametrize(
    ("at", "when", "nth"), _FAULTS, ids=[f"{at}-{when}-{nth}" for at, when, nth in _FAULTS]
)


class Fallback(MixedKit):
    """No failure of an executor loses an accepted row."""

    @every_fault
    def test_nothing_accepted_is_lost(
        self, kit: Kit, policy: str, specs: Sequence[AnySpec], at: str, when: str, nth: int
    ) -> None:
        """on_error="fallback": no error surfaces; accepted and settled rows are in the caches.

        Rings and states are exact. After an abort no cache has a draft but pages.
        """
        skip_stock(policy, specs)
        fired = False
        for shape, committed in itertools.product(_LAPS, (True, False)):
            rig, faults = kit.faulty_rig(policy, specs, on_error="fallback")
            batch, counts = rig.batch(shape), [2, 0, 1] if committed else [0, 0, 0]
            faults.arm(at, when, nth)
            window = _drive(rig, batch, counts if committed else None)
            if not faults.fired:
                assert window.state in (WindowState.COMMITTED, WindowState.ABORTED)
                continue
            fired = True
            assert faults.fired == [(at, when)]
            assert window.state is WindowState.FELL_BACK
            assert window.fallback_reason is not None
            rig.expect_settled(batch)
            kept = batch.kept(counts)
            if committed:
                expect_kept(rig, batch, kept)
            if at != "restore":  # rejected rows may be there, as in stock
                either(rig, batch)
            rig.check(f"{at} failed, committed: {committed}")
            rig.check_rows(batch.count(kept))
            flat = rig.manager.snapshot()
            assert flat["kvtxn_fallbacks_total"] == 1
            assert flat["kvtxn_windows_total_fell_back"] == 1
        if not fired:
            pytest.skip(f"{policy} does not call {at} so often")

    @every_fault
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_error_surfaces_after_restoring(
        self, kit: Kit, policy: str, specs: Sequence[AnySpec], at: str, when: str, nth: int
    ) -> None:
        """on_error="raise": the executor's own error surfaces, and no draft is in the caches.

        Settled rows are where they were staged, but in a page whose own staging failed.
        """
        rig, faults = kit.faulty_rig(policy, specs, on_error="raise")
        batch = rig.batch(_LAPS[0])
        faults.arm(at, when, nth)
        reached: list[int] = []
        try:
            window = _drive(rig, batch, [2, 0, 1] if at != "restore" else None, reached)
        except InjectedFault:
            assert faults.fired == [(at, when)]
        else:
            assert not faults.fired, "an error was swallowed"
            assert window.state in (WindowState.COMMITTED, WindowState.ABORTED)
            pytest.skip(f"{policy} does not call {at} so often")
        assert rig.manager.current is None
        if at in ("own_slots", "save"):
            reached.pop()  # its rows have no slots
        last = {index for index in reached[-1:] if at == "stage" and index < len(rig.caches)}
        torn = {index for index in last if rig.caches[index].spec.kind == "paged"}
        rig.expect_settled(batch, [index for index in reached if index not in torn])
        if torn:
            either(rig, batch, [not draft for draft in batch.drafts])
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

    @pytest.mark.parametrize("policy", ["deferred"])
    def test_the_caller_gives_up(self, kit: Kit, policy: str, specs: Sequence[AnySpec]) -> None:
        """After ``fall_back`` a commit still writes the layers that were staged."""
        rig = kit.rig(policy, specs, on_error="fallback")
        batch = rig.batch(_LAPS[0])
        staged = range(1, len(rig.refs))  # the caller writes the first layer's rows, or none
        with rig.open(batch) as window:
            rig.stage(window, batch, staged)
            window.fall_back("forward", ValueError("no such kernel"))
            window.commit(rig.accepted(counts := random_counts(batch, rig.rng)))
        rig.expect_committed(batch, batch.kept(counts), staged)
        either(rig, batch)
        rig.check("the caller gave up")

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


def skip_stock(policy: str, specs: Sequence[AnySpec]) -> None:
    """Skip the test where stock's own writes of rejected rows evict others."""
    if policy == "direct" and any(spec.kind != "paged" for spec in specs):
        pytest.skip("stock writes rejected rows, which evict others in a ring or state")


def expect_kept(rig: Rig, batch: Batch, kept: Sequence[bool]) -> None:
    """Expect settled and kept rows in every layer, under ``direct``, too."""
    rows = batch.taken_in(kept)
    taken = {row for each in rows for row in each}
    rig.write(batch, [row in taken for row in range(batch.num_rows)])
    rig.expect_taken_in(batch, rows)


def _drive(
    rig: Rig, batch: Batch, counts: Sequence[int] | None, reached: list[int] | None = None
) -> Window:
    """Run a whole window with one attention; commit ``counts``, or abort if None.

    The slots come as late as they can, so that an earlier group's rows wait when a copy fails.
    The layers that it comes to go into ``reached``.
    """
    window = rig.manager.window(batch.draft_len, settled=batch.settled)
    rig.forget()
    late = rig.slots(batch)
    for index, ref in enumerate(rig.refs):
        if reached is not None:
            reached.append(index)
        rig.hand_in(window, batch, index, late.pop(ref.group, None))
    if rig.manager.executor.capabilities.attention:
        rig.attend(window, batch, length=9)
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
