"""The memory of the ledger on a GPU, counted before vLLM sizes the KV cache by what is left."""

from __future__ import annotations

from ....audit import Ledger, Scrub
from ....audit.books import Sizes
from ....log import get_logger
from ..internals import Foreign, audited, cache_sizes
from ..settings import PluginSettings

log = get_logger()

#: The parameters of ``Ledger`` that a watch leaves as they are.
_DEFAULTS = Ledger.__init__.__kwdefaults__ or {}
#: Bytes that Triton's passes of a scrub take, whatever the sizes.
_LISTS = 4 << 20


def num_bytes(runner: Foreign, config: Foreign, lines: int, *, scrubs: bool) -> int:
    """Return the bytes of a ledger, and of its scrub, over caches with a configuration.

    Args:
        runner: the runner.
        config: vLLM's ``KVCacheConfig``.
        lines: the requests that the ledger knows at one time.
        scrubs: bytes are compared, too.
    """
    groups = audited.row_groups_of(config)
    if not groups:
        return 0
    every, room = list(groups.values()), audited.room(runner)
    sizes = Sizes(lines, room.length, _DEFAULTS["journal"], _DEFAULTS["capacity"])
    total = sizes.num_bytes(every)
    if scrubs:
        layers = cache_sizes.layers_by_group(config)
        known = {name: count for name, count in layers.items() if name in groups}
        total += Scrub.num_bytes(every, known, lines) + _LISTS
    return total


def rest(runner: Foreign, settings: PluginSettings, available: int) -> int:
    """Return the bytes of KV cache that fit beside the ledger into the memory that is free.

    Where the user gives the size of the KV cache, that stays as it is.

    Args:
        runner: the runner, its model loaded.
        settings: the user's.
        available: bytes that are free for the KV cache.
    """
    if cache_sizes.is_given(runner):
        return available
    try:
        lines = 2 * audited.room(runner).requests + 9
        config = cache_sizes.planned(runner, available)
        blocks = cache_sizes.num_blocks(config)
        one = cache_sizes.planned_blocks(config, 1)
        scrubs = settings.audit == "bytes"
        whole = num_bytes(runner, config, lines, scrubs=scrubs)
        fixed = num_bytes(runner, one, lines, scrubs=scrubs)
        each = (whole - fixed) / max(blocks - 1, 1)
        cost = available / max(blocks, 1)
        return int((available - fixed) * cost / (cost + each))
    except Exception as error:
        hint = "the ledger may run out of GPU memory: lower gpu_memory_utilization"
        log.warning("kvtxn.audit_memory_not_reserved", why=repr(error), hint=hint)
        return available
