"""The violations of a worker: what is said and remembered of them, and what is done about them.

``on_violation="contain"``: nobody reads a wrong block again, and its readers start again. The
worker adds what it found to the step's output. The scheduler contains it before vLLM takes the
output in (``scheduling.contain``): the wrong blocks leave the prefix cache, and their readers are
preempted, so that vLLM drops the tokens that the step sampled for them and computes the requests
again in new blocks.
Nothing is handed to vLLM as a failed load: a user's setting may end requests for failed loads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final
from weakref import WeakSet

from ....audit import Ledger, Violation
from ....audit.counter_copy import CounterCopy
from ....audit.violation import TOKEN_FIELDS
from ....errors import ConfigError, KVTxnError
from ....log import get_logger
from ...pytest_audit import engines as pytest_audit
from ..internals import audited, scheduling
from ..internals import frontend as front
from ..internals.engine_protocols import BeforeScheduler, Scheduler, SchedulerOutput, VllmConfig
from ..internals.hooks import check_methods, is_swapped, restore_class, swap_class
from ..internals.scheduling import Wrong
from ..internals.workers import AGES, NEW_WEIGHTS, REPORT
from ..seam.hooked_runner import stay_out
from .rank_agreement import RankReport

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


class FoundViolations:
    """The violations that a worker's ledger has found.

    Args:
        ledger: the ledger.
        rank: the worker's rank, for the log.

    Attributes:
        log_tokens: the user wants tokens in the log; without them a line has positions and names of
            requests, and none of the text. ``report`` has the tokens in any case.
        evicts_stale: blocks with rows of earlier weights leave the prefix cache, whatever becomes
            of other violations.
    """

    def __init__(self, ledger: Ledger, rank: int) -> None:
        self._ledger: Final = ledger
        self._rank: Final = rank
        self._report: Final[deque[dict[str, Any]]] = deque(maxlen=REMEMBERED)
        self.log_tokens = self.evicts_stale = False
        self._stale: set[int] = set()
        self._number = self._lines = 0
        self._report_of_step = RankReport()
        self._dropped: Final[OrderedDict[int, frozenset[int]]] = OrderedDict()

    def drop(self, step: int, blocks: Iterable[int]) -> None:
        """Take back what a step found in blocks: vLLM drops what it computed of them.

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
        """Log the violations that were found since the last call, and return them."""
        new: Sequence[Violation] = self._ledger.violations()
        if self._dropped:
            new = [violation for violation in new if not self._withdraw(violation)]
        for violation in new:
            if violation.kind == "stale" and self.evicts_stale:
                self._stale.update(() if violation.block is None else (violation.block,))
            elif on_violation == "contain":
                self._report_of_step |= RankReport(wrong=_wrong(violation))
            elif on_violation == "raise":
                self._report_of_step |= RankReport(violation=str(violation))
            self._report.append(violation.as_dict())
        for _, run in groupby(new, _run_of):
            self._log([*run])
        return new

    def take_report(self) -> RankReport:
        """Return what the violations that were taken since the last call ask of all ranks."""
        found, self._report_of_step = self._report_of_step, RankReport()
        return found

    def take_stale(self) -> frozenset[int]:
        """Return the blocks that are to leave the prefix cache, found since the last call."""
        found, self._stale = frozenset(self._stale), set()
        return found

    def _log(self, run: Sequence[Violation]) -> None:
        """Log violations that are one run; a line names the first, and the last one's position."""
        number, self._number, self._lines = (
            self._number + 1,
            self._number + len(run),
            self._lines + 1,
        )
        hides = self._lines > _LOGGED and self._lines % _ONE_IN > 0
        if hides and not pytest_audit.is_wanted():
            return
        facts = {k: v for k, v in run[0].as_dict().items() if v is not None}
        if not self.log_tokens:
            facts = {k: v for k, v in facts.items() if k not in TOKEN_FIELDS}
        if len(run) > 1:
            facts |= {"rows": len(run), "last_position": run[-1].position}
        say = log.debug if hides else log.warning  # each test of an engine has to hear of its own
        say("kvtxn.audit_violation", rank=self._rank, number=number, **facts)

    def report(self) -> list[dict[str, Any]]:
        """Return the violations that are remembered, oldest first."""
        return list(self._report)


def _run_of(violation: Violation) -> Hashable:
    """Return a key that rows of one block share whose bytes one step found changed.

    Of all other kinds a run of rows is one violation already.
    """
    if violation.found != "bytes":
        return object()
    return violation.step, violation.request, violation.group, violation.block


def _wrong(violation: Violation) -> Wrong:
    """Return what has to be contained of a violation."""
    if violation.request is None or violation.kind in _PAST_CONTAINING:
        return Wrong()
    block = frozenset(() if violation.block is None else (violation.block,))
    unnoticed = violation.kind == "changed" and violation.found == "bytes"
    return Wrong(frozenset((violation.request,)), block, block if unnoticed else frozenset())


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
        """Tell whether a copy has arrived that counts violations which nobody has taken yet."""
        copy = self._copy
        if copy is None or not copy.ready:
            return False
        self._copy, self._spare = None, copy
        return self._ledger.findings.has_more(copy)

    def copy(self, step: int, *, soon: bool) -> None:
        """Begin a copy now and then, if none is on its way.

        Args:
            step: the number of the step.
            soon: someone waits for what it says.
        """
        if self._copy is None and step % (COPY_SOON if soon else _COPY_EVERY) == 0:
            self._copy = self._ledger.copy_counters(self._spare, prints=False)


def audit_report(llm: object, *, ages: bool = False) -> list[list[dict[str, Any]]]:
    """Return what the audit of each worker found, by rank; the engine has to be up.

    The result has users' text: the last tokens of prompts and outputs. kvtxn's log has none, unless
    the setting ``log_tokens`` asks for them.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.
        ages: return the rows of earlier weights that each request has read, in place of violations.

    Returns:
        One list per rank, oldest first: the fields of ``kvtxn.audit.Violation`` as a flat dict; or,
        with ``ages``, those of ``kvtxn.audit.ReadAges.as_dict``. An empty one where nothing was
        found, or nothing is watched: see ``kvtxn_audit_active``.

    Raises:
        ConfigError: it is an ``AsyncLLM``, which answers later, or no engine.
    """
    method = AGES if ages else REPORT
    found: list[list[dict[str, Any]]] = front.ask_engine(llm, "audit_report", method)
    return found


# -- in the scheduler -------------------------------------------------------------------

_hooked: WeakSet[Scheduler] = WeakSet()


class ContainingScheduler(BeforeScheduler):
    """A mixin of vLLM's scheduler."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> object:
        """Contain what a step read wrongly, then take in its output."""
        wrong = scheduling.marks(model_runner_output)
        if wrong is not None:
            _contain(self, wrong, scheduler_output)
        found: object = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        return found


def _contain(
    scheduler: Scheduler, wrong: scheduling.Wrong, scheduler_output: SchedulerOutput
) -> None:
    """Contain wrong reads and log it; an error of the audit's own does not end the engine."""
    try:
        if wrong.stale:
            scheduling.evict(scheduler, wrong.stale)
            log.debug("kvtxn.audit_evicted_stale", blocks=sorted(wrong.stale))
        if not wrong.requests:
            return
        names = scheduling.contain(scheduler, wrong, scheduling.scheduled(scheduler_output))
    except Exception as error:
        say_logged_alone(f"containing failed: {error!r}", error)
        return
    log.warning("kvtxn.audit_contained", requests=sorted(names), blocks=sorted(wrong.blocks))


def contain_in(scheduler: Scheduler, config: VllmConfig, *, required: bool) -> None:
    """Let a scheduler contain what the audit finds; if it cannot, log the reason.

    Args:
        scheduler: the scheduler.
        config: its ``VllmConfig``.
        required: the user wants no engine without what was asked for.

    Raises:
        RequiredError: it cannot, and it is required.
    """
    why = audited.uncontained(config) or check_methods(
        type(scheduler), scheduling.SCHEDULER_METHODS
    )
    if why is not None:
        if required:
            stay_out(why, 0, required=True)
        say_logged_alone(why)
        return
    swap_class(scheduler, ContainingScheduler)
    _hooked.add(scheduler)


def say_logged_alone(why: str, error: Exception | None = None) -> None:
    """Log that what the audit finds is not contained, and why."""
    effect = "wrong rows are logged and not contained"
    log.warning("kvtxn.audit_cannot_contain", why=why, effect=effect, exc_info=error)


def unhook_schedulers() -> None:
    """Give every scheduler of this process that contains violations its own class back."""
    for scheduler in list(_hooked):
        if is_swapped(scheduler):
            restore_class(scheduler)
    _hooked.clear()


def new_weights(llm: object, weights: str = "target") -> None:
    """Tell the audit that weights have changed, where vLLM cannot see it; no request need end.

    Call it after an update that writes into the model's parameters itself. Updates by vLLM's own
    calls are heard without it: ``load_weights`` of the model, ``reload_weights``,
    ``update_weights``, and waking up from sleep of level 2. All changes until the next step are one
    epoch, and telling twice is harmless.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.
        weights: ``"target"``, or ``"drafter"`` if the drafter's weights have changed.

    Raises:
        ConfigError: there are no weights of this name; or it is an ``AsyncLLM``, of which
            ``await llm.collective_rpc("kvtxn_new_weights")`` does the same, or no engine.
    """
    if weights not in NEW_WEIGHTS:
        raise ConfigError(
            "new_weights", "these weights are unknown", expected=f"one of {tuple(NEW_WEIGHTS)}",
            got=repr(weights), hint="leave them out for the target's",
        )  # fmt: skip
    front.ask_engine(llm, "new_weights", NEW_WEIGHTS[weights])
