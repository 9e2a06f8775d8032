"""Buffers for the rows that an ``undo`` window may have to put back."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...layers import LayerRef
from ...row_io import LayerRows


class UndoBuffers:
    """Fixed buffers of ``max_rows`` rows per layer, allocated when a group is first saved.

    Args:
        members: the layers, by group.
        max_rows: most rows of a window.
    """

    def __init__(self, members: Mapping[str, tuple[LayerRef, ...]], max_rows: int) -> None:
        self._members = members
        self._max_rows = max_rows
        self._buffers: dict[str, tuple[Tensor, ...]] = {}
        self._views: dict[tuple[str, int], LayerRows] = {}

    def of(self, group: str, num_rows: int) -> LayerRows:
        """Return the first ``num_rows`` rows of a group's buffers.

        By layer name, one view per plane. The first call for a group allocates; equal arguments get
        the same views.
        """
        views = self._views.get((group, num_rows))
        if views is None:
            made = {ref.name: self._buffers_of(ref) for ref in self._members[group]}
            views = {name: tuple(part[:num_rows] for part in parts) for name, parts in made.items()}
            self._views[group, num_rows] = views
        return views

    def _buffers_of(self, ref: LayerRef) -> tuple[Tensor, ...]:
        """Return a layer's buffers, one of ``max_rows`` rows per plane.

        The first call allocates them.
        """
        if ref.name not in self._buffers:
            self._buffers[ref.name] = tuple(
                _room(self._max_rows, plane.row_shape, plane.cells) for plane in ref.planes
            )
        return self._buffers[ref.name]


def _room(max_rows: int, row_shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate ``[max_rows, *row_shape]`` elements of ``like``'s dtype and device.

    Each row begins at a multiple of 16 bytes; the content is undefined.
    """
    elements = math.prod(row_shape)
    per_word = 16 // like.dtype.itemsize
    padded = -(-elements // per_word) * per_word
    flat = torch.empty(max_rows, padded, dtype=like.dtype, device=like.device)
    rows: Tensor = flat[:, :elements].unflatten(1, row_shape)
    return rows
