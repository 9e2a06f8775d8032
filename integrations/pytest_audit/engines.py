"""Engines under ``pytest --kvtxn-audit``: they ask for an audit, and write what it says.

The test process sets an environment variable, which every process below it inherits: engine cores,
workers, and servers that a test starts by a command. What their audits say goes as lines of JSON
into one file, which the test process reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

#: The environment variable; its value is JSON: ``{"audit": "ledger", "events": PATH}``.
VARIABLE: Final = "KVTXN_PYTEST_AUDIT"

#: Events of an audit; ``kvtxn.inactive`` says that nothing of kvtxn is attached to a worker.
ACTIVE: Final = "kvtxn.audit_active"
VIOLATION: Final = "kvtxn.audit_violation"
UNWATCHED: Final = ("kvtxn.audit_inactive", "kvtxn.inactive", "kvtxn.audit_partial")


def is_wanted() -> bool:
    """Tell whether a test process wants the engines of this process to be audited."""
    return VARIABLE in os.environ


def with_audit(additional_config: object) -> object:
    """Return an engine's ``additional_config`` with the audit that the test process wants.

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
    """Append what this process's audits say to the test process's file, one JSON object a line.

    Returns:
        A function that ends it; None if no test process wants to know.
    """
    if not is_wanted():
        return None
    from ...log import listen

    path, wanted = json.loads(os.environ[VARIABLE])["events"], {ACTIVE, VIOLATION, *UNWATCHED}

    def write(event: Mapping[str, Any]) -> None:
        if event["event"] not in wanted:
            return
        line = json.dumps({k: v for k, v in event.items() if k != "exc_info"}, default=str)
        # One write appends a whole line, whichever processes write beside this one. An engine may
        # outlive the tests and their file; whoever logs must not hear of that.
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{line}\n".encode())
            finally:
                os.close(file)

    return listen(write)
