"""kvtxn's counters in vLLM's front end: on the ``/metrics`` page, and after an engine's end.

The workers count; the front end asks them through vLLM's ``collective_rpc``. A server asks every
few seconds, so a scrape finds the numbers in place and never waits for an engine. No step has
anything to do with it: between two steps each rank reads a few integers from its device.
``snapshots`` asks an ``LLM``, which is asked once more right before it is shut down or collected.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakSet, ref

from ....log import get_logger
from ..internals import frontend as front
from ..internals import workers
from ..internals.class_swaps import is_swapped, restore_class, swap_class
from ..internals.protocols.engine import AsyncClient, BeforeClient, Client, VllmEngine
from ..internals.workers import SNAPSHOT
from ..policy.asked import is_asked
from ..policy.settings import asks_for_windows

if TYPE_CHECKING:
    from .prometheus import Page

log = get_logger()

#: The field ``effect`` of the event ``kvtxn.no_metrics``.
NO_METRICS: Final = "the engine runs on; /metrics shows no kvtxn counters"

#: Seconds between two readings for the page.
INTERVAL: Final = 5.0
#: Seconds that an engine has for its last snapshot.
_PATIENCE: Final = 5.0

Snapshots = list[dict[str, float]]

_ended: deque[Snapshots] = deque(maxlen=64)
_hooked: WeakSet[Client] = WeakSet()


def on_engine(engine: VllmEngine) -> None:
    """Publish a running engine's counters, or arrange to keep them at its end. Never raises."""
    try:
        given = workers.additional_config(front.config_of(engine))
        if not is_asked(given):
            return
        client = front.client_of(engine)
        if not front.is_async(client):
            if is_swapped(client):
                return
            swap_class(client, RememberingClient)
            client.kvtxn_pid = os.getpid()
            _hooked.add(client)
        elif front.publishes(client, engine):
            from .prometheus import Page

            if getattr(client, "kvtxn_task", None) is not None:
                return
            page = Page(front.model_name(engine), windows=asks_for_windows(given))
            # The loop holds its tasks weakly, and the task its client.
            client.kvtxn_task = asyncio.get_running_loop().create_task(_publish(ref(client), page))
            _hooked.add(client)
    except Exception as error:
        log.warning("kvtxn.no_metrics", why=repr(error), effect=NO_METRICS)


def unhook_clients() -> None:
    """Stop publishing and keeping the counters of every engine of this process."""
    for client in list(_hooked):
        task = vars(client).get("kvtxn_task")
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)
        if is_swapped(client):
            restore_class(client)
        for name in [name for name in vars(client) if name.startswith("kvtxn")]:
            delattr(client, name)
    _hooked.clear()


# -- the page -----------------------------------------------------------------------


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


# -- the end of an engine -------------------------------------------------------------


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
        """Take the last snapshot, then shut the engine down."""
        if not self.kvtxn_interpreter.is_finalizing():
            _take_last(self)
        return super().shutdown(*args, **kwargs)  # type: ignore[safe-super]

    def __del__(self) -> None:
        if not self.kvtxn_interpreter.is_finalizing() and not _take_last(self):
            self.shutdown()  # the thread that waits keeps this object from being collected
        getattr(super(), "__del__", lambda: None)()


def _take_last(client: RememberingClient) -> bool:
    """Keep an engine's last snapshot, once; return False if the engine did not answer in time."""
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


def snapshots(llm: object) -> Snapshots:
    """Return the counters of each worker by rank, of in-process and multi-process engines alike.

    For an engine that was shut down these are the last ones, taken right before the end. When the
    ``LLM`` itself is gone, ``last_snapshots`` has them.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.

    Returns:
        One dict per rank: the Prometheus names with labels folded in, and ``kvtxn_active``,
        which is 0 (and alone) where kvtxn stays out.

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
    """Ask the workers of this process's running ``LLM``s for their counters.

    An audit looks at a worker's last step when the worker is asked. An engine that does not answer
    is passed over.
    """
    for client in list(_hooked):
        if isinstance(client, RememberingClient) and not client.kvtxn_ended:
            with suppress(Exception):
                front.ask_workers(client, SNAPSHOT)


def last_snapshots() -> list[Snapshots]:
    """Return the last ``snapshots`` of this process's engines that ended, oldest first."""
    return [[dict(counts) for counts in found] for found in _ended]
