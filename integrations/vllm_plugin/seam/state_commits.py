"""A verify step of recurrent layers and its commit: the step's requests, and the tables it goes by.

One table names the states that are read, another the states that are written. ``CommitGraphs``
makes the commits of all layers one launch: a CUDA graph whose branches run side by side. One
layer's commit at a few requests does not fill a GPU, and launching it takes the host longer than
running it. In the graph stand the very launches that commit layer by layer, vLLM's own, so the
states are the same to the bit.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from ....cuda_graphs import GraphCache, capture
from ....state_supplier import Capture
from ..policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from .runner_protocols import GatedDeltaMetadata, Runner, SelectiveMetadata

if TYPE_CHECKING:
    from ....backends.state_tables.block_boundaries import BlockTables
    from ....backends.state_tables.commit_table import CommitNames


@attrs.frozen(eq=False)
class StateTables:
    """Tables for the kernels, at fixed addresses, which captured graphs read.

    Kernels read the state that the last column of a line names. They write the states that the
    columns before it name, one for each row of the request. 0 is no block.

    A commit has two lines for each request, one for its kept rows and one for the rest. The second
    names no block: kernels that end at once there compute the kept rows alone.

    Attributes:
        sources: int32 ``[num_groups, num_requests, most_rows + 1]``: nothing is written.
        commits: int32 ``[num_groups, 2 * num_requests, most_rows + 1]``: the state after the last
            kept row is written.
        kept: int32 ``[2 * num_requests + 1]``, where the rows of each line of ``commits`` begin.
        whole: int32 ``[2 * num_requests]``: what makes the kernels read from the last column.
        counts: int32 ``[num_requests]``, the rows that each request keeps.
        ends: int32 ``[num_requests + 1]``, the first row of each request, where nobody asks for it.
        boundary: int32 ``[num_requests]``, the rows after which each request is at the end of a
            block of the prefix cache; None where that keeps no states.
        snapshots: int32 ``[num_groups, num_requests]``, likewise, the block that keeps the state
            at this end, beside the block of the request's present state; 0 is none.
        captured: by group, vLLM's table of the forward that is being captured, at the address at
            which each replay finds its blocks; empty in other forwards.
        first: by group, the layer that runs first in that forward.
    """

    sources: Tensor
    commits: Tensor
    kept: Tensor
    whole: Tensor
    counts: Tensor
    ends: Tensor
    boundary: Tensor | None = None
    snapshots: Tensor | None = None
    captured: dict[int, Tensor] = attrs.Factory(dict)
    first: dict[int, object] = attrs.Factory(dict)
    _names: list[CommitNames] = attrs.Factory(list)

    @classmethod
    def build(
        cls,
        groups: int,
        requests: int,
        rows: int,
        device: torch.device,
        *,
        replay: bool = False,
        aligned: bool = False,
    ) -> StateTables:
        """Make tables for so many requests, with at most ``rows`` rows each; no line names a block.

        Args:
            groups: of layers with states.
            requests: the most of a step.
            rows: the most of a request.
            device: of the tables.
            replay: there is no table of commits: nothing but ``counts`` is read there.
            aligned: the prefix cache keeps states at the ends of blocks, so ``boundary`` and
                ``snapshots`` exist.
        """
        sources, commits = (
            torch.zeros(groups, lines, rows + 1, dtype=torch.int32, device=device)
            for lines in (requests, 0 if replay else 2 * requests)
        )
        kept = torch.zeros(2 * requests + 1, dtype=torch.int32, device=device)
        whole = torch.full((2 * requests,), rows + 1, dtype=torch.int32, device=device)
        counts = torch.ones(requests, dtype=torch.int32, device=device)
        ends = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        if not aligned:
            return cls(sources, commits, kept, whole, counts, ends)
        boundary = torch.full((requests,), rows + 1, dtype=torch.int32, device=device)
        snapshots = torch.zeros(groups, requests, dtype=torch.int32, device=device)
        return cls(sources, commits, kept, whole, counts, ends, boundary, snapshots)

    @property
    def most_requests(self) -> int:
        """The most requests that a step may have."""
        return int(self.sources.shape[1])

    def name_sources(self, group: int, table: Tensor) -> None:
        """Let a group's kernels read the state in the first block of each line of vLLM's table.

        Args:
            group: number of the group; the last column of its ``sources`` is written.
            table: int32 ``[num_requests, columns]``.
        """
        self.sources[group, : table.shape[0], -1].copy_(table[:, 0])

    def name_in_graph(self, group: int, layer: object) -> None:
        """In a forward that is captured, copy the group's blocks within the graph, once per group.

        The first layer that asks for a group does so; in other forwards, and for other layers,
        nothing happens. The host names no blocks in the steps that replay the graph.
        """
        table = self.captured.get(group)
        if table is not None and self.first.setdefault(group, layer) is layer:
            self.name_sources(group, table)

    def begin_forward(self) -> None:
        """Forget a captured forward's tables, and which layer came first in each group."""
        self.captured.clear()
        self.first.clear()

    def name_snapshots(
        self, blocks: BlockTables, lengths: Tensor, starts: Tensor, step: VerifyStep
    ) -> None:
        """Fill ``boundary`` and ``snapshots``: the blocks to keep states at the ends of blocks.

        Args:
            blocks: the batch's block tables.
            lengths: int32 ``[places]``, tokens of each request of the batch, the step's included.
            starts: int32 ``[places + 1]``, the first row of each.
            step: the step whose requests ``name_sources`` was given.
        """
        from ....backends.state_tables.block_boundaries import name_snapshots

        assert self.boundary is not None
        assert self.snapshots is not None
        count = step.requests
        to = self.boundary[:count], self.snapshots[:, :count]
        name_snapshots(blocks, lengths, starts, step.places, self.sources[:, :count, -1], *to)

    def name_commits(
        self, sampled: Tensor, starts: Tensor, lines: int = 0, first: Tensor | None = None
    ) -> None:
        """Fill ``counts``, ``commits``, ``kept``: the state after each last kept row is written.

        A request keeps as many rows as tokens were sampled for it, but at least one, as in vLLM,
        and at most ``most_rows``. With ``boundary``, a state at a block's end is named, too.
        Without a table of commits (``replay``) only ``counts`` and ``first`` are filled. Nothing
        waits for the device.

        Args:
            sampled: int ``[num_requests]``, the number of tokens sampled for each.
            starts: int32 ``[num_requests + 1]`` at least: the first row of each request, and the
                end.
            lines: name commits of so many requests, if these are more; those have no rows.
            first: int32 ``[lines + 1]`` or None; written: the first row of each, and the end.
        """
        count, most = sampled.shape[0], self.commits.shape[2] - 1
        lines = max(lines, count)
        if sampled.is_cuda and self.commits.shape[1]:
            self._launched.run(sampled, starts, lines, self.ends if first is None else first)
            return
        rows = torch.clamp(sampled.to(torch.int32), 1, most, out=self.counts[:count])
        if first is not None:
            first[: count + 1].copy_(starts[: count + 1])
            first[count + 1 : lines + 1] = starts[count]
        if not self.commits.shape[1]:
            return
        commits, blocks = self.commits[:, : 2 * count], self.sources[:, :count, -1:]
        self.commits[:, : 2 * lines].zero_()
        whose = commits[:, ::2]
        whose[:, :, -1:].copy_(blocks)
        self._name_kept_ends(whose, rows)
        last = rows.to(torch.int64) - 1
        whose.scatter_(2, last.view(1, count, 1).expand(blocks.shape), blocks)
        begin, end = starts[:count], starts[1 : count + 1]
        self.kept[: 2 * count : 2].copy_(begin)
        torch.minimum(begin + rows, end, out=self.kept[1 : 2 * count : 2])
        self.kept[2 * count : 2 * lines + 1] = starts[count]

    @property
    def _launched(self) -> CommitNames:
        """The launch that names commits on a GPU; made once, as the tables stay where they are."""
        if not self._names:
            from ....backends.state_tables.commit_table import CommitNames

            to = self.commits, self.kept, self.counts
            ends = self.boundary, self.snapshots
            self._names.append(CommitNames(self.sources[:, :, -1], *to, *ends))
        return self._names[0]

    def _name_kept_ends(self, lines: Tensor, rows: Tensor) -> None:
        """Name in ``lines`` the block that keeps the state at a block's end, if that row is kept.

        Changes ``lines`` in place; nothing without ``boundary``. Where the end is also the
        request's last kept row, the request's own block takes that column later, and vLLM copies
        that block.

        Args:
            lines: int32 ``[num_groups, num_requests, most_rows + 1]``.
            rows: int32 ``[num_requests]``, the rows that each request keeps.
        """
        if self.boundary is None or self.snapshots is None:
            return
        count, most = rows.shape[0], lines.shape[2] - 1
        ends = self.boundary[:count]
        blocks = self.snapshots[:, :count].where(ends <= rows, 0)
        column = (ends.clamp(max=most) - 1).to(torch.int64)
        lines.scatter_(2, column.view(1, count, 1).expand_as(blocks[..., None]), blocks[..., None])


@attrs.frozen(eq=False)
class VerifyStep:
    """The requests that a step verifies, first to last.

    Attributes:
        requests: their number.
        rows: the number of their rows.
        starts: int32 ``[requests + 1]``, the first row of each, and the end.
        places: int64 ``[requests]``, the place of each in the batch; None for 0, 1, ...
        metadata: vLLM's metadata by layer; None where there is no forward, as in a warm-up.
    """

    requests: int
    rows: int
    starts: Tensor
    places: Tensor | None
    metadata: Any


class StateCommits(abc.ABC):
    """An object that verifies the rows of one layer, or of several, and commits their states.

    Attributes:
        may_fuse: vLLM's fused kernel may verify, in steps in which no request prefills. Else there
            is one kernel.
    """

    may_fuse = False

    def was_fused(self, step: VerifyStep) -> bool:
        """Tell whether vLLM's fused kernel verified a step; without such a kernel, False."""
        return False

    def metadata(self, requests: int, rows: int, starts: Tensor) -> tuple[str, Any] | None:
        """Make the layer's name and the metadata of a step that the fused kernel verifies.

        None where there is no such kernel, as here.
        """
        return None

    @abc.abstractmethod
    def hook(self) -> None:
        """Let the layers verify without writing a state, and keep their rows."""

    @abc.abstractmethod
    def unhook(self) -> None:
        """Give the layers their own methods back."""

    @abc.abstractmethod
    def commit(self, step: VerifyStep) -> None:
        """Write the states after the rows that ``StateTables.name_commits`` has named as kept."""


# -- the requests of a step, read from vLLM's metadata ------------------------------------

#: The method of vLLM's ``model_state`` that makes a step's metadata, with its parameters.
MODEL_STATE_METHODS: Final = {
    "prepare_attn": (
        *("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
        *("kv_cache_config", "for_capture", "ubatch_idx", "model_specific_attn_metadata"),
    ),
}


def counts_of_step(step: VerifyStep, sampled: Tensor) -> Tensor:
    """Select the counts of the step's requests, in the step's order, from those of the batch.

    With fewer counts than the step has requests, all counts are returned.
    """
    if step.places is not None:
        return sampled[step.places]
    return sampled if sampled.shape[0] <= step.requests else sampled[: step.requests]


def _gated_delta_step(given: GatedDeltaMetadata, metadata: object) -> VerifyStep | None:
    """Describe a step by ``given``, one gated delta net's metadata; None without drafts.

    ``metadata`` is vLLM's by layer, for ``VerifyStep``.
    """
    count = int(given.num_spec_decodes)
    if given.spec_sequence_masks is None or not count:
        return None
    places = None
    if given.num_prefills or given.num_decodes:
        # Sorted on the device, since counting what is true there would make the host wait.
        first = given.spec_sequence_masks.to(torch.int8).argsort(descending=True, stable=True)
        places = first[:count]
    starts = given.spec_query_start_loc[: count + 1]
    return VerifyStep(count, int(given.num_spec_decode_tokens), starts, places, metadata)


def _mamba2_step(given: SelectiveMetadata, metadata: object) -> VerifyStep | None:
    """Describe the step of Mamba-2 layers, by the metadata of one of them.

    None if no request decodes, or if vLLM does not speculate.
    """
    count = int(given.num_decodes)
    if not count or given.num_accepted_tokens is None:
        return None
    starts = given.query_start_loc_d[: count + 1]
    return VerifyStep(count, int(given.num_decode_tokens), starts, None, metadata)


#: By kind of layer, what describes a step by the metadata of one of its layers.
STEPS: Final[Mapping[str, Callable[[Any, Any], VerifyStep | None]]] = {
    GATED_DELTA: _gated_delta_step,
    OLMO_DELTA: _gated_delta_step,
    MAMBA2: _mamba2_step,
}


#: Place of ``for_capture`` among the arguments of ``prepare_attn`` after the mode of graphs.
_FOR_CAPTURE: Final = MODEL_STATE_METHODS["prepare_attn"].index("for_capture") - 2


def is_capture(args: tuple[object, ...], named: Mapping[str, object]) -> bool:
    """Tell whether vLLM makes metadata for a forward to be captured, by the arguments of the call.

    Args:
        args: the positional arguments of ``prepare_attn`` after the mode of graphs.
        named: the keyword arguments.
    """
    given = args[_FOR_CAPTURE] if len(args) > _FOR_CAPTURE else named.get("for_capture")
    return bool(given)


def is_replay(mode: object) -> bool:
    """Tell whether a step of a mode of graphs is the replay of a graph of a whole forward."""
    return getattr(mode, "name", "") == "FULL"


# -- commits of all layers as one launch --------------------------------------------------

#: Branches of a graph: eight layers at one request fill an H200 about once.
BRANCHES: Final = 8


def captures() -> Capture:
    """Return a function that captures launches as a CUDA graph and returns the graph's replay.

    All graphs that one such function captures share one pool of memory.
    """
    pool = torch.cuda.graph_pool_handle()
    return lambda run: capture(run, pool).replay


def side_streams(device: torch.device, layers: int) -> list[torch.cuda.Stream]:
    """Make streams for a graph's branches, one per layer but at most ``BRANCHES``.

    The list is empty without a GPU.
    """
    count = min(BRANCHES, layers) if device.type == "cuda" else 0
    return [torch.cuda.Stream(device) for _ in range(count)]


def write_side_by_side(
    verified: Sequence[StateCommits], step: VerifyStep, streams: Sequence[torch.cuda.Stream]
) -> None:
    """Write the states that ``StateTables.commits`` names, of several layers at once.

    Args:
        verified: the layers.
        step: the step.
        streams: the layers run on these by turns; they wait for the current stream before, and it
            for them after. Without any the layers run one after the other on the current one.
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
        """Capture a graph for each size, with and without the fused kernel, the largest size first.

        Smaller graphs find their memory in the pool of larger ones. No request may have a block
        yet: each commit runs once before it is captured. A size whose graph the cache does not
        take, or drops later, is launched one by one.
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
        """Replace the graph of a size by its launches, one by one."""
        self._graphs[size, fused] = run, run

    def _step(self, size: int, *, fused: bool) -> VerifyStep:
        """Describe a step of ``size`` requests with the most rows each, in the graphs' buffers.

        With ``fused`` it has the metadata of the layers that have a fused kernel.
        """
        starts = self._starts[: size + 1]
        rows = size * self._width
        given = [rows_of.metadata(size, rows, starts) for rows_of in self._verified]
        metadata = {name: each for pair in given if fused and pair for name, each in [pair]}
        return VerifyStep(size, rows, starts, None, metadata or None)

    @property
    def count(self) -> int:
        """The number of captured sizes, with and without the fused kernel."""
        return len(self._graphs)

    def takes(self, step: VerifyStep) -> bool:
        """Tell whether graphs are captured, the largest of which has room for a step's requests."""
        return bool(self._graphs) and step.requests <= self._sizes[-1]

    def run(self, step: VerifyStep, kept: Tensor) -> None:
        """Write the states of a step by one graph, or by single launches where the graph had to go.

        If the graph raises, no state is written.

        Args:
            step: the step, of at most ``requests`` requests.
            kept: int ``[num_requests]``, the number of tokens sampled for each request; requests of
                the step beyond these have no rows.
        """
        size = self._name(step, kept)
        self._graphs[size, self._verified[0].was_fused(step)][0]()

    def launch(self, step: VerifyStep, kept: Tensor) -> None:
        """Make the launches of ``run`` one by one, for code that captures them with others."""
        size = self._name(step, kept)
        self._graphs[size, self._verified[0].was_fused(step)][1]()

    def _name(self, step: VerifyStep, kept: Tensor) -> int:
        """Name a step's commits to the smallest graph that takes it; return that graph's requests.

        The rows end where the last request's do: vLLM counts the padding of its own graphs among
        ``step.rows``, and the blocks behind the step's are those of earlier requests.
        """
        size = next(size for size in self._sizes if size >= step.requests)
        self._tables.name_commits(kept, step.starts, size, self._firsts[size])
        return size


def uses_graphs(runner: Runner) -> bool:
    """Tell whether an engine runs captured CUDA graphs, by its configuration."""
    return str(runner.compilation_config.cudagraph_mode.name) != "NONE"
