"""Whether tensors share memory: the rows of one cache, and two caches beside or between each other.

Strides say it. Elements of one tensor lie apart where its strides, from the smallest on, each clear
all that lies below them (``[2, 8]`` with strides ``(8, 1)``, but not with ``(4, 1)``): then a place
is a number whose digits are the indices. Two tensors with the same strides share an element where
the distance between their starts has digits that are differences of indices.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two of its elements may share memory."""
    below = 0
    for stride, size in _dims(tensor):
        if stride <= below:
            return True
        below += (size - 1) * stride
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element; neither overlaps itself.

    False where that is not known: they lie between each other with strides of their own.
    """
    if begin(one) == begin(other):
        return True
    if begin(one) >= end(other) or begin(other) >= end(one):
        return False
    if one.stride() != other.stride() or one.element_size() != other.element_size():
        return False
    distance, rest = divmod(begin(other) - begin(one), one.element_size())
    dims = sorted(zip(one.stride(), one.shape, other.shape, strict=True), reverse=True)
    return rest == 0 and _reached(distance, [dim for dim in dims if dim[1:] != (1, 1)])


def begin(tensor: Tensor) -> int:
    """The address of its first element."""
    return tensor.data_ptr()


def end(tensor: Tensor) -> int:
    """The address behind its last element."""
    last = sum((size - 1) * stride for stride, size in _dims(tensor))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Strides and sizes, the smallest stride first, of dimensions that go anywhere."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(dim for dim in dims if dim[1] != 1)


def _reached(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether differences of indices make this distance.

    Args:
        distance: in elements.
        dims: strides, the largest first, and the sizes of both tensors. What the smaller strides
            add is mostly less than the stride itself, so that there are one or two steps to try.
    """
    if not dims:
        return distance == 0
    (stride, size, others), *rest = dims
    up, down = (sum((dim[side] - 1) * dim[0] for dim in rest) for side in (1, 2))
    least = max(-(-(distance - up) // stride), 1 - others)
    most = min((distance + down) // stride, size - 1)
    return any(_reached(distance - n * stride, rest) for n in range(least, most + 1))
