"""``RankAgreement``: the ranks of an engine end each step of the audit alike.

A rank that ends its audit, contains a wrong read, or stops the engine while the others go on leaves
them waiting in a collective, or is heard by nobody: engines await the answer of one rank alone. So
ranks report at the ends of steps, and all of them act on what any of them reports. Whether they
meet at the end of a step follows from the step's number, never from what a rank has found or how it
has failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, TypeVar

import attrs

from ....audit import Ledger
from ....audit.counter_copy import CounterCopy
from ....audit.rank_fingerprints import Fingerprints

#: Steps between two comparisons of what the ranks wrote, and from a copy of the fingerprints until
#: it is compared. The ledger keeps the fingerprints of more steps than that.
_COMPARED_EVERY: Final = 200
_COMPARED_LATER: Final = 8


@attrs.frozen
class Wrong:
    """Wrong reads of one step.

    Attributes:
        requests: names of the requests that read rows which were wrong when they were written.
        blocks: the blocks that are known to be wrong.
        changed: those of them whose bytes changed at an unknown time, so that steps before may have
            read them as well.
        stale: blocks with rows of earlier weights; no request that reads them is spoilt.
        aged: names of the requests that read rows of earlier weights, where these are violations.
            They are computed again as often as weights change under them.
        lost: there were more wrong reads, of which nobody knows the blocks and the readers.
    """

    requests: frozenset[str] = frozenset()
    blocks: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    stale: frozenset[int] = frozenset()
    aged: frozenset[str] = frozenset()
    lost: bool = False

    @property
    def readers(self) -> frozenset[str]:
        """Names of the requests that are to be computed again: ``requests`` and ``aged``."""
        return self.requests | self.aged

    def __bool__(self) -> bool:
        """Tell whether there is anything to contain; it may be blocks that nobody has read."""
        return self != _NOTHING

    def __or__(self, other: Wrong) -> Wrong:
        return Wrong(
            self.requests | other.requests,
            self.blocks | other.blocks,
            self.changed | other.changed,
            self.stale | other.stale,
            self.aged | other.aged,
            self.lost or other.lost,
        )


_NOTHING: Final = Wrong()


@attrs.frozen
class RankReport:
    """The findings of one rank's audit since the ranks last acted together.

    Attributes:
        wrong: wrong reads that are to be contained.
        violation: the first violation, for which the engine is to stop; None without any.
        failure: why the rank's audit ended; None while it goes on.
    """

    wrong: Wrong = attrs.field(factory=Wrong)
    violation: str | None = None
    failure: str | None = None

    def __or__(self, other: RankReport) -> RankReport:
        return RankReport(
            self.wrong | other.wrong,
            self.violation if self.violation is not None else other.violation,
            self.failure if self.failure is not None else other.failure,
        )

    @property
    def level(self) -> int:
        """0 without anything to act on, 1 with wrong reads, 2 with a failure, 3 with a violation.

        The largest level of all stages says what all must do.
        """
        if self.violation is not None:
            return 3
        return 2 if self.failure is not None else int(bool(self.wrong))


#: By level, what a rank hears that only ranks of other pipeline stages have met; nothing of wrong
#: reads, which each stage contains for itself.
_ELSEWHERE: Final = {
    2: RankReport(failure="the audit of another pipeline stage ended"),
    3: RankReport(violation="another pipeline stage found a violation; its rank's log has it"),
}

T = TypeVar("T")


class Ranks(Protocol):
    """Collectives of an engine's ranks on the host; every rank has to make the same calls."""

    def of_all(self, value: T) -> list[T]:
        """Return the ``value`` of each tensor-parallel rank."""

    def highest(self, level: int, *, stages: bool) -> int:
        """Return the largest ``level`` of the tensor-parallel ranks.

        Args:
            level: this rank's.
            stages: of the ranks of all pipeline stages.
        """

    def own_number(self) -> int:
        """Return this rank's number among the tensor-parallel ranks."""


class RankAgreement:
    """The other ranks of an engine. Each of them has to make the same calls after the same steps.

    Args:
        ledger: this rank's ledger.
        ranks: how the ranks reach each other.
        every: steps between two meetings, by ``on_violation``; without an entry the ranks meet to
            compare what they wrote, and not else.
        compares: the tensor-parallel ranks have one key, so that they can compare what they wrote.
        stages: the ranks of all pipeline stages take part.
    """

    def __init__(
        self,
        ledger: Ledger,
        ranks: Ranks,
        every: Mapping[str, int],
        *,
        compares: bool,
        stages: bool = False,
    ) -> None:
        self._ledger: Final = ledger
        self._ranks: Final = ranks
        self._every: Final = every
        self._compares: Final = compares
        self._stages: Final = stages
        self._copy: CounterCopy | None = None  # of the fingerprints that are compared next
        self._theirs: list[Fingerprints] = []  # what the last meeting brought, with this copy:
        self._compared: CounterCopy | None = None

    def restart(self) -> None:
        """Drop the copy of fingerprints on its way: steps are counted from the first again."""
        self._copy = None

    def copies_prints(self, number: int) -> bool:
        """Tell whether ``copy_prints`` is due after this step; never if nothing is compared."""
        return self._compares and number % _COMPARED_EVERY == 0

    def copy_prints(self) -> None:
        """Begin to copy the fingerprints of now; ``after_step`` exchanges them some steps later."""
        self._copy = self._ledger.copy_counters()

    def after_step(self, number: int, own: RankReport, on_violation: str) -> RankReport | None:
        """Exchange reports with the other ranks, if the ranks meet after the step of this number.

        Some steps after ``copy_prints`` was due, fingerprints are exchanged as well, for
        ``compare``.

        Args:
            number: the step's, counted alike on all ranks.
            own: this rank's report.
            on_violation: the setting.

        Returns:
            The reports of all tensor-parallel ranks in one. If these have nothing to act on, but
            ranks of another pipeline stage do: a report that says so. If no rank has: ``own``. None
            if the ranks do not meet now.
        """
        due = number > _COMPARED_EVERY and number % _COMPARED_EVERY == _COMPARED_LATER
        if due and self._compares:
            copy, self._copy = self._copy, None
            return self._exchange(own, copy)
        every = self._every.get(on_violation, 0)
        if not every or number % every:
            return None
        level = self._ranks.highest(own.level, stages=self._stages)
        if not level:
            return own
        heard = own
        for theirs in self._ranks.of_all(own):
            heard |= theirs
        return heard if heard.level else _ELSEWHERE.get(level, own)

    def now(self, own: RankReport) -> RankReport | None:
        """Exchange reports and fingerprints of now, for ``compare``; waits for the device.

        Args:
            own: this rank's report.

        Returns:
            The reports of all ranks in one; None if the ranks do not compare what they wrote.
        """
        if not self._compares:
            return None
        self._copy = None
        return self._exchange(own, None)

    def _exchange(self, own: RankReport, copy: CounterCopy | None) -> RankReport:
        """Exchange reports and fingerprints, and return the reports of all ranks in one.

        The other ranks' fingerprints are kept for ``compare``. A rank that fails before the
        exchange takes part all the same, with its failure in its report and without fingerprints.

        Args:
            own: this rank's report.
            copy: the counters with its fingerprints; None: those of now.
        """
        prints: Fingerprints = {}
        try:
            if own.failure is None:
                copy = self._ledger.copy_counters() if copy is None else copy
                prints = self._ledger.fingerprints(copy)
        except Exception as error:
            own |= RankReport(failure=repr(error))
        self._theirs, self._compared = [], copy
        for number, (report, theirs) in enumerate(self._ranks.of_all((own, prints))):
            own |= report
            if number != self._ranks.own_number():
                self._theirs.append(theirs)
        return own

    def compare(self) -> None:
        """Compare this rank's fingerprints, once, with the other ranks' of the last meeting.

        The ledger notes a violation for each difference.
        """
        others, self._theirs = self._theirs, []
        for theirs in others:
            self._ledger.compare_ranks(theirs, self._compared)
