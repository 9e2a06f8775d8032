"""A scheduler that contains violations: ``on_violation="contain"``.

Nobody reads a wrong block again, and its readers start again. The worker adds what it found to the
step's output. The scheduler contains it before vLLM takes the output in (``scheduling.contain``):
the wrong blocks leave the prefix cache, and their readers are preempted, so that vLLM drops the
tokens that the step sampled for them and computes the requests again in new blocks.
Nothing is handed to vLLM as a failed load: a user's setting may end requests for failed loads.
"""

from __future__ import annotations

from weakref import WeakSet

from ....log import get_logger
from ...serving.ledger.rank_agreement import Wrong
from ..internals import audited, scheduling
from ..internals.engine_protocols import BeforeScheduler, Scheduler, SchedulerOutput, VllmConfig
from ..internals.hooks import check_methods, is_swapped, restore_class, swap_class
from ..seam.hooked_runner import stay_out

log = get_logger()

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


def _contain(scheduler: Scheduler, wrong: Wrong, scheduler_output: SchedulerOutput) -> None:
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
