"""Everything that ``move_rows`` knows about planes, as one table on the device.

A *plane table* describes planes of the caches next to the rows that move in or out of them:
addresses and strides in bytes, and how wide a word can be. It depends on strides and alignment
only, so it is built once and looked up afterwards; the addresses of a window's rows are uploaded
apart, by an ``AddressBook``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch
import triton.language as tl
from torch import Tensor

from ...layers import Plane
from ...layout import to_device

#: Columns of a plane table. A row consists of runs, and a run of units: words that lie one behind
#: the other, or evenly apart. Strides, runs and steps are in bytes.
FIELDS: Final = (
    "cache",  # address of the plane's first cell
    "block_stride",  # in the cache, from one block to the next
    "slot_stride",  # in the cache, from one slot of a block to the next
    "cache_run",  # in the cache, from one run of a row to the next
    "rows_stride",  # in the staged rows, from one row to the next
    "rows_run",  # in the staged rows, from one run of a row to the next
    "run_units",  # units per run
    "row_units",  # units per row
    "block_size",  # slots per block
    "group",  # number of the group whose slots the plane has
    "offsets",  # address of the offset table; 0 without one
    "wide",  # 1 if a unit is a 16-byte word; else 0, and a unit is one element
    "cache_step",  # in the cache, from one unit of a run to the next
    "rows_step",  # in the staged rows, from one unit of a run to the next
    "unit_bytes",  # bytes of a unit
)

#: Columns per line, and where each stands, for kernels: ``tl.load(line + AT_BLOCK_SIZE)``.
NUM_FIELDS = tl.constexpr(len(FIELDS))
(
    AT_CACHE,
    AT_BLOCK_STRIDE,
    AT_SLOT_STRIDE,
    AT_CACHE_RUN,
    AT_ROWS_STRIDE,
    AT_ROWS_RUN,
    AT_RUN_UNITS,
    AT_ROW_UNITS,
    AT_BLOCK_SIZE,
    AT_GROUP,
    AT_OFFSETS,
    AT_WIDE,
    AT_CACHE_STEP,
    AT_ROWS_STEP,
    AT_UNIT_BYTES,
) = (tl.constexpr(column) for column in range(len(FIELDS)))

#: Bytes of a wide word.
_WIDE: Final = 16

#: A recurrent state is far longer than a row of keys: it is cut into pieces of so many units, and
#: each piece has its own line, and so its own programs.
_PIECE: Final = 2048


@attrs.frozen
class RowsAt:
    """The layout of a plane's staged rows.

    Attributes:
        stride: in elements.
        aligned: their address is a multiple of 16.
    """

    stride: tuple[int, ...]
    aligned: bool


@attrs.frozen(eq=False)
class PlaneTable:
    """Some planes, ready for the kernels.

    Attributes:
        table: int64 ``[num_lines, len(FIELDS)]`` on the device.
        num_lines: lines of the table; at least one per plane.
        wide: some line moves in 16-byte words.
        narrow: bytes of a word for the lines that do not; 0 if all do.
        row_units: of every line; 0 if they differ.
        run_units: of every line; 0 if they differ.
        block_size: of every plane; 0 if they differ.
        pieces: per line, the number of its plane and the byte of a row with which the line begins;
            None if every plane is one line.
    """

    table: Tensor
    num_lines: int
    wide: bool
    narrow: int
    row_units: int
    run_units: int
    block_size: int
    pieces: tuple[tuple[int, int], ...] | None = None

    def spread(self, addresses: list[int]) -> list[int]:
        """Turn the addresses of the planes' rows into one address for each line of the table."""
        if self.pieces is None:
            return addresses
        return [addresses[plane] + start for plane, start in self.pieces]


def most_lines(planes: Sequence[Plane]) -> int:
    """Count the lines that a table of these planes has at most."""
    return sum(max(1, -(-plane.row_bytes // (_PIECE * _WIDE))) for plane in planes)


def _cut(line: dict[str, int]) -> list[tuple[int, dict[str, int]]]:
    """Cut a line into pieces, each with the byte of a row at which it starts.

    Only a row that is one run of 16-byte words, twice ``_PIECE`` of them or more, is cut; any other
    line stays whole.
    """
    units = line["row_units"]
    if not line["wide"] or line["run_units"] != units or units < 2 * _PIECE:
        return [(0, line)]
    pieces = []
    for start in range(0, units, _PIECE):
        size = min(_PIECE, units - start)
        here = {"cache": line["cache"] + start * _WIDE, "row_units": size, "run_units": size}
        pieces.append((start * _WIDE, line | here))
    return pieces


def build_plane_table(
    planes: Sequence[Plane], rows: Sequence[RowsAt], groups: Sequence[int]
) -> PlaneTable:
    """Build the table of ``planes`` and the rows staged for them, on the device of the planes.

    Long states take several lines each.

    Args:
        planes: of the caches.
        rows: the staged rows of each plane, ``[num_rows, *row_shape]`` of the same dtype.
        groups: the number of each plane's group.
    """
    whole = [_line(*each) for each in zip(planes, rows, groups, strict=True)]
    cut = [(plane, *piece) for plane, line in enumerate(whole) for piece in _cut(line)]
    lines = [line for _, _, line in cut]
    device = planes[0].cells.device
    facts = torch.tensor([[line[name] for name in FIELDS] for line in lines], device="cpu")
    table = to_device(facts, device, torch.int64)
    narrow = [line["unit_bytes"] for line in lines if not line["wide"]]
    return PlaneTable(
        table,
        len(lines),
        any(line["wide"] for line in lines),
        min(8, *narrow) if narrow else 0,
        _common(lines, "row_units"),
        _common(lines, "run_units"),
        _common(lines, "block_size"),
        tuple((plane, start) for plane, start, _ in cut) if len(cut) > len(whole) else None,
    )


def _common(lines: Sequence[dict[str, int]], name: str) -> int:
    """Return the number that all lines have in a column; 0 if they differ."""
    values = {line[name] for line in lines}
    return values.pop() if len(values) == 1 else 0


def _line(plane: Plane, rows: RowsAt, group: int) -> dict[str, int]:
    """Describe one plane and its rows, by column: in wide words where both are contiguous.

    Elsewhere, and behind an offset table, a unit is one element.
    """
    size = plane.cells.dtype.itemsize
    line = dict.fromkeys(FIELDS, 0)
    line.update(
        cache=plane.cells.data_ptr(),
        block_stride=plane.cells.stride(0) * size,
        rows_stride=rows.stride[0] * size,
        rows_run=rows.stride[1] * size if len(rows.stride) == 3 else 0,
        rows_step=rows.stride[-1] * size,
        run_units=plane.row_shape[-1],
        row_units=math.prod(plane.row_shape),
        block_size=plane.block_size,
        group=group,
        unit_bytes=size,
    )
    if plane.offsets is not None:
        return line | {"offsets": plane.offsets.data_ptr()}
    strides = plane.cells.stride()
    line.update(
        slot_stride=strides[1] * size,
        cache_run=strides[2] * size if len(strides) == 4 else 0,
        cache_step=strides[-1] * size,
    )
    if line["rows_step"] == line["cache_step"] == size or line["run_units"] == 1:
        return _in_words(line, plane, rows)
    return line


def _in_words(line: dict[str, int], plane: Plane, rows: RowsAt) -> dict[str, int]:
    """Describe a plane in the widest words that strides and addresses allow, at most of 16 bytes.

    The runs of a row are contiguous; runs that follow each other, here and there, become one.
    """
    size = line["unit_bytes"]
    inner = line["run_units"]
    runs = line["row_units"] // inner
    rows_run, cache_run = line["rows_run"], line["cache_run"]
    if runs == 1 or rows_run == cache_run == inner * size:
        inner, runs, rows_run, cache_run = inner * runs, 1, 0, 0
    multiples = (
        inner * size,
        line["cache"],
        line["block_stride"] if plane.cells.shape[0] > 1 else 0,
        line["slot_stride"] if plane.block_size > 1 else 0,
        cache_run,
        line["rows_stride"],
        rows_run,
        0 if rows.aligned else size,
    )
    unit = math.gcd(_WIDE, *multiples)
    inner = inner * size // unit
    return line | {
        "run_units": inner,
        "row_units": runs * inner,
        "cache_run": cache_run,
        "rows_run": rows_run,
        "cache_step": unit,
        "rows_step": unit,
        "unit_bytes": unit,
        "wide": int(unit == _WIDE),
    }
