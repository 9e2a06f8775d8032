"""Counters of a ledger whose device runs behind the host, as they are some steps later."""

from __future__ import annotations

from typing import Final

from ....audit import Ledger
from ....audit.counter_copy import CounterCopy

#: Steps between two copies, which cost the host more than a step does; and where an error is
#: raised for what they say.
_COPY_EVERY: Final = 32
COPY_SOON: Final = 8


class LateCounters:
    """Copies of the counters that go to the host while the device works on; no call waits.

    Args:
        ledger: the ledger.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Final = ledger
        self._copy: CounterCopy | None = None
        self._spare: CounterCopy | None = None

    def restart(self) -> None:
        """Drop the copy that is on its way."""
        self._copy = None

    def found_more(self) -> bool:
        """Tell whether a copy has arrived that counts violations which nobody has taken yet.

        A copy that has arrived is looked at once, and makes room for the next; False without one.
        """
        copy = self._copy
        if copy is None or not copy.ready:
            return False
        self._copy, self._spare = None, copy
        return self._ledger.findings.has_more(copy)

    def copy(self, step: int, *, soon: bool) -> None:
        """Begin a copy of the counters every 32 steps, if none is on its way.

        Args:
            step: the number of the step.
            soon: someone waits for what it says: every 8 steps.
        """
        if self._copy is None and step % (COPY_SOON if soon else _COPY_EVERY) == 0:
            self._copy = self._ledger.copy_counters(self._spare, prints=False)
