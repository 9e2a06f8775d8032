"""``audit_report``: asks the workers of an engine what their audits found."""

from __future__ import annotations

from typing import Any, Final

from ..internals import Foreign
from ..internals import frontend as front

#: Name of the worker's method that returns what its audit found.
REPORT: Final = "kvtxn_audit_report"
#: Name of the worker's method that returns the life of every slot, if the audit records it; its
#: violations have tokens, as those of a report.
RECORDING: Final = "kvtxn_audit_recording"


def audit_report(llm: Foreign) -> list[list[dict[str, Any]]]:
    """Return what the audit of each worker found, by rank; the engine has to be up.

    The result has users' text: the last tokens of prompts and outputs. kvtxn's log has none, unless
    the setting ``log_tokens`` asks for them.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``.

    Returns:
        One list per rank, oldest first: the fields of ``kvtxn.audit.Violation`` as a flat dict. An
        empty one where nothing was found, or nothing is watched: see ``kvtxn_audit_active``.

    Raises:
        ConfigError: it is an ``AsyncLLM``, which answers later, or no engine.
    """
    found: list[list[dict[str, Any]]] = front.ask_engine(llm, "audit_report", REPORT)
    return found
