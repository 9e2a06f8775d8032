"""Answers of a worker that is asked for counters and violations, asleep or awake.

A worker that sleeps (vLLM's sleep mode) may have lost the memory that its counters lie in until it
wakes up. So it counts once more before, and answers with that. The content of its KV cache is lost
for good, and the audit forgets every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from ...log import get_logger
from .internals import Foreign, weights, workers
from .internals.workers import AGES, NEW_WEIGHTS, RECORDING, REPORT, SNAPSHOT
from .policy.settings import is_audited

log = get_logger()

#: Why the audit forgets every row.
_LOST: Final = "the worker sleeps, or gives the memory of the KV cache away"


def _snapshot(wrapper: Foreign) -> dict[str, float]:
    """Return a worker's counters."""
    runner = workers.runner_of(wrapper)
    steps, watch = getattr(runner, "kvtxn", None), getattr(runner, "kvtxn_audit", None)
    found = {"kvtxn_active": 0.0}
    if steps is not None:
        found = {"kvtxn_active": 1.0, **steps.manager.snapshot()}
    if watch is not None:
        found |= watch.counters()
    elif is_audited(workers.additional_config(workers.engine_config(wrapper))):
        found["kvtxn_audit_active"] = 0.0
    return found


def _report(wrapper: Foreign) -> list[dict[str, Any]]:
    """Return the violations that a worker's audit found."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    return [] if watch is None else watch.report()


def _ages(wrapper: Foreign) -> list[dict[str, Any]]:
    """Return the rows of earlier weights that each request has read."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    return [] if watch is None else watch.ages()


def _new_weights(weights: str, wrapper: Foreign) -> None:
    """Tell a worker's audit that weights have changed, awake or asleep."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    if watch is not None and watch.weights is not None:
        watch.weights.changed(weights)


def follow_updates(wrapper: Foreign) -> Callable[[], None]:
    """Let a worker's audit hear of weights that vLLM changes.

    Returns:
        A function that undoes it.
    """
    return weights.follow_updates(wrapper, lambda name: _new_weights(name, wrapper))


def _recording(wrapper: Foreign) -> dict[str, Any] | None:
    """Return the life of every slot, if it is recorded."""
    runner = workers.runner_of(wrapper)
    watch, steps = getattr(runner, "kvtxn_audit", None), getattr(runner, "kvtxn", None)
    recording: dict[str, Any] | None = None if watch is None else watch.recording()
    if recording is None:
        return None
    return {**recording, "policy": None if steps is None else steps.manager.policy}


_AWAKE: Final[Mapping[str, Callable[[Foreign], Any]]] = {
    SNAPSHOT: _snapshot,
    REPORT: _report,
    RECORDING: _recording,
    AGES: _ages,
}
_TOLD: Final[Mapping[str, Callable[[Foreign], None]]] = {
    method: partial(_new_weights, name) for name, method in NEW_WEIGHTS.items()
}


def answer(name: str, wrapper: Any) -> Any:
    """Answer a worker's RPC of this name; a worker that sleeps answers as it did before."""
    if name in _TOLD:
        return _TOLD[name](wrapper)
    kept = getattr(workers.runner_of(wrapper), "kvtxn_asleep", None)
    return _AWAKE[name](wrapper) if kept is None else kept[name]


def let_sleep(wrapper: Foreign) -> Callable[[], None]:
    """Let a hooked worker on a GPU sleep and wake up.

    Returns:
        A function that undoes it.
    """
    return workers.around_sleep(
        wrapper,
        asleep=partial(_falls_asleep, wrapper),
        lost=partial(_loses_rows, wrapper),
        awake=partial(_wakes, wrapper),
    )


def _falls_asleep(wrapper: Foreign) -> None:
    """Count once more, as long as there is memory to count in."""
    runner: Any = workers.runner_of(wrapper)
    if getattr(runner, "kvtxn_asleep", None) is None:
        runner.kvtxn_asleep = {name: method(wrapper) for name, method in _AWAKE.items()}


def _loses_rows(wrapper: Foreign) -> None:
    """Forget every row: the content of the KV cache is about to be lost."""
    runner: Any = workers.runner_of(wrapper)
    watch = getattr(runner, "kvtxn_audit", None)
    if watch is not None:
        runner.kvtxn_tell(lambda _: watch.forget())
        log.info("kvtxn.audit_forgets", rank=workers.rank_of(wrapper), why=_LOST)


def _wakes(wrapper: Foreign) -> None:
    """Count as before."""
    workers.runner_of(wrapper).kvtxn_asleep = None
