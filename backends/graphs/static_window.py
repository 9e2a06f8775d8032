"""Prepared launches for windows over a captured forward; a recurring launch becomes a graph.

Nothing of such a launch changes from step to step but the acceptance, so it is arranged once for
each layout. Where the acceptance lies at the same address again and again, a CUDA graph of the
launch takes less of the host. Nothing here allocates or waits once a layout was seen. All graphs
are in the executor's ``GraphCache``: a layout whose graph had to go launches as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import attrs
import torch
from torch import Tensor

from ...captured_launches import CapturedLaunches, CapturedPlaces, LayoutLaunches
from ...cuda_graphs import GraphCache, Replay, capture
from ...executor import Executor
from ...layout import RowLayout
from ...log import get_logger
from ...state_supplier import Capture
from ..launching.kernel_call import KernelCall
from ..move_rows.acceptance import AcceptanceArg, acceptance_arg
from ..move_rows.launch import CachedLaunch, MovePlan
from ..move_rows.selection import Accept
from ..move_rows.tile_sizes import tile_for

log = get_logger()

#: Capture a commit once an acceptance was seen at the same address this often: it is done in the
#: middle of serving.
_OFTEN: Final = 16
#: The same for a commit of rows and states: it spares two launches, and more of the host.
_OFTEN_WITH_STATES: Final = 8
#: Addresses of a layout that are counted; when there are more, all are forgotten.
_MOST_SEEN: Final = 256

#: Arranges the launch of a plan over rows of a layout, with an acceptance. One without acceptance
#: keeps the slots, where ``CapturedPlaces`` has a place for them.
Arrange = Callable[[MovePlan, RowLayout, AcceptanceArg], KernelCall]


class RecurringGraphs:
    """Counts launches, and captures a launch that recurs as a graph.

    A capture costs a step many launches' time, so it is worth it only for what comes often. A graph
    that the cache drops is forgotten, and captured again once its launch came as often anew.

    Args:
        graphs: keeps what is captured.
        most_seen: launches that are counted; when there are more, all counts are forgotten.
    """

    def __init__(self, graphs: GraphCache, most_seen: int = _MOST_SEEN) -> None:
        self._graphs: Final = graphs
        self._most_seen: Final = most_seen
        self._seen: Counter[int] = Counter()

    def recurs(self, key: int, often: int) -> bool:
        """Count a launch.

        Tell whether this is just the ``often``-th time, so that it is to be captured.
        """
        if len(self._seen) > self._most_seen:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] == often

    def capture(
        self,
        key: int,
        make: Callable[[], Replay | None],
        replays: dict[int, Replay],
    ) -> None:
        """Capture a launch and put what launches its graph into ``replays``, if the cache has room.

        Args:
            key: names the launch, as in ``recurs``.
            make: captures; as for ``GraphCache.add``.
            replays: gets what launches the graph, and loses it when the cache drops the graph.
        """

        def dropped() -> None:
            """Forget the graph, and count its launch from 0 again."""
            del replays[key]
            self._seen[key] = 0

        replay = self._graphs.add(make, dropped)
        if replay is not None:
            replays[key] = replay


class StaticLaunches(CapturedLaunches):
    """Launches of ``move_rows`` over fixed places.

    Args:
        executor: the executor whose layers and settings are used.
        places: the fixed tensors of the captured forward.
        save: the plan that saves drafts' rows under ``undo``; None under other policies.
        commit: the plan of a commit. Both have tables of addresses of their own.
        arrange: makes the launch of a plan over the slots of ``places``.
        programs: programs that fill the device.
    """

    def __init__(
        self,
        executor: Executor,
        places: CapturedPlaces,
        save: MovePlan | None,
        commit: MovePlan,
        arrange: Arrange,
        programs: int,
    ) -> None:
        self._max_rows = executor.config.max_rows
        self.graphs = executor.graphs
        self._device = places.slots.device
        self._save, self._commit = save, commit
        self._arrange = arrange
        self._programs = programs

    def prepare(self, layout: RowLayout) -> StaticLayout:
        """Return the launches of a layout; each is arranged when it is first called."""
        return StaticLayout(self, layout)

    def saving(self, layout: RowLayout) -> Callable[[], None]:
        """Return a function that saves a layout's drafts, and slots where they may be replaced.

        Nothing is launched now. Only under ``undo``.
        """
        assert self._save is not None
        # There is no acceptance; the kernel does not read the tensor that stands in its place.
        call = self._arrange(self._save, layout, acceptance_arg(None, layout))
        return partial(CachedLaunch(call).run, layout.position)

    @property
    def saves(self) -> bool:
        """True under ``undo``, where rows are saved before the forward."""
        return self._save is not None

    def committing(self, layout: RowLayout, sampled: Tensor) -> CachedLaunch:
        """Arrange the commit for counts of sampled tokens of this dtype; launch nothing."""
        acceptance = AcceptanceArg(Accept.SAMPLED, sampled)
        return CachedLaunch(self._arrange(self._commit, layout, acceptance))

    def keep(self, launch: Callable[[], None], dropped: Callable[[], None]) -> Replay | None:
        """Capture a launch that ran before, and keep it in the executor's ``GraphCache``.

        Returns:
            The replay, or None if it could not be captured; see ``GraphCache.add``.
        """
        return self.graphs.add(lambda: self.captured(launch), dropped)

    def captured(self, launch: Callable[[], None]) -> Replay | None:
        """Capture a launch that ran before, and return its replay.

        None without a GPU, during another capture, and if capturing fails, which is logged.
        """
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return None
        try:
            return capture(launch).replay
        except RuntimeError as error:  # the plain launch still works
            log.debug("static_window.not_captured", error=repr(error))
            return None

    def variants(self) -> Iterator[RowLayout]:
        """Yield one layout per compiled variant of the kernel, for up to ``max_rows`` rows."""
        seen = set()
        for rows in range(1, self._max_rows + 1):
            tile = tile_for(self._commit.planes, rows, self._programs)
            kind = attrs.evolve(tile, programs=1)
            for parts in ((rows,), (1, rows - 1)):  # all requests alike, and not
                if rows >= 2 * len(parts) - 1 and (kind, len(parts)) not in seen:
                    seen.add((kind, len(parts)))
                    yield RowLayout.build(parts, (0,) * len(parts), self._device)


class StaticLayout(LayoutLaunches):
    """The launches of one layout.

    Args:
        launches: arranges and captures.
        layout: the rows, which lead the batch.
    """

    saves_slots = True

    def __init__(self, launches: StaticLaunches, layout: RowLayout) -> None:
        self._launches = launches
        self._layout = layout
        self._run: CachedLaunch | None = None
        self.replays: dict[int, Callable[[], None]] = {}
        self.with_states: dict[int, Callable[[], None]] = {}
        self._recurring = RecurringGraphs(launches.graphs)
        self._with_states = RecurringGraphs(launches.graphs)

    def save(self) -> None:
        """Save the drafts' rows and the slots; the first call arranges the launch.

        The launch replaces this method.
        """
        self.save = self._launches.saving(self._layout)  # type: ignore[method-assign]
        self.save()

    def warm_up(self, sampled: Tensor) -> None:
        """Launch save, if rows are saved, and commit once.

        Capture the save, whose arguments never change.
        """
        if self._launches.saves:
            self.save()
            arranged = self.save

            def dropped() -> None:
                """Launch the save without a graph from now on."""
                self.save = arranged  # type: ignore[method-assign]

            self.save = self._launches.keep(arranged, dropped) or arranged  # type: ignore[method-assign]
        self.commit(sampled)

    def commit(self, sampled: Tensor) -> None:
        """Commit in one launch, see ``LayoutLaunches``; ``sampled`` is the acceptance.

        The address of an int32 acceptance on a GPU is counted, and a graph captured for one that
        recurs.
        """
        sampled = sampled.contiguous()
        if self._run is None:
            self._run = self._launches.committing(self._layout, sampled)
        self._run.run(sampled)
        if sampled.is_cuda and sampled.dtype is torch.int32:
            self._note_place(sampled)

    def recurs_with_states(self, sampled: Tensor) -> bool:
        """Count this address; tell whether this is the time to capture.

        False before a commit of rows.
        """
        if self._run is None:
            return False
        return self._with_states.recurs(sampled.data_ptr(), _OFTEN_WITH_STATES)

    def capture_with(
        self, sampled: Tensor, states: Callable[[], None], capture: Capture | None
    ) -> None:
        """Capture the commit behind that of the states, into ``with_states``.

        If this fails, the error is logged, and they stay two launches.

        Args:
            sampled: the tensor of counts whose address the graph will read.
            states: launches the commit of the states.
            capture: captures a function as a graph; None: as this executor does.
        """
        run = self._run
        assert run is not None  # ``recurs_with_states`` said so
        place = sampled.data_ptr()

        def both() -> None:
            """Commit the states, then the rows."""
            states()
            run.run(sampled)

        make = partial(self._launches.captured if capture is None else capture, both)
        try:
            self._with_states.capture(place, make, self.with_states)
        except Exception as error:  # both commits still work, one after the other
            log.debug("static_window.not_captured", error=repr(error))

    def _note_place(self, sampled: Tensor) -> None:
        """Count an acceptance's address.

        Capture the commit into ``replays`` if this address recurs.
        """
        assert self._run is not None
        place = sampled.data_ptr()
        if self._recurring.recurs(place, _OFTEN):
            launch = partial(self._run.run, sampled)
            make = partial(self._launches.captured, launch)
            self._recurring.capture(place, make, self.replays)
