"""Structured events by structlog, through the standard logger ``kvtxn``.

The library never configures logging by itself: an application sees the events
by configuring the ``kvtxn`` logger, or by calling ``configure``.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.processors.format_exc_info,
    structlog.processors.KeyValueRenderer(key_order=["event"], sort_keys=False),
]


_standard = logging.getLogger("kvtxn")


def debugging() -> bool:
    """Whether debug events are shown: asked before one is built, since a step has many."""
    return _standard.isEnabledFor(logging.DEBUG)


def get_logger() -> structlog.stdlib.BoundLogger:
    """The logger of the package; filtered by the standard library's level."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        _standard,
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return logger


def configure(level: str = "info") -> None:
    """Show the package's events of ``level`` and above on stderr; a second call replaces the first.

    Raises:
        ValueError: no such level.
    """
    _standard.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s kvtxn %(message)s"))
    _standard.handlers = [handler]
    _standard.propagate = False
