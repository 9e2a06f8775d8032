"""KV caches of a GPU's model runner as vLLM plans and allocates them, by its own code.

Only for releases whose side on GPUs was checked: importing this skips the module elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvtxn.integrations.vllm_plugin.policy.supported import GPU_RELEASES
from kvtxn.integrations.vllm_plugin.seam import workers
from torch import Tensor

pytest.importorskip("vllm")
if workers.version() not in GPU_RELEASES:
    pytest.skip("this release's KV cache on GPUs was not checked", allow_module_level=True)

from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

__all__ = ["GROUPS", "KVCacheLayout", "sliding"]

OWN = 7
WIDTH = 4


def full(size: int = 8, heads: int = 2, width: int = WIDTH, **more: Any) -> Any:
    """Layers that attend to everything; a page has ``size`` rows."""
    sizes = {"block_size": size, "num_kv_heads": heads, "head_size": width}
    return FullAttentionSpec(**sizes, dtype=torch.bfloat16, **more)


def sliding(size: int = 8, heads: int = 2) -> Any:
    """Layers with a sliding window."""
    sizes = {"block_size": size, "num_kv_heads": heads, "head_size": WIDTH}
    return SlidingWindowSpec(**sizes, dtype=torch.bfloat16, sliding_window=20)


def mixed(**specs: Any) -> Any:
    """Layers of one group whose pages differ; vLLM plans a tensor for each kind."""
    return UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs=specs)


#: Layers and specification of each group; layers that begin with "draft" are a drafter's.
GROUPS: dict[str, list[tuple[str, Any]]] = {
    "one layer": [("a", full())],
    "one group": [("a b c", full())],
    "two groups share their memory": [("a b", full()), ("c d", sliding())],
    "groups of different sizes": [("a b c", full()), ("d", sliding())],
    "a sliding group comes first": [("a", sliding()), ("b c", full()), ("d", sliding())],
    "blocks of different sizes": [("a b", full(8, 2)), ("c d", sliding(16, 1))],
    "pages of different sizes": [("a b c", mixed(a=full(), b=full(width=2 * WIDTH), c=full()))],
    "padded pages": [("a b", full(page_size_padded=512))],
    "a drafter's group": [("draft.a", sliding()), ("a b", full()), ("draft.b", sliding())],
    "a drafter's layer": [("a b draft.a", full())],
}


def planned(layout: KVCacheLayout, groups: list[tuple[str, Any]], blocks: int = OWN) -> Any:
    """vLLM's ``KVCacheConfig`` for these groups."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=None,
    )
    config = SimpleNamespace(
        cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None)
    )
    made = [KVCacheGroupSpec(names.split(), spec) for names, spec in groups]
    found = get_kv_cache_config_from_groups(config, made, 0)
    found.kv_cache_layout = layout.name  # as the engine's core does
    return found


def allocated(
    config: Any, layout: KVCacheLayout, kernel_size: int | None = None, device: str = "cpu"
) -> dict[str, Tensor]:
    """Each layer's cache, ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

    Args:
        config: a ``KVCacheConfig``.
        layout: that it was planned for.
        kernel_size: rows of a block as the attention counts them; None: a page.
        device: where they are.
    """
    sizes = None if kernel_size is None else [kernel_size] * len(config.kv_cache_groups)
    return allocate_kv_cache(config, torch.device(device), layout, sizes)


def cells(cache: Tensor, slots: Tensor) -> Tensor:
    """Indices of these slots' elements in the allocation, ``[num_slots, n]``."""
    every = torch.arange(cache.untyped_storage().nbytes() // cache.element_size())
    every = every.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    size = cache.shape[2]
    return every[slots // size, :, slots % size].flatten(1)


def possible(layout: KVCacheLayout, groups: list[tuple[str, Any]], kernel_size: int | None) -> bool:
    """Tell whether vLLM has such caches, whose blocks share no memory with others' blocks."""
    try:
        caches = allocated(planned(layout, groups), layout, kernel_size)
    except (AssertionError, RuntimeError, ValueError):
        return False
    owners = torch.full((next(iter(caches.values())).untyped_storage().nbytes(),), -1)
    for names, spec in groups:
        slots = torch.arange(OWN * spec.block_size)
        for name in names.split():
            there = cells(caches[name], slots)
            block = (slots // spec.block_size)[:, None].expand_as(there)
            if not ((owners[there] < 0) | (owners[there] == block)).all():
                return False
            owners[there] = block
    return True


#: Layouts, groups, and the rows of a kernel's block.
PLANS = [
    pytest.param(layout, groups, size, id=f"{layout.name}-{name}-{size or 'pages'}")
    for layout in KVCacheLayout
    for name, groups in GROUPS.items()
    for size in (None, 4)
    if possible(layout, groups, size)
]
