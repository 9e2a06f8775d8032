"""Windows over a captured forward end as any window: failures, counts, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from ..window_transitions import WindowState
from .batches import Batch, random_counts
from .captured_forward import COUNTS, SHAPE, CapturedForward
from .faults import Faults, InjectedFault
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import Layers, MixedKit
from .promise_fallback import either
from .promise_hooks import Offloader, after_abort, durable
from .promise_steps import STEPS, bring
from .rig import SIMPLE, Rig

#: Operations that can fail in a step: marking or saving, the attention, the commit's launch.
_FAILURES: Final = ("begin", "attend", "commit")


class StepEndings(MixedKit):
    """Promises 7 and 8, and the hooks, where a forward is captured once and replayed."""

    # -- failures ------------------------------------------------------------------------------

    @pytest.mark.parametrize("at", _FAILURES)
    def test_a_failing_step_loses_nothing(
        self, kit: Kit, layers: Layers, policy: str, at: str
    ) -> None:
        """on_error="fallback": no error is raised; accepted and settled rows are in the caches.

        The window is counted as fallen back, with the operation as the reason, and the next step
        works.
        """
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="fallback")
        forward = CapturedForward(rig)
        for seen in (1, len(rig.refs) - 1):
            before = rig.rows()
            batch = rig.batch(SHAPE)
            window = _failing(rig, forward, faults, batch, at, seen)
            if window is None:
                pytest.skip(f"{policy} does nothing at {at}")
            assert window.state is WindowState.FELL_BACK
            assert window.fallback_reason == at
            assert rig.manager.current is None
            rig.expect_committed(batch, batch.kept(COUNTS))
            either(rig, batch)  # rejected rows may be there, as in stock
            rig.check(f"{at} failed")
            rig.check_rows(batch.count(batch.kept(COUNTS)), before)
            forward.next_step()
        flat = rig.manager.snapshot()
        assert flat[f"kvtxn_fallbacks_total_{at}"] == flat["kvtxn_windows_total_fell_back"] == 2

    @pytest.mark.parametrize("at", _FAILURES)
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_failing_step_restores_and_raises(
        self, kit: Kit, layers: Layers, policy: str, at: str
    ) -> None:
        """on_error="raise".

        The error is raised, no draft is in a cache, the window is counted as aborted. The next step
        works.
        """
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="raise")
        forward = CapturedForward(rig)
        batch = rig.batch(SHAPE)
        with pytest.raises(InjectedFault) as caught:
            _failing(rig, forward, faults, batch, at, len(rig.refs) - 1)
        assert any("restored" in note for note in caught.value.__notes__)
        assert rig.manager.current is None
        ran = {"begin": 0, "attend": len(rig.refs) - 1, "commit": len(rig.refs)}[at]
        rig.expect_aborted(batch, range(ran))
        rig.check(f"{at} failed")
        rig.check_rows(batch.count())
        flat = rig.manager.snapshot()
        assert flat["kvtxn_windows_total_aborted"] == flat["kvtxn_windows_total"] == 1
        assert bool((forward.windows.position == -1).all()) or at != "begin"
        forward.next_step()

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_interrupted_step_claims_nothing(
        self, kit: Kit, layers: Layers, policy: str
    ) -> None:
        """A commit interrupted by a BaseException ends in FAILED, and the exception is raised."""
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="fallback")
        forward = CapturedForward(rig)
        window = forward.begin(rig.batch(SHAPE))
        bring(window, WindowState.FAILED, forward, faults)
        assert window.state is WindowState.FAILED
        assert rig.manager.current is None
        assert rig.manager.snapshot()["kvtxn_windows_total_failed"] == 1

    # -- counts --------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", STEPS)
    def test_counts_add_up(self, mixed: Rig, forward: CapturedForward, shape: str) -> None:
        """Draft rows with a slot in any group are counted, per step and in total; aborts reject."""
        total: tuple[int, ...] = (0, 0, 0)
        for end in ("commit", "abort", "commit"):
            batch = mixed.batch(STEPS[shape], padding=0.4)
            counts = random_counts(batch, mixed.rng)
            if end == "commit":
                forward.step(batch, counts)
            else:
                counts = [0] * len(counts)
                forward.begin(batch).abort()
            total = mixed.check_rows(batch.count(batch.kept(counts)), total)
        flat = mixed.manager.snapshot()
        assert flat["kvtxn_windows_total_committed"] == 2
        assert flat["kvtxn_windows_total_aborted"] == 1

    @pytest.mark.parametrize("seen", [False, True])
    def test_stage_operations(self, kit: Kit, seen: bool) -> None:
        """Rows x layers are counted whether the host saw the forward or not."""
        rig = kit.rig("deferred", SIMPLE)
        forward = CapturedForward(rig)
        batch = rig.batch(SHAPE)
        window = forward.begin(batch)
        if seen:
            forward.run_eagerly(window, range(len(rig.refs)))
        else:
            forward.run()
        window.commit_sampled(forward.sampled(COUNTS))
        flat = rig.manager.snapshot()
        assert flat["kvtxn_stage_operations_total"] == batch.num_rows * len(SIMPLE)

    def test_warming_up_leaves_no_trace(self, kit: Kit, layers: Layers, policy: str) -> None:
        """Warming up changes no cache, no counter and no mark; steps of those layouts work."""
        rig = kit.rig(policy, layers(policy), max_rows=16)
        forward = CapturedForward(rig)
        forward.load(batch := rig.batch(SHAPE))
        window = forward.begin(batch)
        layout = window.layout
        window.abort()
        rig.manager.metrics.restart()
        counts = rig.manager.snapshot()
        forward.windows.warm_up([layout])
        rig.check("warmed up")
        assert rig.manager.snapshot() == counts
        assert bool((forward.windows.position == -1).all())
        forward.step(batch := rig.batch(SHAPE), COUNTS)
        rig.check("a step")

    # -- hooks ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_hooks_are_told_of_accepted_rows_alone(
        self, mixed: Rig, forward: CapturedForward
    ) -> None:
        """``on_commit`` names settled and accepted rows alone, ``on_abort`` settled ones.

        No hook is called before the end, and then the bytes are in place.
        """
        offloader = Offloader(mixed)
        numbers: dict[str, list[int]] = {"commit": [], "abort": []}
        for end in ("commit", "abort", "commit"):
            batch = mixed.batch(SHAPE)
            window = forward.begin(batch)
            forward.run()
            assert offloader.seen() == {}
            if end == "commit":
                window.commit_sampled(forward.sampled(COUNTS))
            else:
                window.abort()
            if end == "commit":
                mixed.expect_committed(batch, kept := batch.kept(COUNTS))
                assert offloader.seen() == durable(mixed, batch, kept)
            else:
                assert offloader.seen() == after_abort(mixed, batch)
            numbers[end].append(window.number)
        assert (offloader.committed, offloader.aborted) == (numbers["commit"], numbers["abort"])

    @pytest.mark.parametrize("ran", ["whole", "some", "none"])
    def test_an_abort_tells_how_far_the_forward_came(
        self, mixed: Rig, forward: CapturedForward, ran: str
    ) -> None:
        """``on_abort`` gets the slots of settled rows only if the whole forward ran."""
        offloader = Offloader(mixed)
        batch = mixed.batch(SHAPE)
        window = forward.begin(batch)
        seen = {"whole": len(mixed.refs), "some": len(mixed.refs) - 1, "none": 0}[ran]
        forward.run_eagerly(window, range(seen))
        window.abort(replayed=ran == "whole")
        assert offloader.seen() == (after_abort(mixed, batch) if ran == "whole" else {})
        assert offloader.aborted == [window.number]

    @pytest.mark.parametrize("at", _FAILURES)
    def test_hooks_of_a_step_that_fell_back(
        self, kit: Kit, layers: Layers, policy: str, at: str
    ) -> None:
        """After a fallback rejected rows may be in the cache.

        Hooks get the accepted and settled ones alone.
        """
        rig, faults = kit.faulty_rig(policy, layers(policy), on_error="fallback")
        forward, offloader = CapturedForward(rig), Offloader(rig)
        batch = rig.batch(SHAPE)
        if _failing(rig, forward, faults, batch, at, 2) is None:
            pytest.skip(f"{policy} does nothing at {at}")
        rig.expect_committed(batch, batch.kept(COUNTS))
        assert offloader.seen() == durable(rig, batch, batch.kept(COUNTS))
        assert len(offloader.committed) == 1

    @pytest.mark.parametrize("on_error", ["fallback", "raise"])
    def test_a_hook_that_raises(self, kit: Kit, layers: Layers, on_error: str) -> None:
        """A hook's error does not change the window.

        It is counted, and with on_error="raise" raised. The window is committed all the same.
        """
        rig = kit.rig("deferred", layers("deferred"), on_error=on_error)
        forward = CapturedForward(rig)
        hook = rig.manager.on_commit(lambda window: [][window.number + 1])
        batch = rig.batch(SHAPE)
        if on_error == "raise":
            with pytest.raises(IndexError):
                forward.step(batch, COUNTS)
            rig.expect_committed(batch, batch.kept(COUNTS))
        else:
            forward.step(batch, COUNTS)
        rig.check("committed all the same")
        flat = rig.manager.snapshot()
        assert flat["kvtxn_hook_errors_total_on_commit"] == 1
        assert flat["kvtxn_windows_total_committed"] == 1
        hook.remove()
        forward.step(rig.batch(SHAPE), COUNTS)
        rig.check("without the hook")


def _failing(
    rig: Rig, forward: CapturedForward, faults: Faults, batch: Batch, at: str, seen: int
) -> Any:
    """Run a step in which an operation fails; return None if the policy has no such operation.

    Args:
        rig: the rig.
        forward: the rig's captured forward.
        faults: the faults of the rig's executor.
        batch: the rows.
        at: one of ``_FAILURES``: marking or saving, the attention, the commit's launch.
        seen: number of layers that run, seen by the host, before the attention fails.
    """
    every: Sequence[int] = range(len(rig.refs))
    if at == "begin":
        if rig.policy == "direct":
            return None
        return _failing_begin(rig, forward, faults, batch)
    window = forward.begin(batch)
    if at == "attend":
        forward.run_eagerly(window, every[:seen])
        window.fall_back("attend", InjectedFault("injected by the conformance kit"))
        forward.windows.mark(None)  # the caller writes the rows of the layers that follow
        forward.run_eagerly(window, every[seen:])
    else:
        forward.run()
        faults.arm("commit")
    window.commit_sampled(forward.sampled(COUNTS))
    return window


def _failing_begin(rig: Rig, forward: CapturedForward, faults: Faults, batch: Batch) -> Any:
    """Run a step whose rows could not be saved, or whose drafts could not all be marked.

    The first under ``undo``, the other under ``deferred``. Returns the window, committed.
    """
    if rig.policy == "undo":
        faults.arm("save")
        window = forward.begin(batch)
    else:
        forward.windows.mark(None)  # marks that are there already are not made again
        real = forward.windows.position
        forward.windows.position = HalfMarked(real)  # type: ignore[assignment]
        try:
            window = forward.begin(batch)
        finally:
            forward.windows.position = real
    forward.run()
    window.commit_sampled(forward.sampled(COUNTS))
    return window


class HalfMarked:
    """A stand-in for the marks: the first copy copies and then fails, later copies work."""

    def __init__(self, position: torch.Tensor) -> None:
        self._position, self._copies = position, 0

    def copy_(self, marks: torch.Tensor) -> None:
        """Copy ``marks``; the first call raises InjectedFault after it has copied."""
        self._position.copy_(marks)
        self._copies += 1
        if self._copies == 1:
            raise InjectedFault("injected by the conformance kit")
