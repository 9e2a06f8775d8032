"""Find tensors that share memory, and tensors whose own elements do.

Strides answer both. The elements of a tensor are distinct in memory if each stride, from the
smallest on, is larger than the extent of all dimensions with smaller strides: true of ``[2, 8]``
with strides ``(8, 1)``, false with ``(4, 1)``. An element's address is then a number whose digits
are its indices. Two tensors with the same strides share an element if the distance between their
starts is a number whose digits are differences of their indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")
Named = tuple[Tensor, T]


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of ``tensor`` may share memory."""
    below = 0
    for stride, size in _dims(tensor):
        if stride <= below:
            return True
        below += (size - 1) * stride
    return False


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element; neither may overlap itself.

    False also where this is unknown: the tensors are interleaved and their strides differ.
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


def near_pairs(parts: Iterable[Named[T]]) -> Iterator[tuple[Named[T], Named[T]]]:
    """Yield each two tensors of which one begins before the other ends, the one before it first.

    Args:
        parts: tensors, each with what names it.
    """
    near: list[Named[T]] = []
    for part in sorted(parts, key=lambda each: begin(each[0])):
        near = [other for other in near if end(other[0]) > begin(part[0])]
        yield from ((other, part) for other in near)
        near.append(part)


def begin(tensor: Tensor) -> int:
    """Return the address of the first element of ``tensor``."""
    return tensor.data_ptr()


def end(tensor: Tensor) -> int:
    """Return the address behind the last element of ``tensor``."""
    last = sum((size - 1) * stride for stride, size in _dims(tensor))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions larger than 1, the smallest stride first."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted(dim for dim in dims if dim[1] != 1)


def _reached(distance: int, dims: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether differences of indices add up to ``distance``.

    Args:
        distance: in elements.
        dims: strides, the largest first, with the sizes of both tensors. The smaller strides
            together mostly span less than one step of the largest, so one or two steps are tried.
    """
    if not dims:
        return distance == 0
    (stride, size, others), *rest = dims
    up, down = (sum((dim[side] - 1) * dim[0] for dim in rest) for side in (1, 2))
    least = max(-(-(distance - up) // stride), 1 - others)
    most = min((distance + down) // stride, size - 1)
    return any(_reached(distance - n * stride, rest) for n in range(least, most + 1))
