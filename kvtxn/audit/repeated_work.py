"""Work that an engine does twice: rows of a request that it has had, or has in its prefix cache.

A scheduler that runs out of blocks puts a request back, and its rows are lost but for those that it
finds in the prefix cache when it begins again. A request whose prompt just fits may be begun again
and again, and no token comes. Rows that the prefix cache has may be computed again as well, where
an engine cannot use them. All of this is known on the host when a request comes, so a step costs
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from ..metrics import Family

#: Requests that are remembered; the ones that were begun again first are forgotten.
_REMEMBERED: Final = 1 << 14

#: The metric families. Each rank counts the same requests.
REPEATED: Final = (
    Family(
        "kvtxn_audit_requests_restarted_total",
        "Requests that were put back and begun again; each time counts.",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_restarts_without_token_total",
        "Requests that were begun again without a token since they were begun before.",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_rows_recomputed_total",
        "Rows that requests which were begun again had lost, and had to compute again.",
        per_rank=True,
    ),
    Family(
        "kvtxn_audit_cached_rows_unused_total",
        "Rows that the prefix cache had of a request, and that were computed again, by reason.",
        "reason",
        per_rank=True,
    ),
)

#: Why rows that the prefix cache has are computed again, by the name of the reason.
WHY_UNUSED: Final[Mapping[str, str]] = {
    "last_token": "the last token is computed for its logits, and its block with it",
    "drafter": "the drafter needs the last block anew",
    "boundary": "not all groups of layers have a block that ends there",
    "states": "a recurrent layer has no state there",
    "window": "a layer with a sliding window has no rows there",
    "prompt_logprobs": "the request asks for logprobs of its prompt",
    "contained": "the request has read wrong rows, and reads no cache any more",
    "skipped": "the request asks for no reuse",
    "other": "the engine gives no reason",
}


class RepeatedWork:
    """Counts requests that are begun again, and the rows that they lose."""

    def __init__(self) -> None:
        self._lengths: Final[OrderedDict[str, int]] = OrderedDict()
        self._restarted = self._without_token = self._rows = 0
        self._unused: Final = dict.fromkeys(WHY_UNUSED, 0)

    def begin_again(self, request: str, length: int, had: int, found: int, prompt: int) -> None:
        """Count a request that was put back and comes again, and the rows that it has lost.

        It counts as without a token if it is as long as when it last began.

        Args:
            request: its name, which no other request has had.
            length: its tokens, those included that came out of it until now.
            had: rows that had been computed when it was put back, those of drafts that were taken
                back included.
            found: rows that it has found in the cache now.
            prompt: tokens of its prompt.
        """
        before = self._lengths.pop(request, prompt)
        self._lengths[request] = length
        if len(self._lengths) > _REMEMBERED:
            self._lengths.popitem(last=False)
        self._restarted += 1
        self._without_token += length == before
        # The last token that came out has no row yet.
        self._rows += max(min(had, length - (length > prompt)) - found, 0)

    def leave_unused(self, rows: Mapping[str, int]) -> None:
        """Count rows of the prefix cache that are computed again.

        Args:
            rows: their number by reason, one of ``WHY_UNUSED``; another one is a KeyError.
        """
        for reason, number in rows.items():
            self._unused[reason] += number

    def counters(self) -> dict[str, int]:
        """Return the counts by Prometheus name; of unused rows the sum, and one by each reason."""
        values = self._restarted, self._without_token, self._rows, sum(self._unused.values())
        found = {family.name: value for family, value in zip(REPEATED, values, strict=True)}
        return found | {f"{REPEATED[-1].name}_{why}": n for why, n in self._unused.items()}
