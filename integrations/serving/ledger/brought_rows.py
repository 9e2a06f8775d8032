"""``BroughtRows``: rows of a block that came for a request, and the ledger's record of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import torch
from torch import Tensor

from ....audit import Ledger


@attrs.frozen(eq=False)
class BroughtRows:
    """Rows of a block that came for a request.

    Attributes:
        request: the engine's name of the request.
        group: the name of the KV-cache group.
        table: the request's blocks.
        first: the position of the first row.
        end: the position after the last.
        words: of the rows, int64 on the host; None: they are taken for right ones.
        origin: of the first row, as ``Identity.origin`` returns it; None if nobody stored it.
    """

    request: str
    group: str
    table: Sequence[int]
    first: int
    end: int
    words: Tensor | None
    origin: Tensor | None

    def follows(self, other: BroughtRows) -> bool:
        """Tell whether these rows begin where others of the same request and group end.

        Both must have words, or both none, and both an origin, or both none.
        """
        return (
            (self.request, self.group, self.first) == (other.request, other.group, other.end)
            and (self.words is None) == (other.words is None)
            and (self.origin is None) == (other.origin is None)
        )


def import_runs(ledger: Ledger, brought: Iterable[BroughtRows]) -> None:
    """Record in the ledger rows that came, with one call for neighbouring blocks known alike.

    Args:
        ledger: the worker's ledger.
        brought: the rows; those of a request and group in the order of their positions.
    """
    runs: list[list[BroughtRows]] = []
    for each in brought:
        if runs and each.follows(runs[-1][-1]):
            runs[-1].append(each)
        else:
            runs.append([each])
    for run in runs:
        begin, last = run[0], run[-1]
        words = [each.words for each in run if each.words is not None]
        origins = [each.origin for each in run if each.origin is not None]
        ledger.import_rows(
            *(begin.request, begin.group, begin.table, begin.first, last.end),
            torch.cat(words) if words else None,
            torch.stack(origins) if origins else None,
        )
