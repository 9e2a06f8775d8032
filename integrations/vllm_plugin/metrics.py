"""kvtxn's counters: what a worker answers, and the ``/metrics`` page of a server.

The workers count; the front end asks them through vLLM's ``collective_rpc``. A server asks every
few seconds, so a scrape finds the numbers in place and never waits for an engine. No step has
anything to do with it: between two steps each rank reads a few integers from its device.
``engine_calls`` asks an ``LLM``.

A worker that sleeps (vLLM's sleep mode) may have lost the memory that its counters lie in until it
wakes up. So it counts once more before, and answers with that. The content of its KV cache is lost
for good, and the audit forgets every row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet, ref

from ...audit.findings import AUDIT_FAMILIES
from ...log import get_logger
from ...metrics import FAMILIES, Family
from ..pytest_audit.engines import tell_counters
from ..serving.metrics_page import MetricsPage
from . import engine_calls
from .internals import frontend as front
from .internals import workers
from .internals.engine_protocols import AsyncClient, Client, VllmEngine, WorkerWrapper
from .internals.workers import AGES, NEW_WEIGHTS, RECORDING, REPORT, SNAPSHOT
from .policy import is_asked
from .policy.settings import asks_for_windows, is_audited

log = get_logger()

ACTIVE: Final = Family(
    "kvtxn_active",
    "1 while kvtxn is active in this worker, 0 while vLLM runs without it.",
    per_rank=True,
)

#: The field ``effect`` of the event ``kvtxn.no_metrics``.
NO_METRICS: Final = "the engine runs on; /metrics shows no kvtxn counters"

#: Seconds between two readings for the page.
INTERVAL: Final = 5.0
_published: WeakSet[Client] = WeakSet()


def on_engine(engine: VllmEngine) -> None:
    """Publish a running server's counters, or let an ``LLM`` keep them at its end.

    Nothing for an engine that does not ask for kvtxn. Never raises: an error is logged.
    """
    try:
        given = workers.additional_config(front.config_of(engine))
        if not is_asked(given):
            return
        client = front.client_of(engine)
        if not front.is_async(client):
            engine_calls.remember_at_end(client)
        elif front.publishes(client, engine):
            if getattr(client, "kvtxn_task", None) is not None:
                return
            page = Page(front.model_name(engine), windows=asks_for_windows(given))
            # The loop holds its tasks weakly, and the task its client.
            client.kvtxn_task = asyncio.get_running_loop().create_task(_publish(ref(client), page))
            _published.add(client)
    except Exception as error:
        log.warning("kvtxn.no_metrics", why=repr(error), effect=NO_METRICS)


def unhook_clients() -> None:
    """Stop publishing the counters of this process's engines, and taking last snapshots of them.

    Raises:
        KVTxnError: as ``engine_calls.unhook_clients``.
    """
    for client in list(_published):
        _unpublish(client)
    _published.clear()
    engine_calls.unhook_clients()


def _unpublish(client: Client) -> None:
    """Cancel the task that publishes a client's counters, if there is one, from any thread."""
    task = vars(client).pop("kvtxn_task", None)
    if task is not None and not task.done():
        task.get_loop().call_soon_threadsafe(task.cancel)


# -- the page -----------------------------------------------------------------------


async def _publish(reference: Callable[[], AsyncClient | None], page: Page) -> None:
    """Update the metrics page every ``INTERVAL`` seconds, as long as client and engines live.

    An error is logged, the first one as a warning, and the next reading is tried.
    """
    said = False
    while (client := reference()) is not None and not front.is_dead(client):
        try:
            for number, found in (await front.ask_all_workers(client, SNAPSHOT)).items():
                page.show(number, found)
        except Exception as error:
            tell = log.debug if said else log.warning
            tell("kvtxn.no_metrics", why=repr(error), effect=NO_METRICS)
            said = True
        del client
        await asyncio.sleep(INTERVAL)


class Page:
    """The metrics of a model on the ``/metrics`` page.

    Args:
        model_name: a label of each metric, as in vLLM's own.
        windows: the user asked for windows. Without them ``kvtxn_active`` is left out, since its 0
            means that windows were asked for and stay out.
    """

    def __init__(self, model_name: str, *, windows: bool) -> None:
        self._page = MetricsPage(model_name)
        self._windows = windows

    def show(self, engine: int, snapshots: Sequence[Mapping[str, float]]) -> None:
        """Bring the metrics of an engine up to date on the page.

        Args:
            engine: its number.
            snapshots: the counters of each rank. Ranks without windows have ``kvtxn_active`` and
                those of the audit alone. Families that are not per rank are those of the first rank
                with windows.
        """
        lead = next((rank for rank, found in enumerate(snapshots) if found["kvtxn_active"]), None)
        for rank, found in enumerate(snapshots):
            if self._windows:
                self._page.show(ACTIVE, engine, rank, found)
            for family in FAMILIES if found["kvtxn_active"] else ():
                if family.per_rank or rank == lead:
                    self._page.show(family, engine, rank, found)
            for family in AUDIT_FAMILIES:
                if family.name in found:
                    self._page.show(family, engine, rank, found)


# -- what a worker answers --------------------------------------------------------------

#: Why the audit forgets every row.
_LOST: Final = "the worker sleeps, or gives the memory of the KV cache away"


def _snapshot(wrapper: WorkerWrapper) -> dict[str, float]:
    """Return a worker's counters by Prometheus name, with ``kvtxn_active``, 0 without windows.

    Those of the audit follow, and are reported to the test that wants them; ``kvtxn_audit_active``
    is 0 where an audit is asked for and there is none.
    """
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
    """Return the answer of a method of a worker's audit; an empty list without an audit."""
    watch = getattr(workers.runner_of(wrapper), "kvtxn_audit", None)
    found: list[dict[str, Any]] = [] if watch is None else getattr(watch, method)()
    return found


def _recording(wrapper: WorkerWrapper) -> dict[str, Any] | None:
    """Return the life of every slot, with the windows' policy; None if it is not recorded."""
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
    """Answer a worker's RPC of this name; a worker that sleeps answers as it did before.

    Calls of ``NEW_WEIGHTS`` begin an epoch of the audit, and return None.
    """
    if name in _TOLD:
        from .audit import watch_opening

        watch_opening.weights_changed(wrapper, _TOLD[name])
        return None
    kept = getattr(workers.runner_of(wrapper), "kvtxn_asleep", None)
    return _AWAKE[name](wrapper) if kept is None else kept[name]


def let_sleep(wrapper: WorkerWrapper) -> Callable[[], None]:
    """Let a hooked worker on a GPU keep its answers while it sleeps; return an undo.

    The audit forgets all rows when the KV cache is lost.
    """
    return workers.around_sleep(
        wrapper,
        asleep=partial(_falls_asleep, wrapper),
        lost=partial(_loses_rows, wrapper),
        awake=partial(_wakes, wrapper),
    )


def _falls_asleep(wrapper: WorkerWrapper) -> None:
    """Keep the worker's answers of this moment, unless it sleeps already: memory may go."""
    runner = workers.runner_of(wrapper)
    if getattr(runner, "kvtxn_asleep", None) is None:
        runner.kvtxn_asleep = {name: method(wrapper) for name, method in _AWAKE.items()}


def _loses_rows(wrapper: WorkerWrapper) -> None:
    """Let the audit forget every row, and log that, before the KV cache's content is lost."""
    runner = workers.runner_of(wrapper)
    watch = getattr(runner, "kvtxn_audit", None)
    if watch is not None:
        watch.hear(lambda watch: watch.forget())
        log.info("kvtxn.audit_forgets", rank=workers.rank_of(wrapper), why=_LOST)


def _wakes(wrapper: WorkerWrapper) -> None:
    """Let the worker answer by its present counters again."""
    workers.runner_of(wrapper).kvtxn_asleep = None
