"""What the kernels need to know about every plane, as one table on the device.

A *plan* describes planes of a cache next to the rows that move in or out of
them: addresses and strides in bytes, and how wide a word can be. It depends on
strides and alignment only, so it is built once and looked up afterwards; the
addresses of a window's rows travel apart, in an ``AddressBook``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from ..layers import Plane
from ..layout import to_device

#: Columns of a plan; the kernels number them the same way.
FIELDS: Final = (
    "cache",  # address of the plane's first cell
    "block_stride",
    "slot_stride",
    "cache_run",  # bytes from one run of a row to the next, in the cache ...
    "rows_stride",
    "rows_run",  # ... and in the staged rows
    "run_units",  # units per run: a run is contiguous, or evenly strided
    "row_units",  # units per row
    "block_size",
    "group",
    "offsets",  # address of the offset table, 0 without one
    "wide",  # 1 where a unit is a 16-byte word, else 0 and a unit is one element
    "cache_step",  # bytes from one unit of a run to the next, in the cache ...
    "rows_step",  # ... and in the staged rows
    "unit_bytes",
)

_WIDE: Final = 16

#: Units of the longest row that one line describes. A recurrent state is far longer: each of
#: its pieces has a line of its own, and with it programs of its own.
_PIECE: Final = 2048


@attrs.frozen
class RowsAt:
    """Where staged rows lie: strides in elements, and whether they start on 16 bytes."""

    stride: tuple[int, ...]
    aligned: bool


@attrs.frozen(eq=False)
class Plan:
    """Some planes, ready for the kernels.

    Attributes:
        table: int64 ``[num_planes, len(FIELDS)]`` on the device.
        num_planes: rows of the table.
        wide: whether any plane moves in 16-byte words.
        narrow: bytes of a narrow word, for the planes that do not; 0 where none.
        row_units: what all planes have in common, or 0 where they differ.
        run_units: likewise.
        block_size: likewise.
        row_bytes: of the widest plane.
        pieces: per line, the plane and the byte of its rows with which the line begins; None
            where every plane is one line.
    """

    table: Tensor
    num_planes: int
    wide: bool
    narrow: int
    row_units: int
    run_units: int
    block_size: int
    row_bytes: int
    pieces: tuple[tuple[int, int], ...] | None = None

    def spread(self, addresses: list[int]) -> list[int]:
        """Addresses of the rows of each line, from those of each plane."""
        if self.pieces is None:
            return addresses
        return [addresses[plane] + start for plane, start in self.pieces]


def most_lines(planes: Sequence[Plane]) -> int:
    """Lines that a plan of these planes has at most."""
    return sum(max(1, -(-plane.row_bytes // (_PIECE * _WIDE))) for plane in planes)


def _cut(line: dict[str, int]) -> list[tuple[int, dict[str, int]]]:
    """A line as pieces, each with the byte at which it starts; one where the row is short."""
    units = line["row_units"]
    if not line["wide"] or line["run_units"] != units or units < 2 * _PIECE:
        return [(0, line)]
    pieces = []
    for start in range(0, units, _PIECE):
        size = min(_PIECE, units - start)
        here = {"cache": line["cache"] + start * _WIDE, "row_units": size, "run_units": size}
        pieces.append((start * _WIDE, line | here))
    return pieces


def build_plan(planes: Sequence[Plane], rows: Sequence[RowsAt], groups: Sequence[int]) -> Plan:
    """Describe ``planes`` and the rows staged for them.

    Args:
        planes: the caches' sides.
        rows: the staged sides, one per plane, ``[num_rows, *row_shape]`` of the same words.
        groups: the number of each plane's group.
    """
    whole = [_line(*each) for each in zip(planes, rows, groups, strict=True)]
    cut = [(plane, *piece) for plane, line in enumerate(whole) for piece in _cut(line)]
    lines = [line for _, _, line in cut]
    device = planes[0].cells.device
    facts = torch.tensor([[line[name] for name in FIELDS] for line in lines], device="cpu")
    table = to_device(facts, device, torch.int64)
    narrow = [line["unit_bytes"] for line in lines if not line["wide"]]
    return Plan(
        table,
        len(lines),
        any(line["wide"] for line in lines),
        min(8, *narrow) if narrow else 0,
        _common(lines, "row_units"),
        _common(lines, "run_units"),
        _common(lines, "block_size"),
        max(plane.row_bytes for plane in planes),
        tuple((plane, start) for plane, start, _ in cut) if len(cut) > len(whole) else None,
    )


def _common(lines: Sequence[dict[str, int]], name: str) -> int:
    values = {line[name] for line in lines}
    return values.pop() if len(values) == 1 else 0


def _line(plane: Plane, rows: RowsAt, group: int) -> dict[str, int]:
    """One plane's line of the table."""
    size = plane.cells.dtype.itemsize
    line = dict.fromkeys(FIELDS, 0)
    line.update(
        cache=plane.cells.data_ptr(),
        block_stride=plane.cells.stride(0) * size,
        rows_stride=rows.stride[0] * size,
        block_size=plane.block_size,
        group=group,
        unit_bytes=size,
    )
    inner = plane.row_shape[-1]
    runs = math.prod(plane.row_shape[:-1])
    rows_run = rows.stride[1] * size if len(rows.stride) == 3 else 0
    rows_step = rows.stride[-1] * size
    if plane.offsets is not None:
        line.update(
            offsets=plane.offsets.data_ptr(),
            run_units=inner,
            row_units=runs * inner,
            rows_run=rows_run,
            rows_step=rows_step,
        )
        return line
    strides = plane.cells.stride()
    cache_run = strides[2] * size if len(strides) == 4 else 0
    cache_step = strides[-1] * size
    line["slot_stride"] = strides[1] * size
    contiguous = (rows_step == size and cache_step == size) or inner == 1
    unit = size
    if contiguous:
        if runs == 1 or rows_run == cache_run == inner * size:
            inner, runs, rows_run, cache_run = inner * runs, 1, 0, 0
        places = (
            inner * size,
            line["cache"],
            line["block_stride"] if plane.cells.shape[0] > 1 else 0,
            line["slot_stride"] if plane.block_size > 1 else 0,
            cache_run,
            line["rows_stride"],
            rows_run,
            0 if rows.aligned else size,
        )
        unit = math.gcd(_WIDE, *places)
        inner, rows_step, cache_step = inner * size // unit, unit, unit
    line.update(
        run_units=inner,
        row_units=runs * inner,
        cache_run=cache_run,
        rows_run=rows_run,
        cache_step=cache_step,
        rows_step=rows_step,
        unit_bytes=unit,
        wide=int(unit == _WIDE),
    )
    return line


class AddressBook:
    """Hands a window's row addresses to the device, without waiting for it.

    A ring of pinned pages feeds one device table per launch in stream order. Before a page is
    written again, its last copy must have been made; where the host is so far ahead that
    it has not, a fresh page is taken instead of waiting.

    Args:
        size: addresses per window.
        device: where the kernels run.
    """

    _PAGES: Final = 64

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._cuda = device.type == "cuda"
        self._next = 0
        self.table = torch.zeros(size, dtype=torch.int64, device=device)
        self._pages = [_Page(size, self._cuda) for _ in range(self._PAGES if self._cuda else 1)]
        self._kept: list[_Page] = []
        self._last: tuple[int, ...] | None = None
        #: Counts uploads; a table is as it was for as long as this is.
        self.version = 0

    def write(self, addresses: Sequence[int]) -> Tensor:
        """The device table that holds ``addresses`` for launches made from now on."""
        wanted = tuple(addresses)
        if self.capturing:
            return self._pinned_for_graph(wanted)
        if wanted != self._last:
            self._page().send(wanted, self.table)
            self._last = wanted
            self.version += 1
        return self.table

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured, which gets tables of its own."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _page(self) -> _Page:
        self._next = (self._next + 1) % len(self._pages)
        page = self._pages[self._next]
        if page.busy():
            page = self._pages[self._next] = _Page(self._size, self._cuda)
        return page

    def _pinned_for_graph(self, addresses: tuple[int, ...]) -> Tensor:
        """A table of its own: a captured copy reads its page again at every replay."""
        page = _Page(self._size, pinned=True)
        table = torch.empty_like(self.table)
        page.send(addresses, table)
        self._kept.append(page)
        return table


class _Page:
    """Host memory for one upload."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._cells = (ctypes.c_int64 * size).from_address(self._host.data_ptr())
        self._sent = torch.cuda.Event() if pinned else None

    def busy(self) -> bool:
        """Whether the last upload may still be under way."""
        return self._sent is not None and not self._sent.query()

    def send(self, addresses: tuple[int, ...], table: Tensor) -> None:
        self._cells[: len(addresses)] = list(addresses)
        table.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
