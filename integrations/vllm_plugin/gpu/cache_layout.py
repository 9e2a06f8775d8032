"""The rows of the KV cache on a GPU, as the library addresses them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....layers import LayerRef
from ..internals import layers as attention_layers
from ..internals.layers import TargetLayer


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
    """View the rows from a slot on, ``[count, *row_shape]`` per plane; slots follow each other."""
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

    Every backend in ``policy.supported.ATTENTION`` sees ``[num_blocks, heads, block_size,
    2 * head_size]``, a row's keys before its values, with strides of its own (of latent rows:
    ``[num_blocks, block_size, latent_size]``); so strides are all that differs between them.
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
