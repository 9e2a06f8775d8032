"""The places of rows in vLLM's CPU caches, found by probing.

vLLM's CPU kernels store keys transposed or interleaved, differently per instruction set, so a row
is no strided view. kvtxn knows none of these packings: vLLM's own writer fills one scratch block
with bit patterns, and they tell which element of which row each element of the block holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....errors import LayerError
from ....formats import words
from ....layers import LayerRef
from ..seam import layers as attention_layers
from ..seam.layers import TargetLayer

#: Writes one or more parts ``[block_size, *row_shape]`` of rows to slots 0, 1, ... of a block.
Writer = Callable[..., None]


def probe(write: Writer, block: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Find the place of each element of each row in a block, by writing known patterns.

    Args:
        write: vLLM's writer.
        block: the scratch block that it writes to, any shape, contiguous.
        shape: ``(parts, block_size, *row_shape)``: of keys and values, two parts
            ``[block_size, num_kv_heads, head_size]``; of latent rows, one.
        dtype: dtype of the rows that the writer takes.

    Returns:
        int64 ``[parts, block_size, *row_shape]``: the offset of each element in the block.

    Raises:
        LayerError: two elements share a place, or one element has no place or several.
    """
    count = math.prod(shape)
    identity = torch.arange(count)
    cells = words(block.view(-1))

    def places_of(pattern: Tensor) -> Tensor:
        cells.zero_()
        write(*pattern.to(dtype).view(shape))
        return cells != 0

    places = places_of(torch.ones_like(identity)).nonzero().squeeze(1)
    found = torch.zeros_like(places)
    for bit in range((count - 1).bit_length()):
        found |= places_of(identity >> bit & 1)[places].long() << bit
    table = torch.full((count,), -1)
    table[found % count] = places
    if places.numel() != count or bool((table < 0).any()):
        raise LayerError(
            "probe",
            "the cache's layout is not one element per place",
            expected=f"{count} places for {count} elements",
            got=f"{places.numel()} places for {int((table >= 0).sum())} elements",
            hint="kvtxn cannot address rows of this cache; vLLM runs without it",
        )
    return table.view(shape)


def layer_refs(layers: Sequence[TargetLayer], kv_dtype: str) -> list[LayerRef]:
    """Describe the target's layers and their caches for the library; probe each packing once.

    Args:
        layers: the layers.
        kv_dtype: vLLM's name of the caches' format; but for "auto", the layers' scales count.

    Raises:
        LayerError: the blocks of a layer are not contiguous, its packing cannot be found, or its
            latent rows are packed.
    """
    tables: dict[tuple[object, ...], Tensor] = {}
    refs = []
    for layer in layers:
        blocks = layer.cache.flatten(1)
        if blocks.data_ptr() != layer.cache.data_ptr():
            raise LayerError(
                "vllm",
                f"the blocks of {layer.name!r} are not contiguous",
                hint="kvtxn cannot address rows of this cache; vLLM runs without it",
            )
        kind = (attention_layers.kernel_of(layer), layer.cache.dtype, *layer.cache.shape[1:])
        if kind not in tables:
            tables[kind] = _probe_layer(layer)
        scales = (
            (None, None) if kv_dtype == "auto" else attention_layers.stored_scales(layer.module)
        )
        if layer.latent:
            refs.append(_latent(layer, tables[kind], scales[0], kv_dtype))
            continue
        refs.append(
            LayerRef(
                layer.name,
                blocks,
                blocks,
                group=layer.group,
                k_scale=scales[0],
                v_scale=scales[1],
                kv_dtype=kv_dtype,
                key_offsets=tables[kind][0],
                value_offsets=tables[kind][1],
            )
        )
    return refs


def _latent(layer: TargetLayer, table: Tensor, scale: float | None, kv_dtype: str) -> LayerRef:
    """Describe a layer of latent rows for the library.

    Raises:
        LayerError: ``table`` says that the elements of its rows are permuted.
    """
    if not torch.equal(table.view(-1), torch.arange(table.numel())):
        raise LayerError(
            "vllm",
            f"the latent rows of {layer.name!r} are packed",
            hint="choose an attention backend with plain rows, such as CPU_MLA",
        )
    return LayerRef.latent(
        layer.name, layer.cache, group=layer.group, scale=scale, kv_dtype=kv_dtype
    )


def _probe_layer(layer: TargetLayer) -> Tensor:
    """Find the place of each element in a layer's blocks, as ``probe``, in a scratch block."""
    block_size = layer.cache.shape[-2]
    scratch = layer.cache.new_zeros(1, *layer.cache.shape[1:])
    slots = torch.arange(block_size)

    def write(*parts: Tensor) -> None:
        attention_layers.write_rows(layer, parts, scratch, slots)

    shape = (1 if layer.latent else 2, block_size, *layer.row_shape)
    return probe(write, scratch, shape, layer.dtype)
