"""kvtxn inside vLLM: the entry point, and the counters.

Inactive unless asked for:

    LLM(model=..., speculative_config=...,
        additional_config={"kvtxn": {"policy": "auto"}})

The keys are those of ``TxnConfig``. In every worker that has a model runner
one line of the log says ``vllm.active`` with the policy, or ``vllm.inactive``
and why; then the engine runs as if kvtxn were not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import KVTxnError
from ..log import get_logger
from .vllm_hooks import show_log

log = get_logger()

#: The attention that vLLM finds under the name FLASH_ATTN where rows are deferred.
FLASH_ATTENTION: Final = "kvtxn.integrations.vllm_flash.WindowFlashBackend"

_undo: Callable[[], None] | None = None


def register() -> None:
    """Hook vLLM's workers; vLLM calls this in each of its processes. Idempotent, never raises."""
    global _undo
    if _undo is not None:
        return
    try:
        from . import vllm_internals as internals

        _undo = internals.hook_workers(_on_worker, {"kvtxn_snapshot": _snapshot})
    except Exception as error:
        log.warning("vllm.inactive", why=f"vLLM's workers cannot be hooked: {error!r}")


def unregister() -> None:
    """Undo ``register``; runners that are hooked already stay hooked."""
    global _undo
    if _undo is not None:
        _undo()
        _undo = None


def snapshots(llm: Any) -> list[dict[str, float]]:
    """The counters of each worker, by rank; in-process and multi-process engines alike.

    Args:
        llm: a vLLM ``LLM`` or ``LLMEngine``; its workers must still live.

    Returns:
        One dict per rank: the Prometheus names with labels folded in, and ``kvtxn_active``,
        which is 0 (and alone) where kvtxn stays out.
    """
    found: list[dict[str, float]] = llm.collective_rpc("kvtxn_snapshot")
    return found


def _snapshot(wrapper: Any) -> dict[str, float]:
    from . import vllm_internals as internals

    steps = getattr(internals.runner_of(wrapper), "kvtxn", None)
    if steps is None:
        return {"kvtxn_active": 0.0}
    return {"kvtxn_active": 1.0, **steps.manager.snapshot()}


def _on_worker(wrapper: Any) -> None:
    """A worker has its runner: hook it if the configuration asks for that."""
    from . import vllm_internals as internals
    from .vllm_policy import decide
    from .vllm_settings import settings, surfaces_errors

    config = internals.engine_config(wrapper)
    asked = internals.additional_config(config)
    try:
        if not isinstance(asked, Mapping) or "kvtxn" not in asked:
            return
        show_log()
        rank = internals.rank_of(wrapper)
        facts = internals.config_facts(config)
        wanted = settings(asked, _most_rows(config, facts.device))
        if wanted is None:
            return
        policy, why = decide(wanted.policy, facts)
        if policy == "off":
            log.warning("vllm.inactive", rank=rank, why=why)
            return
        if facts.device == "cpu":
            from .vllm_runner import attach
        else:
            if facts.runner == "v1":
                from .vllm_runner_v1 import attach
            else:
                from .vllm_runner_v2 import attach

            if policy == "deferred":  # before the model is made, which asks for its attention
                internals.register_flash_attention(FLASH_ATTENTION)
        attach(internals.runner_of(wrapper), wanted, rank)
    except KVTxnError as error:
        log.error("vllm.inactive", why=str(error))
        if surfaces_errors(asked):
            raise
    except Exception as error:
        log.exception("vllm.inactive", why=repr(error))
        if surfaces_errors(asked):
            raise


def _most_rows(config: Any, device: str) -> int:
    """The default for ``max_rows``: on a GPU it also is what buffers are sized by."""
    if device == "cpu":
        from .vllm_internals import most_window_rows as most
    else:
        from .vllm_internals_gpu import window_rows as most
    return most(config)
