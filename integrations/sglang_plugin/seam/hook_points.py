"""The functions of SGLang that kvtxn hooks, and whether the installed release has them so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from ...serving.source_files import Sources

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_WEIGHTS: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
)
_RESULTS: Final = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_TIMES: Final = "sglang.srt.observability.req_time_stats.SchedulerReqTimeStats"

#: By dotted name, the parameters that a hook point begins with, ``self`` left out. These tell the
#: ledger of each step.
HOOK_POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("forward_batch",),
    f"{_SCHEDULER}.run_batch": ("batch",),
    f"{_SCHEDULER}.flush_cache": (),
    "sglang.srt.mem_cache.common.release_kv_cache": ("req", "tree_cache"),
    # Wrapped on the worker, whose result is on the device still.
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": ("batch",),
}
#: These only make the audit more pleasant: it opens while the engine starts, /server_info has its
#: counters, and it hears of an update of the weights that leaves the cache as it is.
OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_SCHEDULER}.__init__": ("server_args",),
    f"{_SCHEDULER}.get_internal_state": ("recv_req",),
    f"{_WEIGHTS}.flush_cache_after_weight_update": (),
}

#: To contain wrong reads: a plan knows nothing of them, and no token that one of them has sampled
#: is taken in. The last four are called, or changed.
CONTAINING: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_SCHEDULER}.process_batch_result": ("batch", "result"),
    f"{_SCHEDULER}.get_next_batch_to_run": ("running_batch", "last_batch"),
    "sglang.srt.managers.schedule_batch.retract_all": (
        *("reqs", "req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache"),
        *("hisparse_coordinator", "offload_kv"),
    ),
    "sglang.srt.disaggregation.utils.prepare_abort": ("req", "error_message", "status_code"),
    f"{_RESULTS}.process_batch_result_decode": ("batch", "result"),
    f"{_TIMES}.set_wait_queue_entry_time": (),
}

Hook = Callable[..., object]


def release() -> str | None:
    """Return the installed release of SGLang; None without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def folder() -> Path | None:
    """Return the folder of the installed package ``sglang`` without importing it.

    None if there is none, or only a folder of that name without ``__init__.py``.
    """
    found = importlib.util.find_spec("sglang")
    return None if found is None or found.origin is None else Path(found.origin).parent


@cache
def _sources(where: Path) -> Sources:
    """Return the source files beside ``where``, each of which is parsed once."""
    return Sources(where.parent)


def moved(
    points: Mapping[str, tuple[str, ...]] = HOOK_POINTS, where: Path | None = None
) -> list[str]:
    """Return a sentence for each hook point that is gone, or takes other parameters; empty if none.

    Further parameters behind the expected ones are right. Without SGLang all points are gone.

    Args:
        points: by a function's full name, the parameters that it should have, in order.
        where: the folder of the package ``sglang``; None: the installed one.
    """
    where = folder() if where is None else where
    found = []
    for target, expected in points.items():
        own = None if where is None else _sources(where).find(target)
        short = ".".join(target.rsplit(".", 2)[-2:])
        if own is None:
            found.append(f"{short} is gone")
        elif own.takes[: len(expected)] != expected:
            found.append(f"{short} takes ({', '.join(own.takes)})")
    return found


def hook(around: Mapping[str, Hook]) -> None:
    """Register functions around hook points in SGLang's own registry, which patches them later.

    Args:
        around: by dotted name, a function that gets the original one and its arguments.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in around.items():
        HookRegistry.register(target, function, HookType.AROUND)
