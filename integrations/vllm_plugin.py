"""kvtxn inside vLLM: the entry point, and what users call.

Inactive unless asked for:

    LLM(model=..., speculative_config=...,
        additional_config={"kvtxn": {"policy": "auto"}})

The keys are those of ``TxnConfig``. Then in every worker that has a model
runner one line of the log says ``vllm.active`` with the policy, or
``vllm.inactive`` and why, and the engine runs as if kvtxn were not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from ..errors import KVTxnError
from ..log import get_logger
from .vllm_front import SNAPSHOT, last_snapshots, on_engine, snapshots
from .vllm_hooks import show_log

__all__ = ["last_snapshots", "register", "snapshots", "unregister"]

log = get_logger()

#: The attention that vLLM finds under the name FLASH_ATTN where rows are deferred.
FLASH_ATTENTION: Final = "kvtxn.integrations.vllm_flash.WindowFlashBackend"

_undo: list[Callable[[], None]] = []


def register() -> None:
    """Hook vLLM's workers and engines; vLLM calls this in each process.

    Idempotent; never raises.
    """
    if _undo:
        return
    try:
        from . import vllm_internals as internals
        from . import vllm_internals_front as front

        _undo.append(internals.hook_workers(_on_worker, {SNAPSHOT: _snapshot}))
        _undo.append(front.hook_engines(on_engine))
    except Exception as error:
        event, what = ("vllm.no_metrics", "engines") if _undo else ("vllm.inactive", "workers")
        log.warning(event, why=f"vLLM's {what} cannot be hooked: {error!r}")


def unregister() -> None:
    """Undo ``register``; runners that are hooked already stay hooked."""
    while _undo:
        _undo.pop()()


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
    from .vllm_settings import is_asked, settings, surfaces_errors

    config = internals.engine_config(wrapper)
    asked = internals.additional_config(config)
    try:
        if not is_asked(asked):
            return
        show_log()
        rank = internals.rank_of(wrapper)
        facts = internals.config_facts(config)
        wanted = settings(asked, _most_rows(config, facts.device))
        assert wanted is not None  # it is asked for
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
                from .vllm_internals_gpu import after_warm_up
                from .vllm_runner_v2 import attach

                after_warm_up(wrapper, partial(_restart, internals.runner_of(wrapper)))

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


def _restart(runner: Any) -> None:
    """Windows until now served nobody."""
    steps = getattr(runner, "kvtxn", None)
    if steps is not None:
        steps.manager.metrics.restart()


def _most_rows(config: Any, device: str) -> int:
    """The default for ``max_rows``: on a GPU it also is what buffers are sized by."""
    if device == "cpu":
        from .vllm_internals import most_window_rows as most
    else:
        from .vllm_internals_gpu import window_rows as most
    return most(config)
