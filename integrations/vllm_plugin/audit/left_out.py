"""Requests of a step that a ledger on a CPU cannot follow; its passes on GPUs leave them out."""

from __future__ import annotations

from torch import Tensor

from ....audit import Ledger
from ....audit.books import REFUSED


def leave_out(ledger: Ledger, lines: Tensor, first: Tensor) -> bool:
    """Turn requests that begin before position 0 into padding, and count them as malformed.

    vLLM computes such rows if a connector says that it brings fewer than no tokens, as
    ``ExampleConnector`` does for a prompt of one token that it has stored.

    Args:
        ledger: the ledger.
        lines: int64 ``[num_requests]``, the lines of the step's requests; changed in place.
        first: int64 ``[num_requests]``, the positions of their first rows.

    Returns:
        True if there are such requests; ``lines`` is of no use for the next step then.
    """
    outside = first < 0
    if not bool(outside.any()):
        return False
    lines.masked_fill_(outside, -1)
    ledger.books.counters[REFUSED] += outside.sum()
    return True
