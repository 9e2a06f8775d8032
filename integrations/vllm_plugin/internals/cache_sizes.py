"""The KV cache that vLLM will make out of some bytes, and the memory that it is given."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

from . import Foreign


def is_given(runner: Any) -> bool:
    """Tell whether the user gives the bytes of the KV cache."""
    return bool(runner.cache_config.kv_cache_memory_bytes)


def planned(runner: Any, available: int) -> Foreign:
    """Return the ``KVCacheConfig`` that vLLM makes out of so many bytes.

    Args:
        runner: a runner whose model is loaded.
        available: bytes.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    config = runner.vllm_config
    groups = get_kv_cache_groups(config, deepcopy(runner.get_kv_cache_spec()))
    return get_kv_cache_config_from_groups(config, groups, available)


def planned_blocks(config: Any, blocks: int) -> Foreign:
    """Return a configuration with another number of blocks, for counting alone."""
    found = copy(config)
    found.num_blocks = blocks
    return found


def num_blocks(config: Any) -> int:
    """Return the number of blocks of a ``KVCacheConfig``."""
    return int(config.num_blocks)


def layers_by_group(config: Any) -> dict[str, int]:
    """Return the number of layers of each KV-cache group, by name."""
    return {
        f"group.{number}": len(group.layer_names)
        for number, group in enumerate(config.kv_cache_groups)
    }
