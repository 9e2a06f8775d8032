"""Windows at fixed places, for engines whose forward is a CUDA graph.

A captured forward cannot be told anything new, so all that changes from step to step lies in
fixed buffers: ``position`` says which rows are drafts (``slot_tables`` reads it), ``rows`` is
where they wait, and the engine's own slot mapping is read where it is. One captured graph then
serves windows, bypassed steps and fallbacks alike: with no row marked as a draft every row is
written into the cache, as stock would.

Everything here is one launch on the host: no allocation, no wait. ``warm_up`` makes every launch
once, so that nothing is left to compile when it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import attrs
import torch
from torch import Tensor

from ..executor import StagedLayer
from ..layers import LayerRef
from ..layout import RowLayout
from ..rows import LayerRows
from . import triton_select as which
from .jobs import Job, Repeated
from .launches import Given, acceptance_of
from .tiling import tile_for
from .triton_executor import TritonExecutor

#: Bytes between the starts of two planes' rows are a multiple of this.
_ALIGNED: Final = 256

#: How often an acceptance has to lie in one place before a graph reads it there, which is made in
#: the middle of serving; and for how many places of one layout.
_OFTEN: Final = 16
_MOST_PLACES: Final = 4

#: What is shown after a failure.
_UNKNOWN: Final = object()


#: Layouts that something is prepared for; beyond, all is prepared anew.
_MOST_LAYOUTS: Final = 1024


@attrs.define(eq=False)
class _Ready:
    """What is prepared for windows of one layout.

    Attributes:
        marks: what ``position`` is while these windows' drafts are marked.
        save: launches the save, as a graph once there is one.
        commit: the commit's launch, with any acceptance.
        commits: by where an acceptance lies, the same as a graph: that takes less of the host.
        seen: how often one lay where.
    """

    marks: Tensor | None = None
    save: Callable[[], None] | None = None
    commit: Repeated | None = None
    commits: dict[int, torch.cuda.CUDAGraph] = attrs.Factory(dict)
    seen: Counter[int] = attrs.Factory(Counter)


class FixedWindow:
    """One window after another over the same buffers.

    Args:
        executor: over the layers; its launches are used, and its slots from now on are ``slots``.
        slots: the engine's slot mappings, int64 ``[num_groups, n]``, groups in the order of the
            executor's layers; the engine fills them before each forward.
        counters: int64 ``[lines, 4]``, see ``Txn.count``.
        undo: whether rows are written through and restored, instead of staged.
        rows: where rows wait, by layer name ``[max_rows, *row_shape]`` per plane, any strides; None
            makes room for them.

    Attributes:
        position: int64 ``[max_rows]``: 0, 1, ... for draft rows, -1 for all others.
        rows: by layer name, ``[max_rows, *row_shape]`` per plane: the staged rows, or under
            undo what the caches held before.
        nbytes: what all this takes on the device.
    """

    def __init__(
        self,
        executor: TritonExecutor,
        slots: Tensor,
        counters: Tensor,
        *,
        undo: bool,
        rows: LayerRows | None = None,
    ) -> None:
        self._executor = executor
        self._slots = slots
        self._counters = counters
        self._shown: object = None
        refs = executor.layers
        self._groups = (1 << len({ref.group for ref in refs})) - 1
        executor.use_slots(slots)
        self.position = torch.full(
            (executor.config.max_rows,), -1, dtype=torch.int64, device=refs[0].device
        )
        self._no_marks = self.position.clone()
        self.rows: LayerRows = _rows_of(refs, executor.config.max_rows) if rows is None else rows
        parts = [part for each in self.rows.values() for part in each]
        self.nbytes = sum(part.nbytes for part in parts) + 2 * self.position.nbytes
        self._ready: dict[RowLayout, _Ready] = {}
        self._stream: torch.cuda.Stream | None = None
        self._save = self._job(which.DRAFT, to_cache=False) if undo else None
        self._commit = self._job(which.REJECTED if undo else which.KEPT)

    def _job(self, select: int, *, to_cache: bool = True) -> Job:
        refs = self._executor.layers
        parts = [part for ref in refs for part in self.rows[ref.name]]
        job = self._executor.job("fixed", refs, parts, select, to_cache=to_cache)
        return attrs.evolve(job, table=job.table.clone())  # the executor's own may change

    def show(self, layout: RowLayout | None) -> None:
        """Mark the draft rows of the next forward; None marks no row, so all are written.

        Free where the last step looked the same, one copy where an earlier one did.
        """
        if layout is self._shown:
            return
        self._shown = _UNKNOWN  # whatever fails below, the next call does it all
        self.position.copy_(self._no_marks if layout is None else self._marks(layout))
        self._shown = layout

    def _marks(self, layout: RowLayout) -> Tensor:
        ready = self._ready.get(layout) or self._prepare(layout)
        if ready.marks is None:
            ready.marks = self._no_marks.clone()
            ready.marks[: layout.num_rows] = layout.position
        return ready.marks

    def rows_of(self, ref: LayerRef, plane: int) -> Tensor:
        """A plane's staged rows in the plane's own dtype."""
        return self.rows[ref.name][plane].view(ref.planes[plane].format.dtype)

    def save(self, layout: RowLayout) -> None:
        """Under undo: remember what the draft slots hold; before the forward."""
        ready = self._ready.get(layout) or self._prepare(layout)
        if ready.save is None:
            assert self._save is not None
            # There is no acceptance; the kernel does not look at what stands in its place.
            again = self._make(self._save, layout, acceptance_of(None, layout))
            ready.save = partial(again.run, layout.position)
        ready.save()

    def _prepare(self, layout: RowLayout) -> _Ready:
        if len(self._ready) >= _MOST_LAYOUTS:
            self._ready.clear()
        ready = self._ready[layout] = _Ready()
        return ready

    def commit(self, layout: RowLayout, sampled: Tensor) -> None:
        """Write the kept rows, or under undo restore the rejected ones, and count.

        Args:
            layout: the window's rows, which lead the batch.
            sampled: int32 ``[num_requests]`` or longer, on the device: tokens sampled for each,
                the accepted drafts and one more.
        """
        if not sampled.is_contiguous():
            sampled = sampled.contiguous()
        ready = self._ready.get(layout) or self._prepare(layout)
        place = sampled.data_ptr()
        graph = ready.commits.get(place)
        if graph is not None and sampled.dtype is torch.int32:
            graph.replay()
            return
        if ready.commit is None:
            ready.commit = self._make(self._commit, layout, (which.SAMPLED, sampled, 0, 0, 0))
        ready.commit.run(sampled)
        if sampled.is_cuda and len(ready.commits) < _MOST_PLACES and sampled.dtype is torch.int32:
            ready.seen[place] += 1
            if ready.seen[place] >= _OFTEN:
                ready.commits[place] = self._captured(partial(ready.commit.run, sampled))

    def _make(self, job: Job, layout: RowLayout, given: Given) -> Repeated:
        launch = self._executor.arranged(job, self._groups, layout, self._counters, given)
        return Repeated(launch)

    def warm_up(self, layouts: Sequence[RowLayout]) -> None:
        """Make every launch once, so that no kernel compiles and nothing is planned later.

        Nothing is written, but into the engine's slots, which become -1. So this is for a time
        when no step is under way.

        Args:
            layouts: those that will come most; all that depends on them is prepared.
        """
        self._slots.fill_(-1)
        for layout in (*layouts, *self._one_of_each_kind()):
            if layout.num_rows > self._executor.config.max_rows:
                continue
            self.show(layout)
            if self._save is not None:
                self.save(layout)
                self._capture_save(layout)
            none = torch.ones(layout.num_requests, dtype=torch.int32, device=self.position.device)
            self.commit(layout, none)
        self.show(None)

    def _capture_save(self, layout: RowLayout) -> None:
        """Nothing of such a launch ever changes, and a graph of it takes less of the host."""
        ready = self._ready[layout]
        if self.position.device.type == "cuda" and isinstance(ready.save, partial):
            ready.save = self._captured(ready.save).replay

    def _captured(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of one launch that was made before."""
        graph = torch.cuda.CUDAGraph()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph

    def _one_of_each_kind(self) -> Iterator[RowLayout]:
        """A layout for each way in which the kernel that moves rows can be compiled."""
        executor, seen = self._executor, set()
        for rows in range(1, executor.config.max_rows + 1):
            tile = tile_for(self._commit.plan, rows, executor.programs)
            kind = attrs.evolve(tile, programs=1)
            for parts in ((rows,), (1, rows - 1)):  # all requests alike, and not
                if rows >= 2 * len(parts) - 1 and (kind, len(parts)) not in seen:
                    seen.add((kind, len(parts)))
                    settled = (0,) * len(parts)
                    yield RowLayout.build(parts, settled, self.position.device)

    def staged(self, layers: Sequence[LayerRef], num_rows: int) -> list[StagedLayer]:
        """The staged rows of some layers, for a repair by the reference."""
        return [
            StagedLayer(ref, tuple(self.rows_of(ref, i)[:num_rows] for i in range(len(ref.planes))))
            for ref in layers
        ]


def _rows_of(refs: Sequence[LayerRef], max_rows: int) -> LayerRows:
    """Room for ``max_rows`` rows of every plane, in one allocation."""
    planes = [plane for ref in refs for plane in ref.planes]
    sizes = [-(-max_rows * plane.row_bytes // _ALIGNED) * _ALIGNED for plane in planes]
    room = torch.empty(sum(sizes), dtype=torch.uint8, device=planes[0].cells.device)
    parts = iter(room.split(sizes))
    return {
        ref.name: tuple(
            next(parts)[: max_rows * plane.row_bytes]
            .view(plane.cells.dtype)
            .view(max_rows, *plane.row_shape)
            for plane in ref.planes
        )
        for ref in refs
    }
