"""Checksums of rows and states: 64 bits, keyed, over all bytes of a row; of blocks, 128 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..cache_planes import Plane
from .digest import RESERVED, Key
from .groups import WORD_BYTES

#: Blocks whose bytes are gathered at a time, to take little of the device's memory.
_AT_ONCE: Final = 16
#: Runs of memory of which a block may consist in one cache, to be read one by one.
_MOST_RUNS: Final = 8


def checksum(key: Key, rows: Tensor, part: int) -> Tensor:
    """Return a keyed sum over the bytes of rows, int64 ``[num_rows]``.

    Each 8 bytes are permuted with the key and their offset. A change within 8 bytes is always
    seen; another one is missed with a chance of about 2^-64.

    Args:
        key: the engine's key.
        rows: ``[num_rows, ...]``, any dtype.
        part: the number of the plane; equal bytes in different planes have different checksums.
    """
    raw = rows.reshape(len(rows), -1).contiguous().view(torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.shape[1] % WORD_BYTES))
    words = padded.view(torch.int64)
    places = torch.arange(words.shape[1], device=words.device) * RESERVED + part
    return key.permute(words + key.permute(places)).sum(1)


def has_nan(plane: Plane) -> bool:
    """Tell whether a plane's format is of floats, with a NaN with which dead rows can be filled."""
    return plane.format.dtype.is_floating_point


def memory_order(block: Tensor) -> list[int]:
    """Return the dimensions of a block that are longer than 1, as they lie in memory.

    The first is the one whose elements lie furthest apart.
    """
    longer = [at for at in range(block.ndim) if block.shape[at] > 1]
    return sorted(longer, key=block.stride().__getitem__, reverse=True)


def block_pages(cache: Tensor, dim: int) -> list[Tensor]:
    """Return the bytes of a cache's blocks, as views with the block as their first dimension.

    Together, a block's bytes are in the order in which they lie in memory. Where a block consists
    of at most ``_MOST_RUNS`` runs of memory, each view is of one run: uint8 ``[num_blocks, n]``, a
    block's line contiguous. Any other cache, or an empty one, is one view, of its own dtype.

    Args:
        cache: any shape and dtype.
        dim: the dimension of the blocks.
    """
    blocks = cache.movedim(dim, 0)
    if not blocks.numel():
        return [blocks]
    order = [at + 1 for at in memory_order(blocks[0])]
    single = [at for at in range(1, blocks.ndim) if at not in order]
    whole = blocks.permute(0, *order, *single)
    if not order or blocks.stride(order[-1]) != 1:
        return [whole]
    ordered = whole.flatten(len(order)).view(torch.uint8)
    first, together = ordered.ndim, 1
    while first > 1 and ordered.stride(first - 1) == together:
        first -= 1
        together *= ordered.shape[first]
    if math.prod(ordered.shape[1:first]) > _MOST_RUNS:
        return [whole]
    pages = [ordered.flatten(first)]
    for _ in range(first - 1):
        pages = [part for page in pages for part in page.unbind(1)]
    return pages


def block_checksums(key: Key, pages: Sequence[Tensor], blocks: Tensor) -> Tensor:
    """Return checksums of 128 bits over all bytes of blocks; on a GPU this does not wait for it.

    Args:
        key: the engine's key.
        pages: ``[num_blocks, ...]`` each, the bytes of a block in all layers, see ``block_pages``.
        blocks: int64 ``[n]`` on the pages' device.

    Returns:
        int64 ``[n, 2]`` on the pages' device.
    """
    sums = []
    for some in blocks.split(_AT_ONCE) if len(blocks) else ():
        taken = (page.index_select(0, some).reshape(len(some), -1) for page in pages)
        whole = torch.cat([page.view(torch.uint8) for page in taken], 1)
        sums.append(torch.stack([checksum(key, whole, part) for part in range(2)], 1))
    return torch.cat(sums) if sums else blocks.new_empty((0, 2))
