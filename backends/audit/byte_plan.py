"""Tables on the device that tell the byte kernels a scrub's groups, layers and planes."""

from __future__ import annotations

import math
from typing import Final

import attrs
import torch
from torch import Tensor

from ...audit.byte_books import ByteBooks, Watched
from ...audit.checksum import has_nan
from ...cache_planes import Plane

#: int64 columns of a group's line.
SOURCE: Final = 0  # the number of the group that writes its rows
WATCHED: Final = 1  # 1 if that group has layers
POISONED: Final = 2
GROUP_FIELDS: Final = 3

#: int64 columns of a layer's line.
GROUP: Final = 0
SUMS: Final = 1  # address of int64 [num_slots]
FIRST_PLANE: Final = 2
NUM_PLANES: Final = 3
NUMBER: Final = 4
WINDOW: Final = 5  # address of the window's first element; 0 without one
WINDOW_STRIDE: Final = 6  # bytes from one state to the next
WINDOW_OFFSETS: Final = 7  # address of int64 [inputs, others]: bytes from the state's first element
WINDOW_INPUTS: Final = 8
WINDOW_OTHERS: Final = 9
WINDOW_LENGTH: Final = 10
WINDOW_ITEM: Final = 11  # bytes of an element
LAYER_FIELDS: Final = 12

#: int64 columns of a plane's line. Strides are in bytes; an element of a row lies at ``run * RUN +
#: within * STEP``, or where the offsets say.
CELLS: Final = 0
BLOCK_STRIDE: Final = 1
SLOT_STRIDE: Final = 2
RUN: Final = 3
STEP: Final = 4
UNITS: Final = 5
RUN_UNITS: Final = 6
BLOCK_SIZE: Final = 7
ITEM: Final = 8
OFFSETS: Final = 9  # address of int64 [block_size, units], in elements; 0 without
PART: Final = 10
HAS_NAN: Final = 11
PLANE_FIELDS: Final = 12


@attrs.frozen(eq=False)
class BytePlan:
    """The tables, and the tensors that they name by address.

    Attributes:
        groups: int64 ``[num_groups, GROUP_FIELDS]``.
        layers: int64 ``[num_layers, LAYER_FIELDS]``.
        planes: int64 ``[num_planes, PLANE_FIELDS]``.
        num_layers: layers.
        held: tensors that must live as long as the tables.
    """

    groups: Tensor
    layers: Tensor
    planes: Tensor
    num_layers: int
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, books: ByteBooks) -> BytePlan:
        """Make the tables of a scrub's groups, layers and planes on its device.

        They have addresses of the caches, of the layers' sums and of ``held``.
        """
        places = books.books.layout.places
        device = books.seals.device
        layers: list[list[int]] = []
        planes: list[list[int]] = []
        held: list[Tensor] = []
        for place, members in books.layers.items():
            for layer in members:
                window = _window(layer, held)
                first = len(planes)
                planes += [_plane(part, plane) for part, plane in layer.planes]
                line = [place.index, layer.sums.data_ptr(), first, len(planes) - first]
                layers.append([*line, layer.number, *window])
        groups = [
            [
                places[place.written].index,
                int(places[place.written] in books.layers),
                int(place.written in books.poisoned),
            ]
            for place in places.values()
        ]

        def table(lines: list[list[int]], width: int) -> Tensor:
            """Upload lines of ``width`` numbers as int64 ``[len(lines), width]``."""
            flat = torch.tensor(lines, dtype=torch.int64, device="cpu")
            return flat.view(-1, width).to(device)

        return cls(
            table(groups, GROUP_FIELDS), table(layers, LAYER_FIELDS), table(planes, PLANE_FIELDS),
            len(layers), tuple(held),
        )  # fmt: skip


def _plane(part: int, plane: Plane) -> list[int]:
    """Return the fields of a plane, the part number ``part`` in its layer's checksums.

    Without an offset table strides are in bytes; with one the slot's and the elements' are 0.
    """
    size, strides = plane.cells.element_size(), plane.cells.stride()
    units, run_units = math.prod(plane.row_shape), plane.row_shape[-1]
    line = [0] * PLANE_FIELDS
    line[CELLS], line[BLOCK_STRIDE] = plane.cells.data_ptr(), strides[0] * size
    line[UNITS], line[RUN_UNITS] = units, run_units
    line[BLOCK_SIZE], line[ITEM] = plane.block_size, size
    line[PART], line[HAS_NAN] = part, int(has_nan(plane))
    if plane.offsets is not None:
        line[OFFSETS] = plane.offsets.data_ptr()
    else:
        line[SLOT_STRIDE], line[STEP] = strides[1] * size, strides[-1] * size
        line[RUN] = strides[2] * size if len(strides) == 4 else 0
    return line


def _window(layer: Watched, held: list[Tensor]) -> list[int]:
    """Return the fields of a layer's window; append its table of offsets to ``held``.

    All are 0, and nothing is appended, without a window or where the state is no floating point.
    """
    window = layer.window
    if window is None or not layer.ref.states[window.state].is_floating_point():
        return [0] * (LAYER_FIELDS - WINDOW)
    state = layer.ref.states[window.state]
    size = state.element_size()
    dims = [window.dim, *(dim for dim in range(1, state.ndim) if dim != window.dim)]
    offsets = torch.zeros((), dtype=torch.int64, device="cpu")
    for dim in dims:
        steps = torch.arange(state.shape[dim], device="cpu") * (state.stride(dim) * size)
        offsets = offsets.unsqueeze(-1) + steps
    there = offsets.reshape(state.shape[window.dim], -1).contiguous().to(state.device)
    held.append(there)
    where = [state.data_ptr(), state.stride(0) * size, there.data_ptr()]
    return [*where, *there.shape, window.length, size]
