"""Questions of the front end to an engine's workers: users' calls, and counters unasked.

An ``LLM``'s engine is asked for its counters once more right before it is shut down or collected,
so that they outlive it. A server's workers are asked every few seconds for its ``/metrics`` page,
so a scrape finds the numbers in place and never waits for an engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import Thread
from typing import Any, ClassVar, Final
from weakref import WeakSet, ref

from ...audit.findings import AUDIT_FAMILIES
from ...errors import ConfigError
from ...log import get_logger
from ...metrics import FAMILIES, Family
from ..serving.metrics_page import MetricsPage
from .policy import is_asked
from .policy.settings import asks_for_windows
from .seam import frontend as front
from .seam import workers
from .seam.engine_protocols import AsyncClient, BeforeClient, Client, VllmEngine
from .seam.hooks import give_back, is_swapped, swap_class
from .seam.workers import AGES, NEW_WEIGHTS, REPORT, SNAPSHOT

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
#: Seconds that an engine has for its last snapshot.
_PATIENCE: Final = 5.0

Snapshots = list[dict[str, float]]

_ended: deque[Snapshots] = deque(maxlen=64)
_hooked: WeakSet[Client] = WeakSet()
_published: WeakSet[Client] = WeakSet()


def snapshots(llm: object) -> Snapshots:
    """Return the counters of each worker by rank, of in-process and multi-process engines alike.

    For an engine that was shut down these are the last ones, taken right before the end. When the
    ``LLM`` itself is gone, ``last_snapshots`` has them.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.

    Returns:
        One dict per rank: the Prometheus names with labels folded in, and ``kvtxn_active``, which
        is 0 where there are no windows, and then alone but for the counters of an audit.

    Raises:
        ConfigError: it is an ``AsyncLLM``, which answers later, or no engine.
    """
    client = front.find_client(llm)
    found: Snapshots | None = None
    if getattr(client, "kvtxn_ended", False):
        found = getattr(client, "kvtxn_seen", None)
    if found is None:
        found = front.ask_engine(llm, "snapshots", SNAPSHOT)
    return [dict(counts) for counts in found]


def ask_running_engines() -> None:
    """Ask the workers of this process's running ``LLM``s for their counters; drop the answers.

    An audit looks at a worker's last step when the worker is asked. An engine that does not answer
    is passed over.
    """
    for client in list(_hooked):
        if isinstance(client, RememberingClient) and not client.kvtxn_ended:
            with suppress(Exception):
                front.ask_workers(client, SNAPSHOT)


def last_snapshots() -> list[Snapshots]:
    """Return the last ``snapshots`` of engines of this process that ended, oldest first.

    The last 64 are kept.
    """
    return [[dict(counts) for counts in found] for found in _ended]


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


# -- counters that nobody asks for by a call --------------------------------------------------


def on_engine(engine: VllmEngine) -> None:
    """Publish a running engine's counters, or arrange to keep them at its end. Never raises."""
    try:
        given = workers.additional_config(front.config_of(engine))
        if not is_asked(given):
            return
        client = front.client_of(engine)
        if not front.is_async(client):
            remember_at_end(client)
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
    """Stop publishing and keeping the counters of every engine of this process.

    Raises:
        KVTxnError: somebody else has subclassed a client's class, which stays hooked; the others
            are given back.
    """
    for client in list(_published):
        task = vars(client).pop("kvtxn_task", None)
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)
    _published.clear()
    with ExitStack() as ends:
        ends.callback(_hooked.clear)
        for client in list(_hooked):
            if is_swapped(client):
                ends.callback(give_back, client)


async def _publish(reference: Callable[[], AsyncClient | None], page: Page) -> None:
    """Update the metrics page every few seconds, as long as the engines live."""
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
        """Bring the metrics of an engine up to date.

        Args:
            engine: its number.
            snapshots: the counters of each rank. Families that are not per rank are those of the
                first rank with windows.
        """
        lead = next((rank for rank, found in enumerate(snapshots) if found["kvtxn_active"]), None)
        for rank, found in enumerate(snapshots):
            families = [ACTIVE] if self._windows else []
            families += [each for each in FAMILIES if each.per_rank or rank == lead]
            self._page.show([*families, *AUDIT_FAMILIES], engine, rank, found)


# -- the end of an engine -------------------------------------------------------------


def remember_at_end(client: Client) -> None:
    """Let the client of an ``LLM`` take a last snapshot of its engine before the engine ends.

    A client that does so already stays as it is.
    """
    if not is_swapped(client):
        swap_class(client, RememberingClient)
        client.kvtxn_pid = os.getpid()
        _hooked.add(client)


class RememberingClient(BeforeClient):
    """Takes a last snapshot of its engine; a mixin before the class of an ``LLM``'s client.

    Attributes:
        kvtxn_interpreter: ``sys``. At its end the interpreter empties modules, so that the names
            of this one are None while objects are still being collected.
        kvtxn_pid: the process that the client belongs to; a forked child's copy reaches nothing.
        kvtxn_seen: the last snapshot.
        kvtxn_ended: the engine was shut down.
    """

    kvtxn_interpreter: ClassVar[Any] = sys
    kvtxn_pid: int
    kvtxn_seen: Snapshots | None = None
    kvtxn_ended = False

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Take the last snapshot, if it was not taken, then shut the engine down.

        No snapshot is taken at the end of the interpreter.
        """
        if not self.kvtxn_interpreter.is_finalizing():
            _take_last(self)
        return super().shutdown(*args, **kwargs)  # type: ignore[safe-super]

    def __del__(self) -> None:
        if not self.kvtxn_interpreter.is_finalizing() and not _take_last(self):
            self.shutdown()  # the thread that waits keeps this object from being collected
        getattr(super(), "__del__", lambda: None)()


def _take_last(client: RememberingClient) -> bool:
    """Keep an engine's last snapshot, once; return False if the engine did not answer in time.

    The client and ``last_snapshots`` have it then. An error is logged, and counts as an answer.
    Nothing is done in a forked child, nor a second time; True is returned.
    """
    if client.kvtxn_ended or os.getpid() != client.kvtxn_pid:
        return True
    client.kvtxn_ended = True

    def read() -> None:
        try:
            client.kvtxn_seen = front.ask_workers(client, SNAPSHOT)
        except Exception as error:
            log.debug("kvtxn.no_last_snapshot", why=repr(error))

    # vLLM's call waits without end, but an engine that hangs must still be shut down.
    thread = Thread(target=read, name="kvtxn-last-snapshot", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if client.kvtxn_seen is not None:
        _ended.append(client.kvtxn_seen)
    return not thread.is_alive()
