"""The memory of the ledger on a GPU, counted before vLLM sizes the KV cache by what is left."""

from __future__ import annotations

from functools import partial
from typing import Final

from ....audit import Ledger, RowGroup, Scrub
from ....audit.books import Sizes
from ....log import get_logger
from ..internals import Foreign, audited, kv_cache, workers
from ..internals.kv_cache import CachePlan
from ..internals.protocols.runners import Runner
from ..policy.settings import PluginSettings

log = get_logger()

#: The parameters of ``Ledger`` that a watch leaves as they are.
_DEFAULTS: Final = Ledger.__init__.__kwdefaults__ or {}
#: Bytes that Triton's passes of a scrub take, whatever the sizes.
_LISTS: Final = 4 << 20


def num_bytes(plan: CachePlan, blocks: int, lines: int, length: int, *, scrubs: bool) -> int:
    """Return the bytes of a ledger, and of its scrub, over a cache with so many blocks.

    Args:
        plan: the cache.
        blocks: its blocks.
        lines: the requests that the ledger knows at one time.
        length: positions of a request.
        scrubs: bytes are compared, too.
    """
    groups = [
        RowGroup(f"group.{number}", plan.block_size, blocks, pool="blocks")
        for number in range(plan.groups)
    ]
    total = Sizes(lines, length, _DEFAULTS["journal"], _DEFAULTS["capacity"]).num_bytes(groups)
    if scrubs:
        total += Scrub.num_bytes(groups, {groups[0].name: plan.layers}, lines) + _LISTS
    return total


def rest(runner: Runner, settings: PluginSettings, available: int) -> int:
    """Return the bytes of KV cache that fit beside the ledger into the memory that is free.

    Where the user gives the size of the KV cache, that stays as it is.

    Args:
        runner: the runner, its model loaded.
        settings: the user's.
        available: bytes that are free for the KV cache.
    """
    try:
        plan = None if kv_cache.is_given(runner) else kv_cache.planned(runner)
        if plan is None:
            return available
        room, scrubs = audited.room(runner), settings.audit == "bytes"
        lines = 2 * room.requests + 9
        fixed = num_bytes(plan, 1, lines, room.length, scrubs=scrubs)
        each = num_bytes(plan, 2, lines, room.length, scrubs=scrubs) - fixed
        blocks = max(available - fixed, 0) // (plan.block_bytes + each)
        return int(blocks * plan.block_bytes)
    except Exception as error:
        hint = "the ledger may run out of GPU memory: lower gpu_memory_utilization"
        log.warning("kvtxn.audit_memory_not_reserved", why=repr(error), hint=hint)
        return available


def reserve(wrapper: Foreign, settings: PluginSettings) -> None:
    """Let vLLM size the KV cache without the memory of the ledger, if there is to be one.

    Args:
        wrapper: the wrapper of a worker.
        settings: the user's.
    """
    runner = workers.runner_of(wrapper)
    if settings.audit != "off" and hasattr(runner, "kvtxn_unhook"):
        undo = workers.less_cache_memory(wrapper, partial(rest, runner, settings))
        runner.kvtxn_unhook.callback(undo)
