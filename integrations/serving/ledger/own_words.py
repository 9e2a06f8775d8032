"""The words that requests' rows should have, read from a ledger once for each request."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ....audit import Ledger


class OwnWords:
    """The words that requests' rows should have; the device is waited for once per request.

    Args:
        ledger: the ledger.
        end: the position after the last that is asked for.
    """

    def __init__(self, ledger: Ledger, end: int) -> None:
        self._ledger: Final = ledger
        self._end: Final = end
        self._known: Final[dict[tuple[str, str], Tensor]] = {}

    def __call__(self, name: str, group: str, first: int, end: int) -> Tensor:
        """Return a copy of a request's words, int64 ``[end - first]`` on the host."""
        words = self._known.get((name, group))
        if words is None:
            words = self._ledger.expected(name, group, 0, self._end).cpu()
            self._known[name, group] = words
        return words[first:end].clone()
