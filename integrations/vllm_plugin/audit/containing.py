"""``on_violation="contain"``: nobody reads a wrong block again, and its readers start again.

The worker adds what it found to the step's output. The scheduler takes that for blocks that a
connector could not load: it drops the tokens that the step sampled for their readers. But where
vLLM computes such blocks again in place, other requests may hold them; here the blocks leave the
prefix cache, and their readers give them back and are computed again in new ones.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from ....log import get_logger
from ..attach import check_methods, is_swapped, restore_class, stay_out, swap_class
from ..internals import Foreign, audited, scheduling

log = get_logger()

_hooked: WeakSet[Any] = WeakSet()


class ContainingScheduler:
    """A mixin of vLLM's scheduler.

    Attributes:
        kvtxn_wrong: the wrong reads of the output that is taken in; None without any.
    """

    kvtxn_wrong: scheduling.Wrong | None = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's output, without the tokens of requests that read wrong rows."""
        self.kvtxn_wrong = scheduling.marks(model_runner_output)
        if self.kvtxn_wrong is not None:
            scheduling.report_invalid(model_runner_output, self.kvtxn_wrong.blocks)
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Contain the wrong blocks, and leave those to vLLM that a connector reported."""
        wrong, self.kvtxn_wrong = self.kvtxn_wrong, None
        failed: set[str] = set()
        if wrong is not None:
            failed = scheduling.contain(self, wrong, num_scheduled_tokens)
            blocks = sorted(wrong.blocks)
            log.warning("kvtxn.audit_contained", requests=sorted(failed), blocks=blocks)
            invalid_block_ids = scheduling.reported_by_others(invalid_block_ids, blocks)
        if invalid_block_ids:
            failed |= super()._handle_invalid_blocks(  # type: ignore[misc]
                invalid_block_ids, num_scheduled_tokens
            )
        return failed


def attach(scheduler: Foreign, config: Foreign, *, required: bool) -> None:
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


def say_logged_alone(why: str) -> None:
    """Log that what the audit finds is not contained, and why."""
    effect = "wrong rows are logged and not contained"
    log.warning("kvtxn.audit_cannot_contain", why=why, effect=effect)


def unhook_schedulers() -> None:
    """Give every scheduler of this process that contains violations its own class back."""
    for scheduler in list(_hooked):
        if is_swapped(scheduler):
            restore_class(scheduler)
        vars(scheduler).pop("kvtxn_wrong", None)
    _hooked.clear()
