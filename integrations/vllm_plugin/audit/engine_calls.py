"""The calls by which users ask and tell the audit of a running engine."""

from __future__ import annotations

from typing import Any

from ....errors import ConfigError
from ..internals import frontend as front
from ..internals.workers import AGES, NEW_WEIGHTS, REPORT


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
