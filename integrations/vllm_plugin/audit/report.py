"""``audit_report``: asks the workers of an engine what their audits found."""

from __future__ import annotations

from typing import Any

from ..internals import frontend as front
from ..internals.workers import REPORT


def audit_report(llm: object) -> list[list[dict[str, Any]]]:
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
