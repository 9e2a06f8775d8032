"""Drafts that are trees: which row each row follows, and which drafts a sampled path has kept.

Draft number n of a request lies where its table has position ``first + settled + n``, and is
computed for the position after that of the row which it follows. From ``write`` to ``resolve`` the
request's own digest for each of these positions is that of the draft which lies there: of the
tokens on the way to it. So ``check`` compares trees as it compares sequences. ``resolve`` finds the
sampled tokens among these digests, and puts those of the sampled path in their place; the engine
moves the rows there, or reads wrong ones.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from .books import Books
from .digest import EMBEDDED
from .rows import Batch
from .step import Step


def followed(step: Step, batch: Batch, owner: Tensor, within: Tensor) -> Tensor:
    """Return the row that each row follows, int64 ``[n]``; -1 for the first of a request.

    Rows are numbered as ``ragged`` lists them. A row follows the one before it, except that a draft
    follows the draft that ``Step.parents`` names, or the last settled row.

    Args:
        step: the step.
        batch: its requests.
        owner: int64 ``[n]``, the request of each row, as ``ragged`` lists them.
        within: int64 ``[n]``, the row's number within it.
    """
    before = within - 1
    if step.parents is not None:
        settled = (batch.counts - batch.drafts)[owner]
        given = step.parents[batch.starts[owner] + within].long()
        parent = given.clamp(min=-1).minimum(before - settled)
        before = torch.where(within >= settled, settled + parent, before)
    return torch.where(before >= 0, (batch.counts.cumsum(0) - batch.counts)[owner] + before, -1)


def along(values: Tensor, followed: Tensor) -> Tensor:
    """Return for each row the sum of values on its way from its root, both included; waits.

    Args:
        values: int64 ``[n]``.
        followed: int64 ``[n]``, the row that each row follows; -1 for a root.

    Returns:
        int64 ``[n]``.
    """
    total, ahead = values, followed
    while bool((ahead >= 0).any()):
        total = total + torch.where(ahead >= 0, total[ahead], 0)
        ahead = torch.where(ahead >= 0, ahead[ahead], -1)
    return total


@attrs.frozen(eq=False)
class SampledPath:
    """The drafts of a step's trees that are of the sampled tokens.

    Attributes:
        kept: int64 ``[num_requests]``, the number of leading sampled tokens that are drafts.
        digests: int64 ``[num_requests, n]``, the digest up to each sampled token.
        on: bool ``[num_rows]``, the drafts that are on the path. Several are of one token where
            they follow the same row.
    """

    kept: Tensor
    digests: Tensor
    on: Tensor

    @classmethod
    def of(
        cls,
        books: Books,
        batch: Batch,
        accepted: Tensor,
        sampled: Tensor,
        owner: Tensor,
        within: Tensor,
    ) -> SampledPath:
        """Find the sampled tokens in the trees of the step that was written last; change nothing.

        Args:
            books: the ledger's books.
            batch: the requests of the step.
            accepted: int64 ``[num_requests]``, the most drafts that are kept.
            sampled: int ``[num_requests, n]``.
            owner: as for ``followed``.
            within: as for ``followed``.
        """
        column = torch.arange(sampled.shape[1], device=sampled.device)
        settled = batch.counts - batch.drafts
        begin, line = batch.first + settled, batch.lines.clamp(min=0)
        terms = books.key.terms(sampled.long() & (EMBEDDED - 1), begin[:, None] + column)
        digests = books.own[line, begin][:, None] + terms.cumsum(1)
        there = books.own[line[owner], batch.first[owner] + within + 1]
        same = (there[:, None] == digests[owner]) & (within >= settled[owner])[:, None]
        found = torch.zeros_like(digests, dtype=torch.bool)
        row, at = same.nonzero(as_tuple=True)
        found[owner[row], at] = True
        found &= column < accepted[:, None]
        kept = found.long().cumprod(1).sum(1)
        return cls(kept, digests, (same & (column < kept[owner][:, None])).any(1))
