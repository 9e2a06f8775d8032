"""``Peers``: compares what the ranks of an engine wrote, now and then; for GPUs."""

from __future__ import annotations

from typing import Final

from ....audit import Ledger
from ....audit.glance import Glance
from ..internals import ranks

#: Steps between two comparisons of the ranks, and from a copy of the fingerprints until it is used.
_EVERY: Final = 200
_LATER: Final = 8


class Peers:
    """The ranks that have the same key. Each of them has to call all of this after the same steps.

    Args:
        ledger: this rank's ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Final = ledger
        self._prints: tuple[int, Glance] | None = None
        self._compared = 0  # the last step that was

    def restart(self) -> None:
        """Begin anew with the first step."""
        self._prints, self._compared = None, 0

    def compares(self, step: int) -> bool:
        """Tell whether ``compare`` has something to do at the step of this number."""
        if self._prints is None:
            return step - self._compared >= _EVERY
        return step - self._prints[0] >= _LATER

    def compare(self, step: int) -> None:
        """Compare what the ranks wrote until some steps before the one of this number."""
        if not self.compares(step):
            return
        if self._prints is None:
            self._prints = step, self._ledger.glance()
        else:
            (at, glance), self._prints = self._prints, None
            self._compare(at, glance)

    def compare_now(self, step: int) -> None:
        """Compare the steps up to this one, if that has not been done; waits for the device."""
        if step != self._compared:
            self._prints = None
            self._compare(step, self._ledger.glance())

    def _compare(self, until: int, glance: Glance) -> None:
        since, self._compared = self._compared, until
        own = self._ledger.fingerprints(glance)
        own = {step: print_ for step, print_ in own.items() if step > since}
        for number, theirs in enumerate(ranks.of_all(own)):
            if number != ranks.own_number():
                self._ledger.compare_ranks(theirs, glance)
