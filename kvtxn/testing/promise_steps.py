"""Windows over a captured forward keep the promises of windows, step after step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch

from ..errors import (
    CapacityError,
    IncompleteWindowError,
    LayerError,
    SlotMappingError,
    WindowStateError,
)
from ..executor import SampledIds
from ..layout import RowLayout
from ..window_transitions import TRANSITIONS, Event, WindowState
from .batches import SHAPES, Batch, random_counts
from .caches import LayerSpec
from .captured_forward import COUNTS, PLACES, SHAPE, CapturedForward, exact_steps
from .faults import Faults, InjectedFault
from .kit import TRANSACTIONAL, Kit
from .mixed_layers import Layers, MixedKit
from .promise_captured import sampled
from .promise_device import no_host_sync
from .rig import SIMPLE, Rig

#: Shapes of steps, without the shape that has no rows, which launches nothing.
STEPS: Final = {name: shape for name, shape in SHAPES.items() if shape[0]}


class CapturedSteps(MixedKit):
    """Promises 1, 2, 3, 5, 6, 7, 8 and 9, where a forward is captured once and replayed."""

    # -- exactness, isolation, padding ---------------------------------------------------

    @pytest.mark.parametrize("shape", STEPS)
    @pytest.mark.parametrize("places", PLACES)
    def test_steps_are_exact(self, mixed: Rig, places: str, shape: str) -> None:
        """Replays with new content are exact; no draft is in a cache before commit."""
        exact_steps(mixed, CapturedForward(mixed, places), STEPS[shape])

    def test_steps_of_changing_shape(self, mixed: Rig, forward: CapturedForward) -> None:
        """Steps of changing and recurring shapes are exact.

        A step without a window between them writes every row, and no state. Two forwards over
        tensors of their own take turns.
        """
        forwards = itertools.cycle((forward, CapturedForward(mixed)))
        for name in ("one", "uneven", "one", "only-settled", "seventeen-rows", "uneven", "one"):
            forward, batch = next(forwards), mixed.batch(STEPS[name])
            forward.step(batch, random_counts(batch, mixed.rng))
            mixed.check(f"a step of shape {name}")
            plain = mixed.batch(((1, 1), (2, 3)))
            forward.load(plain)
            forward.windows.mark(None)
            forward.run()
            mixed.expect_written(plain)
            mixed.check("a step without a window")

    @pytest.mark.parametrize("padding", [0.5, 1.0])
    def test_padding(self, mixed: Rig, forward: CapturedForward, padding: float) -> None:
        """A row without a slot is written nowhere."""
        for _ in range(2):
            batch = mixed.batch(SHAPE, padding=padding)
            forward.step(batch, COUNTS)
            mixed.check("padding is never written")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_counts_out_of_range_clamp(self, mixed: Rig, forward: CapturedForward) -> None:
        """More sampled tokens than drafts plus one accept every draft; no token accepts none."""
        batch = mixed.batch(((1, 1), (3, 2)))
        window = forward.begin(batch)
        forward.run()
        mixed.expect_staged(batch)
        window.commit_sampled(forward.sampled([-1, 9]))
        mixed.expect_committed(batch, batch.kept([0, 2]))
        mixed.check("clamped")

    def test_the_acceptance_may_move_or_stay(self, kit: Kit, policy: str) -> None:
        """Counts are read from the tensor given at each commit, the same buffer or another one."""
        rig = kit.rig(policy, SIMPLE)
        forward = CapturedForward(rig)
        here = forward.sampled([0, 0])
        for number in range(40 if rig.device.type == "cuda" else 6):
            batch = rig.batch(((1, 1), (3, 2)))
            counts = random_counts(batch, rig.rng)
            window = forward.begin(batch)
            forward.run()
            rig.expect_staged(batch)
            if number % 7 == 6:
                window.commit_sampled(forward.sampled(counts))
            elif number % 7 == 5:  # a longer, strided view of a buffer, of another dtype
                wide = torch.stack([forward.sampled([*counts, 0])] * 2, 1).long()
                window.commit_sampled(wide[:, 0])
            else:
                here.copy_(forward.sampled(counts))
                window.commit_sampled(here)
                assert torch.equal(here, forward.sampled(counts)), "a commit wrote to its counts"
            rig.expect_committed(batch, batch.kept(counts))
            rig.check(f"step {number}")

    @pytest.mark.parametrize("form", ["int", "list", "counts", "mask", "ids"])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_commit_takes_what_any_window_takes(
        self, mixed: Rig, forward: CapturedForward, form: str
    ) -> None:
        """Commit takes accepted drafts in any form, instead of sampled tokens, and is exact.

        As an int, a list, a tensor of counts, a mask or sampled ids.
        """
        batch = mixed.batch(((1, 1), (3, 2)))
        counts = [1, 1] if form == "int" else [2, 0]
        kept = batch.kept(counts)
        given: dict[str, Any] = {
            "int": 1,
            "list": counts,
            "counts": mixed.accepted(counts),
            "mask": torch.tensor(kept).to(mixed.device),
            "ids": SampledIds(sampled(batch, counts, mixed.device)),
        }
        window = forward.begin(batch)
        forward.run()
        mixed.expect_staged(batch)
        window.commit(given[form])
        mixed.expect_committed(batch, kept)
        mixed.check(form)
        assert window.state is WindowState.COMMITTED

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_commit_that_is_checked(self, kit: Kit, layers: Layers, policy: str) -> None:
        """Debug mode compares every commit with the reference, in captured windows too.

        An eager window of as many rows, whose rows lie elsewhere, comes before each of them.
        """
        rig = kit.rig(policy, layers(policy), debug=True)
        forward = CapturedForward(rig, "given")
        for _ in range(2):
            batch = rig.batch(SHAPE)
            rig.commit(batch, COUNTS)
            forward.step(batch := rig.batch(SHAPE), COUNTS)
            rig.check("checked")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_all_executors_leave_the_same_bytes(
        self, kit: Kit, layers: Layers, policy: str
    ) -> None:
        """This executor leaves the same bytes as torch, given the same caches, slots and rows."""
        rig = kit.rig(policy, layers(policy), seed=11)
        rigs = [rig, Rig("torch", policy, rig.device, layers(policy), seed=11)]
        for each in rigs:
            forward = CapturedForward(each)
            for name in ("uneven", "one"):
                batch = each.batch(STEPS[name])
                forward.step(batch, random_counts(batch, each.rng))
        for one, other in zip(*(each.caches for each in rigs), strict=True):
            assert all(map(torch.equal, one.memories, other.memories))
        for mine, theirs in zip(*(each.replayed for each in rigs), strict=True):
            for one_state, other_state in zip(mine.memories, theirs.memories, strict=True):
                assert torch.equal(one_state.memory, other_state.memory)

    # -- all or nothing --------------------------------------------------------------------

    @pytest.mark.parametrize("seen", [False, True])
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_an_abort_takes_every_draft_back(
        self, mixed: Rig, forward: CapturedForward, seen: bool
    ) -> None:
        """After an abort no draft is in the caches, settled rows stay, and the next step is sound.

        Whether or not the host saw the forward.
        """
        for _ in range(2):
            batch = mixed.batch(SHAPE)
            window = forward.begin(batch)
            if seen:
                forward.run_eagerly(window, range(len(mixed.refs)))
            else:
                forward.run()
            mixed.expect_staged(batch)
            window.abort()
            mixed.expect_aborted(batch)
            mixed.check("aborted")
            assert window.state is WindowState.ABORTED
            forward.next_step()

    def test_a_layer_that_is_missing(self, kit: Kit, layers: Layers) -> None:
        """If a layer was not noted, commit is refused by its name; nothing is written or counted.

        The window stays OPEN; once the layer is noted, commit passes.
        """
        rig = kit.rig("deferred", layers("deferred"))
        forward = CapturedForward(rig)
        batch = rig.batch(SHAPE)
        window = forward.begin(batch)
        last = len(rig.refs) - 1
        forward.run_eagerly(window, range(last))
        assert (window.state, window.missing) == (WindowState.OPEN, (rig.refs[last].name,))
        rig.expect_staged(batch, range(last))
        with pytest.raises(IncompleteWindowError, match=rig.refs[last].name):
            window.commit_sampled(forward.sampled(COUNTS))
        rig.check("refused")
        assert (window.state, rig.rows()) == (WindowState.OPEN, (0, 0, 0))
        forward.run_eagerly(window, [last])
        assert (window.state, window.missing) == (WindowState.STAGED, ())
        window.commit_sampled(forward.sampled(COUNTS))
        rig.expect_committed(batch, batch.kept(COUNTS))
        rig.check("complete")

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_a_slot_outside_its_cache(self, mixed: Rig, forward: CapturedForward) -> None:
        """For one slot outside its cache the device refuses the commit whole, and counts it.

        The next step works.
        """
        batch = mixed.batch(SHAPE, padding=0.0)
        forward.step(batch, COUNTS)
        real = forward.load

        def load(batch: Batch) -> None:
            """Load a batch, and set one slot far outside its cache."""
            real(batch)
            forward.slots[-1, 1] = 10**9

        forward.load = load  # type: ignore[method-assign]
        window = forward.begin(batch)
        window.commit_sampled(forward.sampled([0, 0, 0]))
        mixed.check("refused whole")
        forward.load = real  # type: ignore[method-assign]
        forward.next_step()
        flat = mixed.manager.snapshot()
        assert flat["kvtxn_windows_refused_total"] == 1
        assert flat["kvtxn_windows_total_committed"] == 3

    # -- discipline --------------------------------------------------------------------------

    def test_one_window_at_a_time(self, kit: Kit) -> None:
        """While a window is open, eager or captured, beginning another raises WindowStateError."""
        rig = kit.rig("deferred", SIMPLE)
        forward = CapturedForward(rig)
        batch = rig.batch(SHAPE)
        window = forward.begin(batch)
        assert rig.manager.current is window
        with pytest.raises(WindowStateError, match=f"window {window.number} is still"):
            forward.windows.begin(forward.windows.plan(window.layout))
        with pytest.raises(WindowStateError, match=f"window {window.number} is still"):
            rig.open(batch)
        window.abort()
        assert rig.manager.current is None
        other = rig.open(batch)
        with pytest.raises(WindowStateError, match=f"window {other.number} is still"):
            forward.begin(batch)
        other.abort()
        assert forward.begin(batch).number == other.number + 1

    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_leaving_the_block(self, mixed: Rig, forward: CapturedForward) -> None:
        """An exception in the ``with`` block surfaces and takes back drafts, but no settled row."""
        batch = mixed.batch(SHAPE)
        window = forward.begin(batch)
        with pytest.raises(KeyError), window:  # noqa: PT012  # the block is what is tested
            forward.run()
            raise KeyError("of the engine's own")
        mixed.expect_staged(batch)
        mixed.expect_aborted(batch)
        mixed.check("aborted")
        assert window.state is WindowState.ABORTED

    def test_the_forward_stages(self, kit: Kit) -> None:
        """``stage`` raises WindowStateError and writes nothing: the captured forward stages."""
        rig = kit.rig("deferred", SIMPLE)
        batch = rig.batch(SHAPE)
        window = CapturedForward(rig).begin(batch)
        with pytest.raises(WindowStateError, match="captured forward stages"):
            rig.stage(window, batch, [0])
        rig.check("refused")

    @pytest.mark.parametrize("event", [Event.COMMIT, Event.ABORT, Event.FALL_BACK])
    @pytest.mark.parametrize("state", list(WindowState), ids=lambda state: state.name)
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_the_states_are_those_of_the_table(
        self, kit: Kit, policy: str, state: WindowState, event: Event
    ) -> None:
        """Allowed events lead to the table's state; all others are refused and change nothing."""
        if policy == "undo" and state is WindowState.OPEN:
            pytest.skip("the forward writes by itself: STAGED from the start")
        rig, faults = kit.faulty_rig(policy, SIMPLE, on_error="fallback")
        forward = CapturedForward(rig)
        window = forward.begin(rig.batch(SHAPE))
        counts = forward.sampled(COUNTS)
        bring(window, state, forward, faults)
        assert window.state is state
        before, rows = rig.truth_now(), rig.rows()
        calls: dict[Event, Callable[[], object]] = {
            Event.COMMIT: lambda: window.commit_sampled(counts),
            Event.ABORT: window.abort,
            Event.FALL_BACK: lambda: window.fall_back("attend", InjectedFault("the caller's")),
        }
        start = state
        if (state, event) == (WindowState.OPEN, Event.COMMIT):
            start = TRANSITIONS[state, Event.STAGE_LAST]  # no layer was noted: a replayed graph
        if (start, event) in TRANSITIONS:
            calls[event]()
            assert window.state is TRANSITIONS[start, event]
        else:
            with pytest.raises(WindowStateError):
                calls[event]()
            assert window.state is state
            assert not before.differences(), "a refused event changed a cache"
            assert rig.rows() == rows, "a refused event was counted"
        assert (rig.manager.current is None) == window.state.is_final

    def test_tensors_that_do_not_fit(self, kit: Kit) -> None:
        """Slots that launches cannot read, rows of another size, and lapped rings are refused.

        With SlotMappingError, LayerError and CapacityError; so are layouts of more than
        ``max_rows``.
        """
        rig = kit.rig("deferred", SIMPLE)
        most = rig.manager.config.max_rows
        zeros = partial(torch.zeros, dtype=torch.int64, device=rig.device)
        for slots in (
            zeros(2, most),
            zeros(1, most).int(),
            zeros(most),
            zeros(1, 2 * most)[:, ::2],
            [[0] * most],
        ):
            with pytest.raises(SlotMappingError, match="read in place"):
                rig.manager.captured_windows(slots)  # type: ignore[arg-type]
        forward = CapturedForward(rig, "given")
        for wrong in ({}, {name: p[:-1] for name, p in forward.windows.rows.items()}):
            with pytest.raises(LayerError, match="do not fit"):
                rig.manager.captured_windows(forward.slots, wrong)
        for rows in (most, most + 1):
            windows = rig.manager.captured_windows(forward.slots[:, :most])
            layout = RowLayout.build((rows,), (0,), rig.device)
            if rows == most:
                assert windows.plan(layout).layout is layout
            else:
                with pytest.raises(CapacityError, match=f"at most {most}"):
                    windows.plan(layout)
        if "ring" in kit.capabilities.kinds:
            ring = kit.rig("deferred", [LayerSpec(kind="ring", ring_size=4, num_blocks=12)])
            windows = ring.manager.captured_windows(forward.slots)
            windows.plan(RowLayout.build((2, 3), (1, 1), rig.device))
            with pytest.raises(CapacityError, match="more rows than its ring"):
                windows.plan(RowLayout.build((2, 4), (1, 1), rig.device))

    # -- the host never waits ------------------------------------------------------------------

    @pytest.mark.parametrize("hooked", [False, True])
    def test_a_step_does_not_wait(
        self, kit: Kit, mixed: Rig, forward: CapturedForward, hooked: bool
    ) -> None:
        """A step does not wait from begin to the end of commit, with a hook or without."""
        kit.need("no_host_sync")
        forward.step(mixed.batch(SHAPE), COUNTS)
        stored = []
        if hooked:
            mixed.manager.on_commit(
                lambda ended: stored.append(list(map(ended.stored, ended.slots)))
            )
        for _ in range(3):
            batch, counts = mixed.batch(SHAPE), forward.sampled(COUNTS)
            window = forward.begin(batch)
            window.abort()
            plan = forward.windows.plan(window.layout)
            with no_host_sync():
                window = forward.windows.begin(plan)
                forward.run()
                window.commit_sampled(counts)
            mixed.expect_staged(batch)
            mixed.expect_committed(batch, batch.kept(COUNTS))
            mixed.check("a step that never waited")
        assert len(stored) == 3 * hooked


def bring(window: Any, state: WindowState, forward: CapturedForward, faults: Faults) -> None:
    """Bring a window that has just begun into a state; OPEN leaves it alone.

    Args:
        window: the window.
        state: the state.
        forward: stages the rows, and has the counts of sampled tokens for a commit.
        faults: makes the commit fail by a KeyboardInterrupt, for the state FAILED.
    """
    counts = forward.sampled(COUNTS)
    if state is WindowState.STAGED:
        if window.state is not state:
            forward.run_eagerly(window, range(len(SIMPLE)))
        return
    if state in (WindowState.DIRECT, WindowState.FELL_BACK):
        window.fall_back("attend", InjectedFault("the attention's"))
    elif state is WindowState.FAILED:
        faults.error = KeyboardInterrupt
        faults.arm("commit")
        with pytest.raises(KeyboardInterrupt):
            window.commit_sampled(counts)
        faults.error = InjectedFault
    if state in (WindowState.COMMITTED, WindowState.FELL_BACK):
        window.commit_sampled(counts)
    elif state is WindowState.ABORTED:
        window.abort()
