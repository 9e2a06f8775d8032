"""Structured events by structlog, through the standard logger ``kvtxn``.

The library never configures logging by itself: an application sees the events
by configuring the ``kvtxn`` logger, or by calling ``configure``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

import structlog


def _with_name(_: object, __: str, rendered: str) -> str:
    """Put the package's name first, so that ``grep kvtxn`` finds every event in any log."""
    return f"kvtxn {rendered}"


_listeners: list[Callable[[Mapping[str, Any]], None]] = []


def _heard(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hand an event to the listeners, and return it unchanged."""
    for listener in _listeners:
        listener(event)
    return event


_PROCESSORS: list[Any] = [
    _heard,
    structlog.stdlib.filter_by_level,
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"], sort_keys=False),
    _with_name,
]


_standard = logging.getLogger("kvtxn")


#: Tell whether events of a level are shown: ask ``shows(DEBUG)`` before building one, since a step
#: has many. A bound method, which is quicker to call than a function around it.
shows: Final[Callable[[int], bool]] = _standard.isEnabledFor

DEBUG: Final = logging.DEBUG


def get_logger() -> structlog.stdlib.BoundLogger:
    """Return the package's logger, filtered by the level of the standard logger ``kvtxn``."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        _standard,
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger


def listen(listener: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
    """Call a function with each event of this process, whether or not a level hides it in the log.

    Args:
        listener: gets the event's fields, its name as ``event``; it must not raise nor log, since
            an exception would reach whoever logs.

    Returns:
        A function that ends it.
    """
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def configure(level: str = "info") -> None:
    """Show the package's events of ``level`` and above on stderr; a second call replaces the first.

    Other handlers of the logger ``kvtxn`` are dropped, and loggers above it get no events.

    Raises:
        ValueError: no such level.
    """
    _standard.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    _standard.handlers = [handler]
    _standard.propagate = False
