"""Engines under ``pytest --kvtxn-audit``: they ask for an audit, and write what it says.

The test process sets an environment variable, which every process below it inherits: engine cores,
workers, and servers that a test starts by a command. What their audits say goes as lines of JSON
into one file, which the test process reads.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

#: The environment variable; its value is JSON: ``{"audit": "ledger", "events": PATH}``.
VARIABLE: Final = "KVTXN_PYTEST_AUDIT"

#: Events of an audit; ``kvtxn.inactive`` says that nothing of kvtxn is attached to a worker.
ACTIVE: Final = "kvtxn.audit_active"
VIOLATION: Final = "kvtxn.audit_violation"
#: Not in the log: a worker's counters, each time that it is asked for them.
COUNTED: Final = "counted"
UNWATCHED: Final = ("kvtxn.audit_inactive", "kvtxn.inactive", "kvtxn.audit_partial")


#: By a watch of this process: its number here.
_watches: Final[WeakKeyDictionary[object, int]] = WeakKeyDictionary()
_numbers: Final = itertools.count()


def is_wanted() -> bool:
    """Tell whether a test process wants the engines of this process to be audited."""
    return VARIABLE in os.environ


def with_audit(additional_config: object) -> object:
    """Return an engine's ``additional_config`` with the audit that the test process wants.

    The log of violations has their tokens then.

    Args:
        additional_config: vLLM's. It is returned as it is if it has an audit already, or is no
            mapping and has no place for one, or if no test process wants an audit.
    """
    if not is_wanted() or not isinstance(additional_config or {}, Mapping):
        return additional_config
    config: Mapping[str, Any] = additional_config or {}  # type: ignore[assignment]
    given = config.get("kvtxn") or {}
    if not isinstance(given, Mapping) or given.get("audit", "off") != "off":
        return additional_config
    audit = json.loads(os.environ[VARIABLE])["audit"]
    # Tokens of a test are no user's text.
    return {**config, "kvtxn": {**given, "audit": audit, "log_tokens": True}}


def write_events() -> Callable[[], None] | None:
    """Append from now on what this process's audits log to the test process's file, as JSON lines.

    Returns:
        A function that ends it; None if no test process wants to know.
    """
    if not is_wanted():
        return None
    from ...log import listen

    path, wanted = json.loads(os.environ[VARIABLE])["events"], {ACTIVE, VIOLATION, *UNWATCHED}

    def write(event: Mapping[str, Any]) -> None:
        if event["event"] in wanted:
            _append(path, {k: v for k, v in event.items() if k != "exc_info"})

    return listen(write)


def tell_counters(watch: object, counters: Mapping[str, float]) -> None:
    """Append a worker's counters so far to the test process's file, if there is a test process.

    Args:
        watch: the worker's; of each the last counters count.
        counters: by Prometheus name.
    """
    if is_wanted():
        worker = f"{os.getpid()}.{_watches.setdefault(watch, next(_numbers))}"
        event = {"event": COUNTED, "worker": worker, "counters": dict(counters)}
        _append(json.loads(os.environ[VARIABLE])["events"], event)


def _append(path: str, event: Mapping[str, Any]) -> None:
    """Append a line of JSON to the test process's file; an OSError is dropped.

    One write appends a whole line, whichever processes write beside this one. An engine may outlive
    the tests and their file; whoever logs must not hear of that.
    """
    line = json.dumps(event, default=str)
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)
