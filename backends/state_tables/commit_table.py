"""Tables of state blocks that name what a step's commit writes, for kernels that take them.

Such a kernel writes the state after a row to the block in that row's column, if the column names
one. So from how many rows each request keeps follows a line of the table, and where its rows end.
One launch says it for all groups and requests of a step, the padding of captured graphs included.
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import triton
import triton.language as tl
from torch import Tensor, int32

from ..launching.kernel_call import KernelCall
from ..launching.repeated_launch import ALIGNED, RepeatedLaunch

#: Requests of a program.
_REQUESTS: Final = 32
#: Warps of a program.
_WARPS: Final = 4
#: Arguments that differ from step to step.
_STEP: Final = ("sampled", "starts", "first", "given", "lines")


@triton.jit(
    do_not_specialize=[
        *("given", "lines", "source_stride", "group_stride", "snapshot_stride", "commit_stride"),
    ]
)
def names_of(
    sampled: tl.tensor,
    starts: tl.tensor,
    first: tl.tensor,
    sources: tl.tensor,
    boundary: tl.tensor,
    snapshots: tl.tensor,
    commits: tl.tensor,
    kept: tl.tensor,
    counts: tl.tensor,
    given: tl.int32,
    lines: tl.int32,
    source_stride: tl.int32,
    group_stride: tl.int64,
    snapshot_stride: tl.int64,
    commit_stride: tl.int64,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    REQUESTS: tl.constexpr,
) -> None:
    """Write ``commits``, ``kept``, ``first`` and ``counts``, as ``CommitNames.run`` describes.

    Grid: (runs of requests, groups). The programs of group 0 write all but ``commits``.
    """
    number = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    group = tl.program_id(1).to(tl.int64)
    live = number < given
    inside = number < lines
    rows = tl.load(sampled + number, mask=live, other=1)
    rows = tl.minimum(tl.maximum(rows, 1), ROWS)
    place = sources + group * group_stride + number * source_stride
    block = tl.load(place, mask=live, other=0)
    column = tl.arange(0, COLUMNS)
    names = (column == ROWS)[None, :] | (column[None, :] == (rows - 1)[:, None])
    line = tl.where(names, block[:, None], 0)
    if SNAPSHOTS:
        ends = tl.load(boundary + number, mask=live, other=0)
        end_block = tl.load(snapshots + group * snapshot_stride + number, mask=live, other=0)
        ends = tl.where(ends < rows, ends, 0)  # at the last kept row the request's own comes later
        line = tl.where(column[None, :] == (ends - 1)[:, None], end_block[:, None], line)
    to = commits + group * commit_stride + (2 * number * (ROWS + 1))[:, None] + column[None, :]
    mask = inside[:, None] & (column <= ROWS)[None, :]
    tl.store(to, line, mask=mask)
    tl.store(to + (ROWS + 1), tl.zeros_like(line), mask=mask)
    if group == 0:
        begin = tl.load(starts + tl.minimum(number, given), mask=inside, other=0)
        end = tl.load(starts + tl.minimum(number + 1, given), mask=inside, other=0)
        tl.store(counts + number, rows, mask=live)
        tl.store(first + number, begin, mask=inside)
        tl.store(kept + 2 * number, begin, mask=inside)
        tl.store(kept + 2 * number + 1, tl.minimum(begin + rows, end), mask=inside)
        if tl.program_id(0) == 0:
            last = tl.load(starts + given)
            tl.store(kept + 2 * lines, last)
            tl.store(first + lines, last)


class CommitNames:
    """Names the commits of steps in tables that stay where they are.

    Args:
        sources: int32 ``[num_groups, num_requests]``, any strides, the blocks of the states.
        commits: int32 ``[num_groups, 2 * num_requests, most_rows + 1]``, contiguous; written: a
            line for each request's kept rows, and one for the rest, which names no block.
        kept: int32 ``[2 * num_requests + 1]``; written: where the rows of each line begin.
        counts: int32 ``[num_requests]``; written: the rows that each request keeps.
        boundary: int32 ``[num_requests]``, the rows after which each request is at the end of a
            block; None where no state is kept there.
        snapshots: int32 ``[num_groups, num_requests]``, a group contiguous, the block that keeps
            the state at this end, or 0; None likewise.

    Attributes:
        again: launches what was compiled; None before the first launch, and under Triton's
            interpreter.
    """

    def __init__(
        self,
        sources: Tensor,
        commits: Tensor,
        kept: Tensor,
        counts: Tensor,
        boundary: Tensor | None,
        snapshots: Tensor | None,
    ) -> None:
        most = commits.shape[2] - 1
        arguments: dict[str, Any] = {
            "sampled": counts,
            "starts": kept,
            "first": kept,
            "sources": sources,
            "boundary": counts if boundary is None else boundary,
            "snapshots": counts if snapshots is None else snapshots,
            "commits": commits,
            "kept": kept,
            "counts": counts,
            "given": 0,
            "lines": 0,
            "source_stride": sources.stride(1),
            "group_stride": sources.stride(0),
            "snapshot_stride": 0 if snapshots is None else snapshots.stride(0),
            "commit_stride": commits.stride(0),
            "ROWS": most,
            "COLUMNS": 1 << most.bit_length(),
            "SNAPSHOTS": snapshots is not None,
            "REQUESTS": _REQUESTS,
        }
        self._call: Final = KernelCall(names_of, (0, commits.shape[0], 1), arguments, _WARPS)
        self._at: Final = [*map(self._call.at, _STEP)]
        self.again: RepeatedLaunch | None = None

    def run(self, sampled: Tensor, starts: Tensor, lines: int, first: Tensor) -> None:
        """Write the tables of a step: the blocks that its commit writes, and where kept rows end.

        The column of each request's last kept row names its own block, in every group, and the
        column at a block's end the block in ``snapshots``. Where both are one column, the request's
        own block takes it.

        Args:
            sampled: int ``[num_given]`` on the device, the rows that each request keeps, and 1
                where it says less; more than the table has columns for counts as these.
            starts: int32 ``[num_given + 1]`` or longer, the first row of each, and the end.
            lines: at least ``num_given``: requests that are written; more have no rows.
            first: int32 ``[lines + 1]`` or longer; written: the first row of each, and the end.
        """
        if sampled.dtype is not int32 or sampled.stride(0) != 1:
            sampled = sampled.to(int32).contiguous()
        places = sampled.data_ptr(), starts.data_ptr(), first.data_ptr()
        aligned = not (places[0] | places[1] | places[2]) % ALIGNED
        again = self.again
        if again is not None and aligned:
            for at, word in zip(self._at, (*places, sampled.shape[0], lines), strict=True):
                again.words[at] = word
            again.programs[0].value = -(-lines // _REQUESTS)
            again.run()
            return
        step = sampled, starts, first, sampled.shape[0], lines
        given = self._call.arguments | dict(zip(_STEP, step, strict=True))
        grid = triton.cdiv(lines, _REQUESTS), *self._call.grid[1:]
        call = attrs.evolve(self._call, grid=grid, arguments=given)
        if aligned:
            self.again = call.run_to_repeat(sampled.device)
        else:
            call.run()
