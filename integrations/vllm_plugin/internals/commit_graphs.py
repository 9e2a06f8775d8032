"""The commits of all layers' states as one launch: a CUDA graph whose branches run side by side.

One layer's commit at a few requests does not fill a GPU, and launching it takes the host longer
than running it. In the graph stand the very launches that commit layer by layer, vLLM's own, so
the states are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ....backends.launching.graph_launch import replay_of
from ....cuda_graphs import GraphCache, capture
from .state_tables import StateCommits, StateTables, VerifyStep

#: Branches of a graph: eight layers at one request fill an H200 about once.
BRANCHES: Final = 8

#: Captures launches; returns a function that launches them again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def captures() -> Capture:
    """Return a function that captures CUDA graphs, which share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda run: replay_of(capture(run, pool))


def side_streams(device: torch.device, layers: int) -> list[torch.cuda.Stream]:
    """Make the streams of a graph's branches; none without a GPU."""
    count = min(BRANCHES, layers) if device.type == "cuda" else 0
    return [torch.cuda.Stream(device) for _ in range(count)]


def write_side_by_side(
    verified: Sequence[StateCommits], step: VerifyStep, streams: Sequence[torch.cuda.Stream]
) -> None:
    """Write the states that the tables name, of several layers at once.

    Args:
        verified: the layers' rows; no two layers share a state.
        step: the step.
        streams: which take the layers in turn; none: one layer after another.
    """
    if not streams:
        for rows in verified:
            rows.commit(step)
        return
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for number, rows in enumerate(verified):
        with torch.cuda.stream(streams[number % len(streams)]):
            rows.commit(step)
    for stream in streams:
        main.wait_stream(stream)


class CommitGraphs:
    """Captured commits, by number of requests.

    A step takes the smallest graph that has its requests. The requests that it lacks have no rows
    there, so that their kernels end at once.

    Args:
        verified: the rows of all layers that have a state.
        tables: the tables that they read.
        width: most rows of a request.
        requests: most requests of a step.
        make: captures launches.
        kept: keeps what is captured.
    """

    def __init__(
        self,
        verified: Sequence[StateCommits],
        tables: StateTables,
        width: int,
        requests: int,
        make: Capture,
        kept: GraphCache,
    ) -> None:
        self._verified, self._tables, self._width = list(verified), tables, width
        device = tables.whole.device
        self._streams = side_streams(device, len(self._verified))
        self._starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        powers = (1 << power for power in range(requests.bit_length()))
        self._sizes = sorted({*(size for size in powers if size < requests), requests})
        #: By requests of a graph, a view of its first rows: slices take the host long.
        self._firsts = {size: self._starts[: size + 1] for size in self._sizes}
        self.make, self._kept = make, kept
        #: By requests, and whether the fused kernel verified: the graph, and what it launches; this
        #: in both places where the graph had to go.
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], Callable[[], None]]] = {}

    def capture(self) -> None:
        """Capture all graphs, the largest first: smaller ones find their memory in its pool.

        No request may have a block yet: each commit runs once before it is captured.
        """
        for size in reversed(self._sizes):
            for fused in {rows.may_fuse for rows in self._verified} | {False}:
                step = self._step(size, fused=fused)

                def run(step: VerifyStep = step) -> None:
                    write_side_by_side(self._verified, step, self._streams)

                self._tables.name_commits(self._tables.whole[:size], step.starts)
                run()
                dropped = partial(self._launch_singly, size, fused, run)
                replay = self._kept.add(partial(self.make, run), dropped)
                self._graphs[size, fused] = replay or run, run

    def _launch_singly(self, size: int, fused: bool, run: Callable[[], None]) -> None:
        """Make the launches of a size one by one."""
        self._graphs[size, fused] = run, run

    def _step(self, size: int, *, fused: bool) -> VerifyStep:
        """Describe a step of so many requests, in the buffers that graphs read."""
        starts = self._starts[: size + 1]
        rows = size * self._width
        given = [rows_of.metadata(size, rows, starts) for rows_of in self._verified]
        metadata = {name: each for pair in given if fused and pair for name, each in [pair]}
        return VerifyStep(size, rows, starts, None, metadata or None)

    @property
    def count(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def takes(self, step: VerifyStep) -> bool:
        """Tell whether there is a graph for a step."""
        return bool(self._graphs) and step.requests <= self._sizes[-1]

    def run(self, step: VerifyStep, kept: Tensor) -> None:
        """Write the states of a step in one launch; a raise has written none.

        Args:
            step: the step, of at most ``requests`` requests.
            kept: int ``[num_requests]``, the tokens sampled for each request; requests of the step
                beyond these have no rows.
        """
        size = self._name(step, kept)
        self._graphs[size, self._verified[0].was_fused(step)][0]()

    def launch(self, step: VerifyStep, kept: Tensor) -> None:
        """Make the launches of ``run`` one by one, for code that captures them with others."""
        size = self._name(step, kept)
        self._graphs[size, self._verified[0].was_fused(step)][1]()

    def _name(self, step: VerifyStep, kept: Tensor) -> int:
        """Name a step's commits to the graph that takes it; returns how many requests this has.

        The rows end where the last request's do: vLLM counts the padding of its own graphs among
        ``step.rows``, and the blocks behind the step's are those of earlier requests.
        """
        size = next(size for size in self._sizes if size >= step.requests)
        self._tables.name_commits(kept, step.starts, size, self._firsts[size])
        return size


def uses_graphs(runner: Any) -> bool:
    """Tell whether an engine runs captured graphs."""
    return str(runner.compilation_config.cudagraph_mode.name) != "NONE"
