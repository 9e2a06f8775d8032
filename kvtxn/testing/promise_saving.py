"""Under ``undo`` a captured forward may save the rows that it overwrites; promises hold."""

from __future__ import annotations

from typing import Final

import pytest
import torch

from ..captured_window import CapturedWindow
from ..errors import LayerError, WindowStateError
from ..window_transitions import WindowState
from .batches import SHAPES, random_counts
from .captured_forward import COUNTS, SHAPE, CapturedForward, exact_steps
from .faults import InjectedFault
from .kit import Kit
from .mixed_layers import Layers, MixedKit
from .promise_fallback import either
from .promise_hooks import Offloader
from .promise_steps import STEPS
from .rig import Rig

#: Who saves: a launch in the captured forward, or one of the window's own just before it.
SAVERS: Final = ("forward", "window")


class SavingForwards(MixedKit):
    """Promises 1, 2, 7 and 8, where old rows are saved by the forward that overwrites them."""

    @pytest.mark.parametrize("shape", STEPS)
    def test_a_forward_that_saves_is_exact(self, kit: Kit, layers: Layers, shape: str) -> None:
        """Steps are exact where each replay saves the rows that it overwrites.

        The captured forward has more rows than the window.
        """
        rig = kit.rig("undo", layers("undo"))
        exact_steps(rig, CapturedForward(rig, saves=True), SHAPES[shape])

    @pytest.mark.parametrize("saver", SAVERS)
    def test_saving_forwards_of_changing_shape(self, kit: Kit, layers: Layers, saver: str) -> None:
        """Steps of changing shape and padding are exact; one without a window writes every row.

        Rows that its replay saves are never used.
        """
        rig = kit.rig("undo", layers("undo"))
        forward = saving(rig, saver)
        for name in ("one", "uneven", "seventeen-rows", "uneven", "one"):
            batch = rig.batch(STEPS[name], padding=0.3)
            forward.step(batch, random_counts(batch, rig.rng))
            rig.check(f"a step of shape {name}")
            plain = rig.batch(((1, 1), (2, 3)))
            forward.load(plain)
            forward.run()
            rig.expect_written(plain)
            rig.check("a step without a window")

    @pytest.mark.parametrize("saver", SAVERS)
    def test_an_abort_before_a_forward_that_saves(
        self, kit: Kit, layers: Layers, saver: str
    ) -> None:
        """An abort before the forward changes nothing.

        Rows that an earlier step saved are not put back. No hook gets a slot, and the next step
        works.
        """
        rig = kit.rig("undo", layers("undo"))
        forward = saving(rig, saver)
        offloader = Offloader(rig)
        forward.step(rig.batch(SHAPE), COUNTS)
        assert offloader.seen()
        window = forward.begin(rig.batch(SHAPE))
        window.abort()
        assert window.state is WindowState.ABORTED
        rig.check("aborted before the forward")
        if forward.leaves_saving:
            assert not offloader.seen(), "a hook was told of rows that nobody wrote"
        forward.next_step()

    @pytest.mark.parametrize("end", ["commit", "abort"])
    @pytest.mark.parametrize("saver", [*SAVERS, "begin"])
    def test_a_window_that_was_looked_at(
        self, kit: Kit, layers: Layers, saver: str, end: str
    ) -> None:
        """A window in a ``with`` block ends as any, whatever was read of it before its forward."""
        rig = kit.rig("undo", layers("undo"))
        forward = CapturedForward(rig) if saver == "begin" else saving(rig, saver)
        forward.step(rig.batch(SHAPE), COUNTS)
        for refused in (False, True):
            batch = rig.batch(SHAPE)
            with forward.begin(batch) as window:
                look_at(window)
                if refused:
                    with pytest.raises(LayerError):
                        window.attend(None, *[torch.zeros(1)] * 3)  # type: ignore[arg-type]
                forward.run()
                look_at(window)
                rig.expect_staged(batch)
                if end == "commit":
                    assert window.commit_sampled(forward.sampled(COUNTS)) is WindowState.COMMITTED
                    rig.expect_committed(batch, batch.kept(COUNTS))
                else:
                    window.abort()
                    rig.expect_aborted(batch)
            look_at(window)
            rig.check(f"{end} of a window that was looked at")
        forward.next_step()

    @pytest.mark.parametrize("filled", [False, True])
    @pytest.mark.parametrize("saver", [*SAVERS, "begin"])
    def test_an_abort_in_the_slots_of_its_own_step(
        self, kit: Kit, layers: Layers, saver: str, filled: bool
    ) -> None:
        """An abort takes drafts back, also if the next step's slots were filled in before it."""
        rig = kit.rig("undo", layers("undo"))
        forward = CapturedForward(rig) if saver == "begin" else saving(rig, saver)
        for _ in range(2):
            batch = rig.batch(SHAPE)
            window = forward.begin(batch)
            forward.run()
            rig.expect_staged(batch)
            if filled:
                forward.slots.copy_(forward.slots.flip(1))
            window.abort()
            rig.expect_aborted(batch)
            rig.check("aborted")
            forward.next_step()

    @pytest.mark.parametrize("form", ["sampled", "counts"])
    @pytest.mark.parametrize("on_error", ["fallback", "raise"])
    def test_a_forward_that_did_not_save(
        self, kit: Kit, layers: Layers, on_error: str, form: str
    ) -> None:
        """A commit cannot restore rows that were not saved: it keeps all, as stock does.

        With on_error="raise" it raises WindowStateError and the window is aborted; else it falls
        back.
        """
        rig = kit.rig("undo", layers("undo"), on_error=on_error)
        forward = CapturedForward(rig, saves=True)
        if not forward.leaves_saving:
            pytest.skip(f"{kit.name} has no launch that saves")
        forward.step(rig.batch(SHAPE), COUNTS)
        before, batch = rig.rows(), rig.batch(SHAPE)
        window = forward.begin(batch)
        forward.run_eagerly(window, range(len(rig.refs)))
        committed = (
            (lambda: window.commit_sampled(forward.sampled(COUNTS)))
            if form == "sampled"
            else lambda: window.commit(list(COUNTS))
        )
        if on_error == "raise":
            with pytest.raises(WindowStateError, match="did not come"):
                committed()
            assert window.state is WindowState.ABORTED
        else:
            committed()
            assert (window.state, window.fallback_reason) == (WindowState.FELL_BACK, "begin")
            rig.check_rows(batch.count(batch.kept(COUNTS)), before)
        rig.write(batch, [True] * batch.num_rows)
        rig.check("as stock leaves them")
        forward.next_step()

    @pytest.mark.parametrize("on_error", ["fallback", "raise"])
    def test_saving_late_fails(self, kit: Kit, layers: Layers, on_error: str) -> None:
        """If late saving fails, all rows are written under fallback, else the window is aborted.

        With on_error="raise" the error surfaces before the forward; the next step works either way.
        """
        rig, faults = kit.faulty_rig("undo", layers("undo"), on_error=on_error)
        forward = saving(rig, "window")
        if not forward.leaves_saving:
            pytest.skip(f"{kit.name} has no launch that saves")
        forward.step(rig.batch(SHAPE), COUNTS)
        window = forward.begin(batch := rig.batch(SHAPE))
        faults.arm("save")
        if on_error == "raise":
            with pytest.raises(InjectedFault):
                window.before_forward(saves=False)
            assert window.state is WindowState.ABORTED
            rig.check("aborted before the forward")
        else:
            forward.run()
            assert window.fallback_reason == "begin"
            window.commit_sampled(forward.sampled(COUNTS))
            rig.expect_committed(batch, batch.kept(COUNTS))
            either(rig, batch)
            rig.check("as stock leaves them")
            assert window.state is WindowState.FELL_BACK
        forward.next_step()


def look_at(window: CapturedWindow) -> None:
    """Read everything that a window shows of itself."""
    repr(window)
    for name in dir(type(window)):
        if not name.startswith("_"):
            getattr(window, name)


def saving(rig: Rig, saver: str) -> CapturedForward:
    """Make a forward that saves old rows, or for "window" one whose windows do just before."""
    forward = CapturedForward(rig, saves=True)
    if saver == "window":
        forward.save_before()
    return forward
