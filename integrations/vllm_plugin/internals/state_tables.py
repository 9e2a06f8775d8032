"""Which states the kernels of a verify step read, and which ones those of its commit write."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class StateTables:
    """Tables for the kernels, at fixed addresses, which captured graphs read.

    A row stands for a request. Its last column is the one that the kernels read from; columns
    before it, one for each row of the request, are those that they write to. 0 is no block.

    Attributes:
        sources: int32 ``[num_groups, num_requests, most_rows + 1]``: nothing is written.
        commits: int32, shaped like ``sources``: the state after the last kept row is written.
        whole: int32 ``[num_requests]``: what makes the kernels read from the last column.
    """

    sources: Tensor
    commits: Tensor
    whole: Tensor

    @classmethod
    def build(cls, groups: int, requests: int, rows: int, device: torch.device) -> StateTables:
        """Make tables for so many requests, with at most ``rows`` rows each."""
        shape = groups, requests, rows + 1
        sources = torch.zeros(shape, dtype=torch.int32, device=device)
        whole = torch.full((requests,), rows + 1, dtype=torch.int32, device=device)
        return cls(sources, torch.zeros_like(sources), whole)

    def name_sources(self, group: int, table: Tensor) -> None:
        """Let a group's kernels read the first block of each request of vLLM's table."""
        self.sources[group, : table.shape[0], -1].copy_(table[:, 0])

    def name_commits(self, sampled: Tensor) -> None:
        """Let the kernels write, for each request, the state after its last kept row.

        Args:
            sampled: int ``[num_requests]``, the tokens sampled for each; as in vLLM, a request
                without any keeps its first row.
        """
        count, most = sampled.shape[0], self.commits.shape[2] - 1
        commits, blocks = self.commits[:, :count], self.sources[:, :count, -1:]
        last = sampled.clamp(1, most).to(torch.int64) - 1
        commits.zero_()
        commits[:, :, -1:].copy_(blocks)
        commits.scatter_(2, last.view(1, count, 1).expand(blocks.shape), blocks)


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
