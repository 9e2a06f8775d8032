"""kvtxn in vLLM's front end: counters on the ``/metrics`` page, and after an engine's end.

The workers count; the front end asks them with a call of vLLM's own. A server asks every few
seconds, so that a scrape finds the numbers in place and never waits for an engine, and no step
has anything to do with it: between two steps each rank reads a few integers from its device.
An ``LLM`` is asked by ``snapshots``, and once more right before it is shut down or collected.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from functools import cache
from threading import Thread
from typing import Any, Final
from weakref import ReferenceType, ref

from ..log import get_logger
from . import vllm_internals_front as front
from .vllm_settings import is_asked

log = get_logger()

#: The worker's method.
SNAPSHOT: Final = "kvtxn_snapshot"
#: Seconds between two readings for the page.
INTERVAL: Final = 5.0
#: Seconds that an engine has for its last snapshot.
_PATIENCE: Final = 5.0

Snapshots = list[dict[str, float]]

_ended: deque[Snapshots] = deque(maxlen=64)


def on_engine(engine: Any) -> None:
    """An engine is up: publish its counters, or keep them for its end. Never raises."""
    try:
        if not is_asked(engine.vllm_config.additional_config):
            return
        client = front.client_of(engine)
        if not front.is_async(client):
            own: Any = type(client)
            client.__class__ = remembering_client(own)
            client.kvtxn_pid = os.getpid()
        elif front.speaks_for_all(client) and not front.counts_nothing(engine):
            from .vllm_page import Page

            page = Page(front.model_name(engine))
            # The loop holds its tasks weakly, and the task its client.
            client.kvtxn_task = asyncio.get_running_loop().create_task(_publish(ref(client), page))
    except Exception as error:
        log.warning("vllm.no_metrics", why=repr(error))


# -- the page -----------------------------------------------------------------------


async def _publish(reference: ReferenceType[Any], page: Any) -> None:
    """Bring the page up to date every few seconds, as long as the engines live."""
    said = False
    while (client := reference()) is not None and not front.is_dead(client):
        try:
            for number, found in (await front.call_workers(client, SNAPSHOT)).items():
                page.show(number, found)
        except Exception as error:
            (log.debug if said else log.warning)("vllm.no_metrics", why=repr(error))
            said = True
        del client
        await asyncio.sleep(INTERVAL)


# -- the end of an engine -------------------------------------------------------------


@cache
def remembering_client(own: Any) -> Any:
    """A subclass of a client's own class; an object of that class can become one of this."""
    interpreter = sys  # at its end it empties modules, and this one's names are None

    class RememberingClient(own):  # type: ignore[misc]
        """Takes a last snapshot of its engine.

        Attributes:
            kvtxn_pid: the process it belongs to; a forked child has a copy that reaches nothing.
            kvtxn_seen: its last snapshots.
            kvtxn_ended: the engine was shut down.
        """

        kvtxn_pid: int
        kvtxn_seen: Snapshots | None = None
        kvtxn_ended = False

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            if not interpreter.is_finalizing():
                _take_last(self)
            return super().shutdown(*args, **kwargs)

        def __del__(self) -> None:
            if not interpreter.is_finalizing() and not _take_last(self):
                self.shutdown()  # the thread that waits keeps this object from being collected
            getattr(super(), "__del__", lambda: None)()

    return RememberingClient


def _take_last(client: Any) -> bool:
    """Keep a last snapshot, once; whether the engine answered or could not be asked."""
    if client.kvtxn_ended or os.getpid() != client.kvtxn_pid:
        return True
    client.kvtxn_ended = True

    def read() -> None:
        try:
            client.kvtxn_seen = client.collective_rpc(SNAPSHOT)
        except Exception as error:
            log.debug("vllm.no_last_snapshot", why=repr(error))

    # vLLM's call waits for ever, and an engine that hangs has to be shut down all the same.
    thread = Thread(target=read, name="kvtxn-last-snapshot", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if client.kvtxn_seen is not None:
        _ended.append(client.kvtxn_seen)
    return not thread.is_alive()


def snapshots(llm: Any) -> Snapshots:
    """The counters of each worker, by rank; in-process and multi-process engines alike.

    Of an engine that was shut down these are its last, taken right before. Where the ``LLM``
    itself is gone, ``last_snapshots`` has them.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.

    Returns:
        One dict per rank: the Prometheus names with labels folded in, and ``kvtxn_active``,
        which is 0 (and alone) where kvtxn stays out.
    """
    client = front.client_of(llm)
    if getattr(client, "kvtxn_ended", False) and client.kvtxn_seen is not None:
        found: Snapshots = client.kvtxn_seen
    else:
        found = client.collective_rpc(SNAPSHOT)
    return [dict(counts) for counts in found]


def last_snapshots() -> list[Snapshots]:
    """The last ``snapshots`` of this process's engines that ended, oldest first."""
    return [[dict(counts) for counts in found] for found in _ended]
