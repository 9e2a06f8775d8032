"""Tables of the states that the kernels of a verify step read, and those of its commit write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from ....backends.state_tables.block_boundaries import BlockTables
    from ....backends.state_tables.commit_table import CommitNames


@attrs.frozen(eq=False)
class StateTables:
    """Tables for the kernels, at fixed addresses, which captured graphs read.

    A line's last column is the one that the kernels read from; columns before it, one for each row
    of the request, are those that they write to. 0 is no block.

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
        """Make tables for so many requests, with at most ``rows`` rows each.

        Args:
            groups: of layers with states.
            requests: the most of a step.
            rows: the most of a request.
            device: of the tables.
            replay: there is no table of commits: nothing but ``counts`` is read there.
            aligned: the prefix cache keeps states at the ends of blocks.
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
        """Let a group's kernels read the first block of each request of vLLM's table."""
        self.sources[group, : table.shape[0], -1].copy_(table[:, 0])

    def name_in_graph(self, group: int, layer: object) -> None:
        """In a forward that is captured, name the blocks in the graph, once for each group.

        So the host names none in the steps that replay it.

        Args:
            group: the layer's.
            layer: the one whose kernel is launched next.
        """
        table = self.captured.get(group)
        if table is not None and self.first.setdefault(group, layer) is layer:
            self.name_sources(group, table)

    def begin_forward(self) -> None:
        """Forget the tables of a forward that was captured."""
        self.captured.clear()
        self.first.clear()

    def name_snapshots(
        self, blocks: BlockTables, lengths: Tensor, starts: Tensor, step: VerifyStep
    ) -> None:
        """Name the blocks that are to keep the states at the ends of blocks.

        Args:
            blocks: the batch's block tables.
            lengths: int32 ``[places]``, tokens of each request of the batch, the step's included.
            starts: int32 ``[places + 1]``, the first row of each.
            step: the step whose requests ``name_sources`` was told.
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
        """Say how many rows each request keeps: the state after the last of them is written.

        Args:
            sampled: int ``[num_requests]``, the tokens sampled for each; as in vLLM, a request
                without any keeps its first row.
            starts: int32, the first row of each request, and the end; more of them are not read.
            lines: name commits of so many requests, if these are more; those have no rows.
            first: int32 ``[lines + 1]``; written: the first row of each, and the end.
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
        """Let the state after the row at a block's end be written, where that row is kept.

        A state that is at the end after its last kept row has one column for two blocks: there the
        request's own block comes later and takes its place, and vLLM copies that one.
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


class StateCommits(Protocol):
    """An object that verifies the rows of one layer, or of several, and commits their states.

    Attributes:
        may_fuse: vLLM's fused kernel may verify, in steps in which no request prefills.
    """

    may_fuse: bool

    def was_fused(self, step: VerifyStep) -> bool:
        """Tell which kernel verified, by vLLM's own conditions: a graph does not say it."""

    def metadata(self, requests: int, rows: int, starts: Tensor) -> tuple[str, Any] | None:
        """Make metadata of a step that the fused kernel verifies, and the layer's name.

        None where there is no such kernel.
        """

    def hook(self) -> None:
        """Let the layers verify without writing a state, and keep their rows."""

    def unhook(self) -> None:
        """Give the layers their own methods back."""

    def commit(self, step: VerifyStep) -> None:
        """Write the states after the rows that ``StateTables.name_commits`` was told."""
