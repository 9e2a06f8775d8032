"""The answers of a worker to its engine's front end: counters, and what its audit found.

No step has anything to do with it: between two steps each rank reads a few integers from its
device. ``engine_calls`` asks.

A worker that sleeps (vLLM's sleep mode) may have lost the memory that its counters lie in until it
wakes up. So it counts once more before, and answers with that. The content of its KV cache is lost
for good, and the audit forgets every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from ...log import get_logger
from ..pytest_audit.engines import tell_counters
from .policy.settings import is_audited
from .seam import workers
from .seam.engine_protocols import WorkerWrapper
from .seam.workers import AGES, NEW_WEIGHTS, RECORDING, REPORT, SNAPSHOT

log = get_logger()

#: Why the audit forgets every row.
_LOST: Final = "the worker sleeps, or gives the memory of the KV cache away"


def _snapshot(wrapper: WorkerWrapper) -> dict[str, float]:
    """Return a worker's counters."""
    runner = workers.runner_of(wrapper)
    steps, watch = getattr(runner, "kvtxn", None), getattr(runner, "kvtxn_audit", None)
    found = {"kvtxn_active": 0.0}
    if steps is not None:
        found = {"kvtxn_active": 1.0, **steps.manager.snapshot()}
    if watch is not None:
        counted = watch.counters()
        tell_counters(watch, counted)
        found |= counted
    elif is_audited(workers.additional_config(workers.engine_config(wrapper))):
        found["kvtxn_audit_active"] = 0.0
    return found


def _of_watch(wrapper: WorkerWrapper, method: str) -> list[dict[str, Any]]:
    """Return what a worker's audit answers; nothing without an audit."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    found: list[dict[str, Any]] = [] if watch is None else getattr(watch, method)()
    return found


def _recording(wrapper: WorkerWrapper) -> dict[str, Any] | None:
    """Return the life of every slot, and the windows' policy; None without a recording."""
    runner = workers.runner_of(wrapper)
    watch, steps = getattr(runner, "kvtxn_audit", None), getattr(runner, "kvtxn", None)
    recording: dict[str, Any] | None = None if watch is None else watch.recording()
    if recording is None:
        return None
    return {**recording, "policy": None if steps is None else steps.manager.policy}


_AWAKE: Final[Mapping[str, Callable[[WorkerWrapper], object]]] = {
    SNAPSHOT: _snapshot,
    REPORT: partial(_of_watch, method="report"),
    RECORDING: _recording,
    AGES: partial(_of_watch, method="ages"),
}
_TOLD: Final = {method: name for name, method in NEW_WEIGHTS.items()}


def answer(name: str, wrapper: WorkerWrapper) -> object:
    """Answer a worker's RPC of this name; a worker that sleeps answers as it did before."""
    if name in _TOLD:
        from .audit import watch_opening

        watch_opening.weights_changed(wrapper, _TOLD[name])
        return None
    kept = getattr(workers.runner_of(wrapper), "kvtxn_asleep", None)
    return _AWAKE[name](wrapper) if kept is None else kept[name]


def let_sleep(wrapper: WorkerWrapper) -> Callable[[], None]:
    """Let a hooked worker on a GPU sleep and wake up; return a function that undoes it."""
    return workers.around_sleep(
        wrapper,
        asleep=partial(_falls_asleep, wrapper),
        lost=partial(_loses_rows, wrapper),
        awake=partial(_wakes, wrapper),
    )


def _falls_asleep(wrapper: WorkerWrapper) -> None:
    """Count once more, as long as there is memory to count in."""
    runner = workers.runner_of(wrapper)
    if getattr(runner, "kvtxn_asleep", None) is None:
        runner.kvtxn_asleep = {name: method(wrapper) for name, method in _AWAKE.items()}


def _loses_rows(wrapper: WorkerWrapper) -> None:
    """Forget every row: the content of the KV cache is about to be lost."""
    runner = workers.runner_of(wrapper)
    watch = getattr(runner, "kvtxn_audit", None)
    if watch is not None:
        watch.hear(lambda watch: watch.forget())
        log.info("kvtxn.audit_forgets", rank=workers.rank_of(wrapper), why=_LOST)


def _wakes(wrapper: WorkerWrapper) -> None:
    """Count as before."""
    workers.runner_of(wrapper).kvtxn_asleep = None
