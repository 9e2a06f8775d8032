"""Ends of steps: tells the watch of a hooked runner that a step ended, or failed."""

from __future__ import annotations

from contextlib import suppress

from ..internals import Foreign, audited_states, scheduling
from ..seam.hooked_runner import HookedRunner
from .found_violations import AuditError
from .watch import Watch


def end_step(runner: HookedRunner, output: Foreign) -> None:
    """End a step; adds to its output the requests that read wrong rows, if they are contained.

    Raises:
        AuditError: a wrong row was read, and the user set ``on_violation`` to "raise".
    """
    watch = runner.kvtxn_audit
    if watch is None:
        return
    if watch.scrub is not None:
        runner.kvtxn_tell(Watch.ended)
    wrong = watch.end_step()
    if wrong is not None:
        scheduling.mark(output, wrong)


def fail_step(runner: HookedRunner) -> None:
    """End a step whose last part raised; that error wins over what the audit finds."""
    watch = runner.kvtxn_audit
    if watch is not None:
        runner.kvtxn_tell(_sampling_failed)
        with suppress(AuditError):
            watch.end_step()


def take_back(watch: Watch) -> None:
    """Tell a watch that the forward has failed."""
    watch.take_back()


def _sampling_failed(watch: Watch) -> None:
    """Tell a watch that what follows the forward has failed; the forward's rows are there.

    But a drafter that has rows of its own may not have written them, and states may not have been
    moved to where the next step looks for them.
    """
    if watch.drafts_late or watch.states:
        watch.take_back()


def leave(watch: Watch, reader: audited_states.DeviceStateReader | None) -> None:
    """Tell a watch which states windows have committed.

    Args:
        watch: it was told of the step, and what was sampled.
        reader: has read the states of the step; None if none are watched.
    """
    last = None if reader is None else reader.take_last()
    if last is None or not last.leaves or watch.under_way is None:
        return
    lines = watch.under_way.lines
    watch.ledger.leave(lines, last.leaves)
    if last.ends:
        watch.ledger.leave(lines, last.ends, last.end_at)
