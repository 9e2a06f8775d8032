"""The scales of 8-bit rows, as the attention kernels take them."""

from __future__ import annotations

import attrs
from torch import Tensor

from ...layers import LayerRef, Plane


@attrs.frozen(eq=False)
class Scales:
    """The scales of keys or of values.

    Attributes:
        numbers: float32: one, one per KV head, or one per row and head.
        count: of static scales, 0 if there are none; -1 if each row has its own.
        strides: of the rows' own scales, in elements: block, slot and head in a cache, row and head
            in fresh rows; else zeros.
    """

    numbers: Tensor
    count: int
    strides: tuple[int, ...]


def typed(plane: Plane) -> Tensor:
    """View the cache of a plane in the plane's own dtype."""
    return plane.cells.view(plane.format.dtype)


def scales_of(
    ref: LayerRef, side: int, unread: Tensor, fresh: tuple[Tensor, ...] | None = None
) -> Scales:
    """Find the scales of keys (``side`` 0) or values (1).

    Args:
        ref: the layer.
        side: number of the plane: 0 for keys, 1 for values.
        unread: float32 tensor to pass in the place of scales if there are none.
        fresh: staged rows whose own scales are wanted; None for the scales of cached rows.
    """
    number = ref.planes[side].format
    if number.scales_in is not None:
        beside = typed(ref.planes[number.scales_in]) if fresh is None else fresh[number.scales_in]
        return Scales(beside, -1, beside.stride())
    if number.scale is None:
        return Scales(unread, 0, (0, 0, 0))
    scale = number.scale.reshape(-1)
    return Scales(scale, scale.numel(), (0, 0, 0))
