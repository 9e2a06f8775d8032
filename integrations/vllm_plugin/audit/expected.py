"""The kinds of engines that the ledger can watch, told before an engine starts."""

from __future__ import annotations

from ..policy.engine import EngineFacts
from ..policy.supported import RELEASES


def cannot_watch(device: str, runner: str, context_parallel: int) -> str | None:
    """Say why the ledger cannot watch an engine; None if it can.

    Args:
        device: the type of the engine's device.
        runner: ``"v1"`` or ``"v2"``, vLLM's model runner.
        context_parallel: the ranks that share a request's context.
    """
    if device != "cpu":
        return "the ledger watches engines on a CPU only"
    if runner == "v2":
        return "the ledger watches the V1 model runner only"
    if context_parallel > 1:
        return "context parallelism spreads a request's rows over ranks"
    return None


def in_words(facts: EngineFacts) -> str:
    """Say for the doctor whether the ledger can watch an engine, and why not if it cannot."""
    if facts.version not in RELEASES:
        return "not known of this release; kvtxn.audit_active or kvtxn.audit_inactive says it"
    why = cannot_watch(facts.device, facts.runner, facts.context_parallel)
    if why is not None:
        return f"the ledger cannot watch this engine: {why}"
    return 'the ledger can watch this engine; "audit": "ledger" asks for it'
