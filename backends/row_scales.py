"""Where the attention kernels find the scales of 8-bit rows."""

from __future__ import annotations

import attrs
from torch import Tensor

from ..layers import LayerRef, Plane


@attrs.frozen(eq=False)
class Scales:
    """The scales of one side, as the kernels want them.

    Attributes:
        numbers: float32: one, one per KV head, or one of each row and head.
        count: how many where they are static, 0 where there are none, -1 where each row has its
            own.
        strides: of those of each row: from block to block, slot and head in a cache, from row
            to row and head else; zeros where there are none.
    """

    numbers: Tensor
    count: int
    strides: tuple[int, ...]


def typed(plane: Plane) -> Tensor:
    """The cache of a plane in the plane's own dtype."""
    return plane.cells.view(plane.format.dtype)


def scales_of(
    ref: LayerRef, side: int, unused: Tensor, fresh: tuple[Tensor, ...] | None = None
) -> Scales:
    """The scales of keys (``side`` 0) or values (1).

    Args:
        ref: the layer.
        side: number of the plane.
        unused: what is passed where there are none.
        fresh: staged rows, whose own scales are meant instead of those in the cache.
    """
    number = ref.planes[side].format
    if number.scales_in is not None:
        beside = typed(ref.planes[number.scales_in]) if fresh is None else fresh[number.scales_in]
        return Scales(beside, -1, beside.stride())
    if number.scale is None:
        return Scales(unused, 0, (0, 0, 0))
    scale = number.scale.reshape(-1)
    return Scales(scale, scale.numel(), (0, 0, 0))
