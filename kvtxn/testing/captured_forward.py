"""A model's forward over fixed tensors: a CUDA graph on a GPU, else the same calls once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from ..captured_rows import CapturedRows
from ..captured_window import CapturedWindow
from ..captured_windows import CapturedWindows
from ..cuda_graphs import capture
from ..formats import words
from ..layers import LayerRef, Plane
from ..layout import RowLayout
from ..row_io import LayerRows, write_layers
from ..state_supplier import StateSupplier
from ..window_transitions import WindowState
from .batches import Batch, random_counts
from .rig import Rig

#: Storage for waiting drafts: allocated by the windows, or given by the engine.
PLACES: Final = ("own", "given")

#: The storage in which the forward's own tensors hold the rows, through ``CapturedRows``.
HELD: Final = "held"

#: A step of three requests, and the drafts accepted of each.
SHAPE: Final = ((1, 2, 1), (3, 0, 4))
COUNTS: Final = (2, 0, 1)

#: Settled and draft rows of each request.
Shape = tuple[Sequence[int], Sequence[int]]

#: Rows of a forward with held tensors beyond the rows that a window may have.
_MORE: Final = 2


class CapturedForward:
    """A forward, one layer after the other: marked drafts wait, all other rows are written.

    Of layers with states all rows wait, except under ``direct``, where it writes the states.

    Args:
        rig: the rig; no request of its batches has more rows than a ring.
        places: one of ``PLACES``, or ``HELD``; only ``deferred`` windows take given storage.
        saves: the forward begins with saving the rows that it overwrites, where a launch can.
        states: states of an engine's own kernels, for the windows to hold; not under ``HELD``.

    Attributes:
        slots: int64 ``[num_groups, n]``, read in place by the forward and the windows.
        windows: the windows over this forward.
        captured: under ``HELD``, the rows of the forward, held and checked.
    """

    def __init__(
        self,
        rig: Rig,
        places: str = "own",
        *,
        saves: bool = False,
        states: StateSupplier | None = None,
    ) -> None:
        self._rig = rig
        self._deferred = rig.policy == "deferred"
        self._most = rig.manager.config.max_rows
        shape = (len(rig.manager.groups), self._most + 3)
        self.slots = torch.full(shape, -1, dtype=torch.int64, device=rig.device)
        self._rows = self._most + _MORE * (places == HELD)
        #: Layers whose rows are prepared in the forward, where ``CapturedRows`` takes them.
        self._prepares = {ref.name for ref in rig.refs if ref.replay and places == HELD}
        self._fresh: LayerRows = {
            ref.name: tuple(
                torch.zeros(self._rows, *part.row_shape, dtype=part.format.dtype, device=rig.device)
                for part in (ref.given if ref.name in self._prepares else ref.kept)
            )
            for ref in rig.refs
        }
        #: By row its request, whose state it has; behind the batch a line that is padding.
        self._owner = torch.full((self._rows,), self._most, dtype=torch.int64, device=rig.device)
        self._replay: Callable[[], None] | None = None
        # A batch that looks like an earlier one has its layout, and so its launches.
        self._layout = cache(partial(RowLayout.build, device=rig.device))
        self._position = torch.full((self._rows,), -1, dtype=torch.int64, device=rig.device)
        self.captured: CapturedRows | None = None
        self._window: CapturedWindow | None = None
        self._saves, self._save = saves, None
        self._left: LayerRows = {}
        if places == HELD:
            self.windows = self._windows_over_held_rows()
            return
        given = self._places() if places == "given" and self._deferred else None
        self.windows = rig.manager.captured_windows(self.slots, given, states=states)
        self._position = self.windows.position
        if saves:
            self._save = self.windows.save_in_forward(self._rows)
        self._can_save = self._save is not None

    @property
    def leaves_saving(self) -> bool:
        """True if windows begin before their old rows are saved, by or just before the forward."""
        return self._saves and self._rig.policy == "undo" and self._can_save

    def save_before(self) -> None:
        """Let each window save its rows just before the forward, which then saves none."""
        self._save = None

    def _windows_over_held_rows(self) -> CapturedWindows:
        """Capture the forward first, since its tensors are made by it.

        Return windows over these tensors.

        Raises:
            AssertionError: rows were overwritten within the forward.
        """
        for parts in self._fresh.values():
            for part in parts:
                words(part).random_()
        self.captured = CapturedRows()
        self.run()  # every slot is -1, so no row is written
        assert self.captured.verify() == []
        self._left = self.captured.rows
        return self._rig.manager.captured_windows(self.slots, self._left, self._position)

    def _places(self) -> LayerRows:
        """Return storage of zeros for rows, with gaps between them, as in blocks of a cache."""
        return {
            ref.name: tuple(
                torch.zeros(
                    *(self._most, 2, *kept.row_shape),
                    dtype=kept.cells.dtype if isinstance(kept, Plane) else kept.format.dtype,
                    device=self._rig.device,
                )[:, 1]
                for kept in ref.kept
            )
            for ref in self._rig.refs
        }

    def load(self, batch: Batch) -> None:
        """Give the next forward its inputs: slots, and the rows that each layer will produce.

        Slots beyond the batch become -1.
        """
        self.slots.fill_(-1)
        slots = self._rig.slots(batch)
        for line, group in zip(self.slots, self._rig.manager.groups, strict=True):
            line[: len(slots[group])] = slots[group]
        self._owner.fill_(self._most)
        owners = [request for request, _ in batch.owners]
        self._owner[: batch.num_rows] = torch.tensor(owners, dtype=torch.int64)
        for ref in self._rig.refs:
            made = batch.tensors[ref.name]
            if ref.name not in self._prepares:
                made = CapturedRows(check=False).stage(ref, *made)
            for room, part in zip(self._fresh[ref.name], made, strict=True):
                words(room)[: batch.num_rows] = words(part)

    def begin(self, batch: Batch) -> CapturedWindow:
        """Load a batch, and begin its window, which is returned; nothing is run."""
        self.load(batch)
        self._rig.forget()
        plan = self.windows.plan(self._layout(batch.draft_len, batch.settled))
        self._window = self.windows.begin(plan, self._saves)
        return self._window

    def run(self) -> None:
        """Run the forward where the host does not see it; the first call captures it."""
        if self._replay is None:
            self._replay = self._captured()
        if self._saves and self._window is not None:
            self._window.before_forward(saves=self._save is not None)
        self._replay()

    def _captured(self) -> Callable[[], None]:
        """Return a function that runs the whole forward; on a GPU the replay of its graph.

        On a GPU it runs once, with every slot and mark -1, before it is captured.
        """

        def whole() -> None:
            """Save the old rows, if the forward does so, and run every layer."""
            if self._save is not None:
                self._save()
            for number in range(len(self._rig.refs)):
                self.layer(number)

        if self._rig.device.type != "cuda":
            return whole
        slots = self.slots.clone()
        self.slots.fill_(-1)  # so that warming up writes nothing
        position = self._position.clone()
        self._position.fill_(-1)
        whole()
        if self.captured is not None:
            self.captured = CapturedRows()  # of the graph, not of the warm-up
        graph = capture(whole)
        self.slots.copy_(slots)
        self._position.copy_(position)
        return graph.replay

    def layer(self, number: int) -> None:
        """Run one layer: write its rows, but put the marked drafts into the waiting storage.

        Of a layer with states all rows wait under ``deferred``; replayed layers write none.
        """
        ref = self._rig.refs[number]
        line = self.slots[list(self._rig.manager.groups).index(ref.group)]
        slots = {ref.group: line[self._owner] if ref.states else line[: self._rows]}
        waits = self._position >= 0
        if not self._deferred:
            waits = torch.zeros_like(waits)
        elif ref.states:
            waits = torch.ones_like(waits)
        fresh = self._fresh[ref.name] if self.captured is None else self._made(ref)
        if not ref.replay:
            write_layers([ref], {ref.name: fresh}, slots, ~waits)
        if self._deferred and self.captured is None:
            for room, part in zip(self.windows.rows[ref.name], fresh, strict=True):
                mask = waits.view(-1, *[1] * (room.ndim - 1))
                words(room).copy_(torch.where(mask, words(part), words(room)))

    def _made(self, ref: LayerRef) -> tuple[Tensor, ...]:
        """Make the rows of a layer: in new tensors that are held, or, in a replay, in the same."""
        assert self.captured is not None
        made = tuple(part.clone() for part in self._fresh[ref.name])
        if ref.name not in self._left:
            return self.captured.stage(ref, *made)
        if ref.name in self._prepares:
            made = CapturedRows(check=False).stage(ref, *made)
        for room, part in zip(self._left[ref.name], made, strict=True):
            words(room).copy_(words(part))
        return self._left[ref.name]

    def run_eagerly(self, window: CapturedWindow, layers: Sequence[int]) -> None:
        """Run some layers where the host sees them, and note each layer whose drafts wait."""
        for number in layers:
            self.layer(number)
            if self._deferred:
                window.note_staged(self._rig.refs[number])

    def sampled(self, counts: Sequence[int]) -> Tensor:
        """Return the tokens sampled per request for these accepted drafts, int32 on the device."""
        return torch.tensor([count + 1 for count in counts], dtype=torch.int32).to(self._rig.device)

    def step(self, batch: Batch, counts: Sequence[int]) -> CapturedWindow:
        """Run a whole step, and let the oracle do the same; return the committed window.

        Nothing is compared here.
        """
        window = self.begin(batch)
        self.run()
        self._rig.expect_staged(batch)
        window.commit_sampled(self.sampled(counts))
        self._rig.expect_committed(batch, batch.kept(counts))
        return window

    def next_step(self) -> None:
        """Run a step of three requests after one that ended in another way, and compare."""
        self.step(self._rig.batch(SHAPE), COUNTS)
        self._rig.check("the step after it")


def exact_steps(rig: Rig, forward: CapturedForward, shape: Shape) -> None:
    """Run three steps of a shape, each with other content, and check the caches after each part.

    A difference, or another final state than COMMITTED, is an AssertionError.
    """
    for _ in range(3):
        batch = rig.batch(shape)
        counts = random_counts(batch, rig.rng)
        window = forward.begin(batch)
        rig.check("begin writes nothing")
        forward.run()
        rig.expect_staged(batch)
        rig.check("settled rows alone are written, or all of them")
        window.commit_sampled(forward.sampled(counts))
        rig.expect_committed(batch, batch.kept(counts))
        rig.check("committed")
        assert window.state is WindowState.COMMITTED
