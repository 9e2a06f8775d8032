"""The KV cache on a GPU: its plan, the spare blocks in it, and its rows as kvtxn sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy

import attrs
from torch import Tensor

from ....errors import LayerError
from ....layers import LayerRef
from . import batches, state_layers
from . import layers as attention_layers
from .engine_protocols import KVCacheConfig
from .layers import TargetLayer, draft_layers, lines_by_row, row_specs
from .runner_protocols import Runner, RunnerV1, RunnerV2


def by_rows(cache: Tensor) -> Tensor | None:
    """View a layer's cache as blocks of one row; None where rows do not follow each other evenly.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; of latent rows
            ``[num_blocks, block_size, latent_size]``.

    Returns:
        ``[num_blocks * block_size, num_kv_heads, 1, 2 * head_size]``, by slot; of latent rows
        ``[num_blocks * block_size, 1, latent_size]``.
    """
    if cache.dim() not in (3, 4) or cache.stride(0) != cache.shape[-2] * cache.stride(-2):
        return None
    blocks, *heads, size, width = cache.shape
    _, *head, row, each = cache.stride()
    return cache.as_strided((blocks * size, *heads, 1, width), (row, *head, row, each))


def keys_and_values(cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """View both halves of a layer's cache, by block and row.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        head_size: head size of the keys, which come first in a row.

    Returns:
        Keys and values, ``[num_blocks, block_size, num_kv_heads, head_size]`` each.
    """
    key, value = cache.transpose(1, 2).split(head_size, -1)
    return key, value


def waiting_rows(ref: LayerRef, first: int, count: int) -> tuple[Tensor, ...]:
    """View the ``count`` rows from slot ``first`` on, ``[count, *row_shape]`` for each plane.

    Blocks and the rows in them must follow each other evenly.
    """
    found = []
    for plane in ref.planes:
        cells = plane.cells
        at = cells.storage_offset() + first * cells.stride(1)
        found.append(
            cells.as_strided((count, *cells.shape[2:]), (cells.stride(1), *cells.stride()[2:]), at)
        )
    return tuple(found)


def layer_refs(layers: Sequence[TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """Describe the target's layers and their caches for the library.

    Args:
        layers: the layers. Every backend in ``policy.supported.ATTENTION`` sees ``[num_blocks,
            heads, block_size, 2 * head_size]``, a row's keys before its values, with strides of its
            own (of latent rows: ``[num_blocks, block_size, latent_size]``).
        kv_dtype: vLLM's name of the caches' format; but for "auto", the layers' scales count.
    """
    refs = []
    for layer in layers:
        scales = (
            (None, None) if kv_dtype == "auto" else attention_layers.stored_scales(layer.module)
        )
        if layer.latent:
            refs.append(
                LayerRef.latent(
                    layer.name, layer.cache, group=layer.group, scale=scales[0], kv_dtype=kv_dtype
                )
            )
            continue
        key, value = keys_and_values(layer.cache, layer.row_shape[-1])
        refs.append(
            LayerRef(
                *(layer.name, key, value),
                group=layer.group,
                k_scale=scales[0],
                v_scale=scales[1],
                kv_dtype=kv_dtype,
            )
        )
    return refs


def bytes_of_rows(runner: RunnerV1 | RunnerV2, rows: int) -> int:
    """Return the bytes that ``rows`` rows take in all of the target's layers of attention."""
    others = draft_layers(runner) | set(state_layers.modules_of(runner))
    return rows * sum(
        int(-(-spec.page_size_bytes // spec.block_size))
        for name, spec in runner.get_kv_cache_spec().items()
        if name not in others
    )


def bytes_of_spare_blocks(runner: RunnerV1 | RunnerV2, rows: int) -> int:
    """Return how many bytes the spare blocks take in which ``rows`` rows of each group may wait.

    These are whole blocks of every layer, a drafter's too, and layers that fill a group up count.
    The groups do not exist yet: see ``planned``. States have no spare blocks of their own.
    """
    specs, states = runner.get_kv_cache_spec(), state_layers.modules_of(runner)
    together = min(Counter(specs.values()).values())
    kinds = Counter(spec for name, spec in specs.items() if name not in states)
    return sum(
        -(-count // together) * together * -(-rows // spec.block_size) * int(spec.page_size_bytes)
        for spec, count in kinds.items()
    )


def bytes_of_tables(runner: RunnerV1 | RunnerV2) -> int:
    """Return the bytes of the block tables by slot in the largest captured graph, one per group.

    A table has a number for each position of each request, or of each row where the attention wants
    that. The groups do not exist yet: vLLM makes as many layers a group as the rarest kind of layer
    has.
    """
    kinds, config = Counter(runner.get_kv_cache_spec().values()), runner.vllm_config
    groups = sum(-(-count // min(kinds.values())) for count in kinds.values())
    compilation = config.compilation_config
    rows = int(compilation.max_cudagraph_capture_size or 0)
    mixed = compilation.cudagraph_mode.mixed_mode().name == "FULL"
    most = rows if mixed else rows // batches.query_len(runner)
    requests = min(most, int(runner.max_num_reqs))
    lines = requests * (batches.query_len(runner) if lines_by_row(runner) else 1)
    return 4 * groups * lines * int(runner.max_model_len)


@attrs.frozen
class SpareBlocks:
    """Blocks behind those that vLLM's scheduler hands out, in which draft rows wait.

    Attributes:
        own: number of blocks that vLLM hands out.
        total: number of all blocks, spare ones included.
        first: by group, its first spare slot. Groups may share memory, so each has slots that are
            its alone.
    """

    own: int
    total: int
    first: Mapping[str, int]

    def begin(self, cache: Tensor) -> int:
        """Return the number of the first spare block of a cache, in blocks of the cache's own size.

        Kernels may have smaller blocks than the scheduler.
        """
        return int(cache.shape[0]) // self.total * self.own


def with_spare_blocks(
    config: KVCacheConfig, rows: int, without: set[str]
) -> tuple[KVCacheConfig, SpareBlocks]:
    """Copy a KV-cache configuration and add blocks for ``rows`` more rows of each group.

    Args:
        config: vLLM's, which stays as it is.
        rows: of each group, rounded up to whole blocks.
        without: names of layers; groups that have only such ones get no blocks.

    Returns:
        The copy, and where the spare blocks are.

    Raises:
        LayerError: a cache's size is no multiple of its number of blocks.
    """
    own, added, first = int(config.num_blocks), 0, {}
    for number, group in enumerate(config.kv_cache_groups):
        if not without.issuperset(group.layer_names):
            size = int(group.kv_cache_spec.block_size)
            first[f"group.{number}"] = (own + added) * size
            added += -(-rows // size)
    more, total = deepcopy(config), own + added
    more.num_blocks = total
    for tensor in more.kv_cache_tensors:
        # Where a block holds the pages of all layers, the new blocks follow the last one. Else each
        # layer has a region of its own, and every region grows.
        regions = tensor.block_stride * own != tensor.size
        for name in ("size", "offset", "layer_stride") if regions else ("size",):
            each, rest = divmod(getattr(tensor, name), own)
            if rest:
                raise LayerError(
                    "vllm",
                    "the KV cache is not laid out by blocks",
                    expected=f"{name} of a KVCacheTensor a multiple of {own} blocks",
                    got=getattr(tensor, name),
                    hint="use policy 'undo'",
                )
            setattr(tensor, name, each * total)
    return more, SpareBlocks(own, total, first)


def has_rows_in_line(config: KVCacheConfig) -> bool:
    """Tell whether row follows row in each layer's cache, block after block.

    Args:
        config: vLLM's ``KVCacheConfig``, whose layout orders layers, blocks, heads and rows ("N").
            One that names no layout passes: the caches themselves are looked at later.
    """
    return config.kv_cache_layout is None or "BN" in config.kv_cache_layout


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
    """Tell whether the user gives the bytes of the KV cache (``kv_cache_memory_bytes``)."""
    return bool(runner.cache_config.kv_cache_memory_bytes)


def planned(runner: Runner) -> CachePlan | None:
    """Describe the cache of a runner whose model is loaded; None if no layer has rows.

    The groups do not exist yet: vLLM makes as many layers a group as the rarest kind of layer has,
    and the groups share blocks. Where it does otherwise, a block takes more bytes than is said
    here, and there are fewer of them.
    """
    rows = row_specs(runner)
    if not rows:
        return None
    kinds = Counter(runner.get_kv_cache_spec().values())
    together = min(kinds.values())
    return CachePlan(
        block_bytes=together * min(int(spec.page_size_bytes) for spec in kinds),
        block_size=max(int(spec.block_size) for spec in rows),
        groups=sum(-(-count // together) for count in kinds.values()),
        layers=len(rows),
    )
