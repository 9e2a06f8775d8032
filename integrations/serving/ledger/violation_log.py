"""The violations that a worker's ledger finds: logged, remembered, and reported to all ranks."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from ....audit import Ledger, Violation
from ....audit.violation import TOKEN_FIELDS
from ....errors import KVTxnError
from ....log import get_logger
from .rank_agreement import RankReport, Wrong

log = get_logger()

#: Violations that are remembered for ``audit_report``; older ones are forgotten.
REMEMBERED: Final = 10_000
#: Lines that are logged one by one; of later ones, one in so many.
_LOGGED: Final = 20
_ONE_IN: Final = 1000
#: Steps with failed loads that are remembered; the host hears of a violation some steps later.
_DROPPED: Final = 256
#: Kinds of violations after which nothing is computed again: the rows have left, or are on one
#: rank only.
_PAST_CONTAINING: Final = ("exported", "ranks")


class AuditError(KVTxnError, RuntimeError):
    """A wrong row was read, and the user set ``on_violation`` to "raise": every rank raises it."""

    default_hint = "`audit_report` has the details; on_violation='log' goes on"


def say_logged_alone(why: str, error: Exception | None = None) -> None:
    """Log that what the audit finds is not contained, and why."""
    effect = "wrong rows are logged and not contained"
    log.warning("kvtxn.audit_cannot_contain", why=why, effect=effect, exc_info=error)


class FoundViolations:
    """The violations that a worker's ledger has found.

    Args:
        ledger: the ledger.
        rank: the worker's rank, for the log.

    Attributes:
        log_tokens: the user wants tokens in the log; without them a line has positions and names of
            requests, and none of the text. ``report`` has the tokens in any case.
        logs_all: log every violation, as each test of an engine has to hear of its own.
        first_blocks: by group, a number that is added to its blocks' in ``Wrong``, where groups
            count their blocks apart; empty where all groups share one pool of blocks.
        evicts_stale: blocks with rows of earlier weights leave the prefix cache, whatever becomes
            of other violations.
    """

    def __init__(self, ledger: Ledger, rank: int) -> None:
        self._ledger: Final = ledger
        self._rank: Final = rank
        self._report: Final[deque[dict[str, Any]]] = deque(maxlen=REMEMBERED)
        self.log_tokens = self.logs_all = self.evicts_stale = False
        self.first_blocks: Mapping[str, int] = {}
        self._lost = 0
        self._stale: set[int] = set()
        self._by_slot: Final = {
            group.name for group in ledger.groups if group.block_size == 1 and not group.is_state
        }
        self._number = self._lines = 0
        self._report_of_step = RankReport()
        self._dropped: Final[OrderedDict[int, frozenset[int]]] = OrderedDict()

    def drop(self, step: int, blocks: Iterable[int]) -> None:
        """Note that results of a step are dropped: ``take`` withdraws what it found in blocks.

        Args:
            step: the number of the ledger's step.
            blocks: blocks that a connector could not load.
        """
        self._dropped[step] = self._dropped.get(step, frozenset()) | frozenset(blocks)
        while len(self._dropped) > _DROPPED:
            self._dropped.popitem(last=False)

    def _withdraw(self, violation: Violation) -> bool:
        """Take a violation out of the counts if its step's result was dropped; tell whether."""
        # What a connector brings for a step comes before the step is counted.
        step = violation.step + (violation.kind == "imported")
        if violation.block not in self._dropped.get(step, ()):
            return False
        self._ledger.findings.withdraw(violation)
        return True

    def take(self, on_violation: str) -> Sequence[Violation]:
        """Return the violations found since the last call, without any that ``drop`` took back.

        All of them are remembered for ``report``, and logged in runs, of which later ones are
        thinned out. With ``evicts_stale``, rows of earlier weights add their blocks to
        ``take_stale``, and nothing to ``take_report``.

        Args:
            on_violation: what ``take_report`` shall ask of all ranks, besides: "contain" adds the
                blocks and requests to contain, and whether violations were lost; "raise" adds the
                violation's text, by which each rank raises ``AuditError``; "log" adds nothing.
        """
        new: Sequence[Violation] = self._ledger.violations()
        if self._dropped:
            new = [violation for violation in new if not self._withdraw(violation)]
        for violation in new:
            if violation.kind == "stale" and self.evicts_stale:
                self._stale.update(() if violation.block is None else (violation.block,))
            elif on_violation == "contain":
                first = self.first_blocks.get(violation.group, 0)
                self._report_of_step |= RankReport(wrong=_wrong(violation, first))
            elif on_violation == "raise":
                self._report_of_step |= RankReport(violation=str(violation))
            self._report.append(violation.as_dict())
        lost, self._lost = self._ledger.findings.lost > self._lost, self._ledger.findings.lost
        if lost and on_violation == "contain":
            self._report_of_step |= RankReport(wrong=Wrong(lost=True))
        for run in self._runs(new):
            self._log(run)
        return new

    def _runs(self, new: Iterable[Violation]) -> list[list[Violation]]:
        """Put violations together that one line of the log can say, in the order of their first.

        These are rows of one block whose bytes one step found changed; and, where a block is a
        slot, neighbouring rows that one request read in one step. Of other groups a run of rows is
        one violation already.
        """
        runs: list[list[Violation]] = []
        latest: dict[Hashable, list[Violation]] = {}
        for violation in new:
            key = _run_of(violation, by_slot=violation.group in self._by_slot)
            run = latest.get(key)
            if run is None or not _goes_on(run[-1], violation):
                run = latest[key] = []
                runs.append(run)
            run.append(violation)
        return runs

    def take_report(self) -> RankReport:
        """Return a report of what ``take`` added since the last call, and begin an empty one."""
        found, self._report_of_step = self._report_of_step, RankReport()
        return found

    def take_stale(self) -> frozenset[int]:
        """Return the blocks that are to leave the prefix cache, and forget them."""
        found, self._stale = frozenset(self._stale), set()
        return found

    def _log(self, run: Sequence[Violation]) -> None:
        """Log violations that are one run; a line names the first, and the last one's position.

        After 20 lines only one in 1000 is a warning; the others are not logged, or with
        ``logs_all`` as debug lines. Tokens are left out unless ``log_tokens``.
        """
        number, self._number, self._lines = (
            self._number + 1,
            self._number + len(run),
            self._lines + 1,
        )
        hides = self._lines > _LOGGED and self._lines % _ONE_IN > 0
        if hides and not self.logs_all:
            return
        facts = {k: v for k, v in run[0].as_dict().items() if v is not None}
        if not self.log_tokens:
            facts = {k: v for k, v in facts.items() if k not in TOKEN_FIELDS}
        if len(run) > 1:
            facts |= {"rows": len(run), "last_position": run[-1].position}
        say = log.debug if hides else log.warning
        say("kvtxn.audit_violation", rank=self._rank, number=number, **facts)

    def report(self) -> list[dict[str, Any]]:
        """Return the last 10000 violations that were taken, as dicts, oldest first."""
        return list(self._report)


def _run_of(violation: Violation, *, by_slot: bool) -> Hashable:
    """Return a key that the violations of a run share; one that equals no other if it is alone.

    Args:
        violation: one of them.
        by_slot: each block of its group is one slot.
    """
    where = violation.step, violation.request, violation.group
    if violation.found == "bytes":
        return *where, violation.block
    if not by_slot or violation.position is None:
        return object()
    return *where, violation.kind, violation.written_request


def _goes_on(last: Violation, violation: Violation) -> bool:
    """Tell whether a violation of the same key is the next one of the run that ends with ``last``.

    Of changed bytes each is; of others, one whose position is the next.
    """
    if violation.found == "bytes" or last.position is None:
        return True
    return violation.position == last.position + 1


def _wrong(violation: Violation, first: int) -> Wrong:
    """Return what to contain of a violation: its reader and its block.

    Nothing if no request has read, or the kind is one of ``_PAST_CONTAINING``.

    Args:
        violation: the violation.
        first: a number that is added to its block's.
    """
    if violation.request is None or violation.kind in _PAST_CONTAINING:
        return Wrong()
    block = frozenset(() if violation.block is None else (violation.block + first,))
    if violation.kind == "stale":
        return Wrong(blocks=block, aged=frozenset((violation.request,)))
    unnoticed = violation.kind == "changed" and violation.found == "bytes"
    return Wrong(frozenset((violation.request,)), block, block if unnoticed else frozenset())
