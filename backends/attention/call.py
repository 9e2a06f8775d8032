"""The sizes and dtypes of one layer's attention in one window, computed before a launch."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...executor import AttentionArgs
from ...layers import LayerRef, Plane
from ...layout import RowLayout, to_device

_COMPUTE: Final = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@attrs.frozen(eq=False)
class Requests:
    """A layout as the attention kernels want it.

    Attributes:
        starts: int32 ``[num_requests + 1]`` on the device, each request's first row, and the end.
        longest: rows of the longest request.
    """

    starts: Tensor
    longest: int


_requests: WeakKeyDictionary[RowLayout, Requests] = WeakKeyDictionary()


def requests_of(layout: RowLayout, device: torch.device) -> Requests:
    """Return a layout's requests on the device.

    They are copied there once, and kept with the layout.
    """
    found = _requests.get(layout)
    if found is None:
        lengths = [b - a for a, b in zip(layout.starts, layout.starts[1:], strict=False)]
        starts = to_device(layout.starts, device, torch.int32)
        found = _requests[layout] = Requests(starts, max(lengths, default=0))
    return found


def power(value: int) -> int:
    """Return the least power of two that is at least ``value`` and at least 16."""
    return max(16, 1 << (value - 1).bit_length())


@attrs.frozen(eq=False)
class AttnShape:
    """The sizes of one layer's attention.

    Attributes:
        heads: KV heads.
        group: query heads of each KV head.
        d: head size of queries and keys.
        dv: head size of values.
        block_size: slots per block of the cache.
        longest: rows of the window's longest request.
    """

    heads: int
    group: int
    d: int
    dv: int
    block_size: int
    longest: int


@attrs.frozen(eq=False)
class AttnCall:
    """Everything that a launch needs to compute one layer's attention in one window.

    Attributes:
        layout: the layout of the window's rows by request.
        ref: the layer.
        query: ``[num_rows, num_q_heads, head_size]``.
        fresh: the window's rows as the cache stores them, one tensor per plane; None if they are
            in the cache.
        args: the arguments of ``Window.attend``.
        requests: the layout's requests, on the device.
        shape: the sizes of the layer and the window.
        compute: the dtype in which numbers are multiplied.
    """

    layout: RowLayout
    ref: LayerRef
    query: Tensor
    fresh: tuple[Tensor, ...] | None
    args: AttentionArgs
    requests: Requests
    shape: AttnShape
    compute: tl.dtype

    @classmethod
    def of(
        cls,
        layout: RowLayout,
        ref: LayerRef,
        query: Tensor,
        fresh: tuple[Tensor, ...] | None,
        args: AttentionArgs,
    ) -> AttnCall:
        """Make the call of a layer: work out its sizes and the dtype of its products.

        Args:
            layout: the window's.
            ref: a layer with keys and values.
            query: ``[num_rows, num_q_heads, head_size]``.
            fresh: the window's own rows by plane, as the cache stores them; None if they are in the
                cache.
            args: the rest of the call.
        """
        requests = requests_of(layout, query.device)
        key, value = ref.planes[:2]
        heads, size = key.row_shape
        group, longest = query.shape[1] // heads, requests.longest
        shape = AttnShape(heads, group, size, value.row_shape[1], key.block_size, longest)
        return cls(layout, ref, query, fresh, args, requests, shape, _compute(query, ref))

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants that do not depend on how the work is divided, by name."""
        shape, args = self.shape, self.args
        return {
            "FRESH": self.fresh is not None,
            "TREE": self.layout.tree is not None,
            "CAPPED": args.soft_cap is not None,
            "SLIDING": args.sliding_window is not None,
            "RING": args.ring_size is not None,
            "GROUP": shape.group,
            "HEADS": shape.heads,
            "D": shape.d,
            "DV": shape.dv,
            "BLOCK_SIZE": shape.block_size,
            "BLOCK_D": power(shape.d),
            "BLOCK_DV": power(shape.dv),
            "COMPUTE": self.compute,
        }


def _compute(query: Tensor, ref: LayerRef) -> tl.dtype:
    """Choose the dtype of products: the query's 16 bits if the cache loses nothing by them.

    Float32 for other queries, for a cache of another dtype that is not of 8 bits, and if rows have
    scales of their own.
    """
    stored = ref.planes[0].format.dtype
    exact = stored is query.dtype or stored.itemsize == 1
    if ref.planes[-1].is_scale:  # an 8-bit number times its scale needs more than 16 bits
        return tl.float32
    return _COMPUTE.get(query.dtype, tl.float32) if exact else tl.float32


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
    """Return the scales of keys (``side`` 0) or values (1), with their number and strides.

    Args:
        ref: the layer.
        side: 0 or 1.
        unread: float32, stands in the place of scales if there are none; their number is 0 then.
        fresh: staged rows by plane, if these rows' scales are wanted; None: those of the cache. The
            number is -1 for scales that lie beside rows.
    """
    number = ref.planes[side].format
    if number.scales_in is not None:
        beside = typed(ref.planes[number.scales_in]) if fresh is None else fresh[number.scales_in]
        return Scales(beside, -1, beside.stride())
    if number.scale is None:
        return Scales(unread, 0, (0, 0, 0))
    scale = number.scale.reshape(-1)
    return Scales(scale, scale.numel(), (0, 0, 0))
