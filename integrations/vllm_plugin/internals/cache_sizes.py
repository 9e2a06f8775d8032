"""The KV cache that vLLM will make, as far as the memory beside it depends on it."""

from __future__ import annotations

from collections import Counter

import attrs

from .protocols.runners import Runner


@attrs.frozen
class CachePlan:
    """A KV cache that does not exist yet.

    Attributes:
        block_bytes: bytes of a block in all layers that share it.
        block_size: rows of a block.
        groups: number of KV-cache groups, at most.
        layers: number of layers that have rows.
    """

    block_bytes: int
    block_size: int
    groups: int
    layers: int


def is_given(runner: Runner) -> bool:
    """Tell whether the user gives the bytes of the KV cache."""
    return bool(runner.cache_config.kv_cache_memory_bytes)


def planned(runner: Runner) -> CachePlan | None:
    """Describe the cache of a runner whose model is loaded; None if no layer has rows.

    The groups do not exist yet: vLLM makes as many layers a group as the rarest kind of layer has,
    and the groups share blocks. Where it does otherwise, a block takes more bytes than is said
    here, and there are fewer of them.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    specs = list(runner.get_kv_cache_spec().values())
    rows = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    if not rows:
        return None
    kinds = Counter(specs)
    together = min(kinds.values())
    return CachePlan(
        block_bytes=together * min(int(spec.page_size_bytes) for spec in kinds),
        block_size=max(int(spec.block_size) for spec in rows),
        groups=sum(-(-count // together) for count in kinds.values()),
        layers=len(rows),
    )
