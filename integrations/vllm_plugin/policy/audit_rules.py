"""The kinds of engines that the ledger can watch, told before an engine starts."""

from __future__ import annotations

from . import supported
from .engine import EngineFacts


def cannot_watch(device: str, runner: str, context_parallel: int) -> str | None:
    """Say why the ledger cannot watch an engine; None if it can.

    Args:
        device: the type of the engine's device.
        runner: ``"v1"`` or ``"v2"``, vLLM's model runner.
        context_parallel: the ranks that share a request's context.
    """
    if device not in ("cpu", "cuda"):
        return "the ledger watches engines on CPUs and on CUDA GPUs only"
    if device == "cpu" and runner == "v2":
        return "on a CPU the ledger watches the V1 model runner only"
    if context_parallel > 1:
        return "context parallelism spreads a request's rows over ranks"
    return None


def last_stage_only(runner: str, speculates: bool, last_stage: bool) -> str | None:
    """Say why the ledger cannot watch one pipeline stage; None if it can.

    Args:
        runner: ``"v1"`` or ``"v2"``.
        speculates: the engine has drafts.
        last_stage: the stage is the last one, or the only one.
    """
    if runner == "v2" and speculates and not last_stage:
        return (
            "pipeline stages before the last learn of accepted drafts when they have begun later "
            "steps; the ledger watches the last stage"
        )
    return None


def no_bytes(attention: str, kv_dtype: str) -> str | None:
    """Say why rows on a GPU cannot be addressed, so that no bytes are compared; None if they can.

    Args:
        attention: attention backend of the target's layers.
        kv_dtype: ``"auto"`` or the name of a cache format.
    """
    if attention not in supported.ATTENTION["cuda"]:
        return f"the rows of attention backend {attention} cannot be addressed"
    if kv_dtype not in supported.CACHE_FORMATS["cuda"]:
        return f"rows in format {kv_dtype} cannot be addressed"
    return None


def in_words(facts: EngineFacts) -> str:
    """Say for the doctor whether the ledger can watch an engine, and why not if it cannot."""
    if not supported.is_listed(facts.version):
        return "not known of this release; kvtxn.audit_active or kvtxn.audit_inactive says it"
    why = cannot_watch(facts.device, facts.runner, facts.context_parallel)
    if why is not None:
        return f"the ledger cannot watch this engine: {why}"
    return 'the ledger can watch this engine; "audit": "ledger" asks for it'
