"""The scheduler of an audited engine: it tells of reuse that is lost, and contains violations.

With ``on_violation="contain"`` nobody reads a wrong block again, and its readers start again. The
worker adds what it found to the step's output. The scheduler contains it before vLLM takes the
output in (``containment.contain``): the wrong blocks leave the prefix cache, and their readers are
preempted, so that vLLM drops the tokens that the step sampled for them and computes the requests
again in new blocks. Nothing is handed to vLLM as a failed load: a user's setting may end requests
for failed loads.
"""

from __future__ import annotations

from contextlib import ExitStack
from weakref import WeakSet

from ....log import get_logger
from ...serving.ledger.rank_agreement import Wrong
from ...serving.ledger.violation_log import say_logged_alone
from ..runners.hooked_runner import stay_out
from ..seam import audited_requests, containment, prefix_lookups
from ..seam.engine_protocols import (
    BeforeCacheManager,
    BeforeScheduler,
    CacheManager,
    Request,
    Scheduler,
    SchedulerOutput,
    VllmConfig,
)
from ..seam.hooks import check_methods, is_swapped, restore_class, swap_class

log = get_logger()

_hooked: WeakSet[Scheduler | CacheManager] = WeakSet()
#: The managers in which looking for lost reuse has failed once.
_blind: WeakSet[CacheManager] = WeakSet()


class ContainingScheduler(BeforeScheduler):
    """A mixin of vLLM's scheduler: it contains what a step read wrongly."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> object:
        """Contain what a step read wrongly, as its output is marked; then take the output in."""
        wrong = containment.marks(model_runner_output)
        if wrong is not None:
            _contain(self, wrong, scheduler_output)
        found: object = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        return found


class TellingScheduler(BeforeScheduler):
    """A mixin of vLLM's scheduler: it tells the workers what requests compute again."""

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        """Plan a step, and add to it how many cached rows its requests compute again, and why.

        If that fails, the error is logged once, and such rows are not counted any more.
        """
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        manager = prefix_lookups.manager_of(self)
        if manager not in _blind:
            try:
                prefix_lookups.tell(self, output)
            except Exception as error:
                _stop_looking(manager, error)
        return output


class LookingCacheManager(BeforeCacheManager):
    """A mixin of vLLM's cache manager: it notes what requests have in the prefix cache."""

    def get_computed_blocks(self, request: Request, *args: object) -> tuple[object, ...]:
        """Return what vLLM finds cached for a request; note on it what else the cache has.

        If the note fails, that is logged once, and this cache is not looked at any more.
        """
        found: tuple[object, ...] = super().get_computed_blocks(  # type: ignore[misc]
            request, *args
        )
        if self not in _blind:
            try:
                prefix_lookups.look(self, request, found)
            except Exception as error:
                _stop_looking(self, error)
        return found


def _stop_looking(manager: CacheManager, error: Exception) -> None:
    """Count no lost reuse in this cache manager any more, and log the error.

    The manager keeps its class: somebody else may have subclassed it, and would lose theirs.
    """
    _blind.add(manager)
    _say_not_counted(f"looking failed: {error!r}", error)


def _say_not_counted(why: str, error: Exception | None = None) -> None:
    """Log a warning that nobody counts the reuse that is lost, and why."""
    effect = "kvtxn_audit_cached_rows_unused_total stays as it is"
    log.warning("kvtxn.audit_reuse_not_counted", why=why, effect=effect, exc_info=error)


def _contain(scheduler: Scheduler, wrong: Wrong, scheduler_output: SchedulerOutput) -> None:
    """Take stale blocks out of the prefix cache, contain wrong reads, and log which.

    An error of the audit's own is logged, and the engine goes on.
    """
    try:
        if wrong.stale:
            containment.evict(scheduler, wrong.stale)
            log.debug("kvtxn.audit_evicted_stale", blocks=sorted(wrong.stale))
        if not (wrong.readers or wrong.lost):
            return
        names = containment.contain(scheduler, wrong, containment.scheduled(scheduler_output))
    except Exception as error:
        say_logged_alone(f"containing failed: {error!r}", error)
        return
    log.warning("kvtxn.audit_contained", requests=sorted(names), blocks=sorted(wrong.blocks))


def follow_scheduler(
    scheduler: Scheduler, config: VllmConfig, *, contains: bool, required: bool
) -> None:
    """Let a scheduler contain violations and count lost reuse; if it cannot, log the reason.

    Reuse is counted where there is a prefix cache, in the scheduler and its cache manager.

    Args:
        scheduler: vLLM's scheduler.
        config: its engine's.
        contains: the user wants violations to be contained.
        required: the user wants no engine that cannot contain them.

    Raises:
        RequiredError: it cannot, and ``required``.
        KVTxnError: the scheduler or its cache manager is hooked already.
    """
    mixins: list[type] = []
    if contains and _can_contain(scheduler, config, required=required):
        mixins.append(ContainingScheduler)
    if _can_tell(scheduler, config):
        mixins.append(TellingScheduler)
        manager = prefix_lookups.manager_of(scheduler)
        swap_class(manager, LookingCacheManager)
        _hooked.add(manager)
    if mixins:
        swap_class(scheduler, *mixins)
        _hooked.add(scheduler)


def _can_contain(scheduler: Scheduler, config: VllmConfig, *, required: bool) -> bool:
    """Tell whether a scheduler can contain what the audit finds; if not, log the reason.

    Raises:
        RequiredError: it cannot, and ``required``.
    """
    why = audited_requests.uncontained(config) or check_methods(
        type(scheduler), containment.SCHEDULER_METHODS
    )
    if why is None:
        return True
    if required:
        stay_out(why, 0, required=True)
    say_logged_alone(why)
    return False


def _can_tell(scheduler: Scheduler, config: VllmConfig) -> bool:
    """Tell whether reuse that is lost can be counted; if not, log the reason.

    Without a prefix cache it is False, and nothing is logged.
    """
    why = audited_requests.foreign_scheduler(config) or check_methods(
        type(scheduler), prefix_lookups.PLANNING_METHODS
    )
    if why is None and not prefix_lookups.caches(scheduler):
        return False
    why = why or check_methods(
        type(prefix_lookups.manager_of(scheduler)), prefix_lookups.LOOKING_METHODS
    )
    if why is not None:
        _say_not_counted(why)
    return why is None


def unhook_schedulers() -> None:
    """Give audited schedulers and cache managers of this process their own classes back.

    Lost reuse may be looked for again afterwards, where it had failed.

    Raises:
        KVTxnError: somebody else has subclassed one of the classes; all others are given back.
    """
    with ExitStack() as ends:
        ends.callback(_blind.clear)
        ends.callback(_hooked.clear)
        for each in list(_hooked):
            if is_swapped(each):
                ends.callback(restore_class, each)
