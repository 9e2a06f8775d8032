"""Small caches, full of noise, and what changed in them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtxn import LayerRef

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 6, 4, 2, 8


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of any dtype."""
    return torch.randn(*shape).to(dtype)


def make_layers(
    count: int = 3, dtype: torch.dtype = torch.float32, groups: tuple[str, ...] = ("default",)
) -> list[LayerRef]:
    """Layers over noise, their groups in turn."""
    shape = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
    return [
        LayerRef(
            name=f"layer.{i}",
            key_cache=noise(*shape, dtype=dtype),
            value_cache=noise(*shape, dtype=dtype),
            group=groups[i % len(groups)],
        )
        for i in range(count)
    ]


def rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A key and a value for ``count`` rows."""
    return noise(count, HEADS, HEAD_SIZE, dtype=dtype), noise(count, HEADS, HEAD_SIZE, dtype=dtype)


def copies(layers: list[LayerRef]) -> list[Tensor]:
    """Copy every cache, as integers."""
    return [plane.cells.clone() for ref in layers for plane in ref.planes]


def changed_slots(layers: list[LayerRef], before: list[Tensor]) -> list[set[int]]:
    """Slots that differ from ``before``, per plane."""
    planes = [plane for ref in layers for plane in ref.planes]
    return [
        {
            block * plane.block_size + offset
            for block, offset in (plane.cells != old).flatten(2).any(2).nonzero().tolist()
        }
        for plane, old in zip(planes, before, strict=True)
    ]
