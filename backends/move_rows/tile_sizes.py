"""The work of one program of ``move_rows``: chosen from the shape, never from the data."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import attrs

from .plane_table import PlaneTable

#: Fewest units that a step of a program covers.
_MIN_COLS: Final = 16

#: Most units that a step covers in a small window, and in any other.
_WIDEST: Final = 128
_MAX_COLS: Final = 64

#: Windows of up to so many rows are small; windows of more than so many are large.
_FEW_ROWS: Final = 128
_MANY_ROWS: Final = 256

#: Rows of a step in a large window.
_STEP_ROWS: Final = 64


@attrs.frozen
class MoveTile:
    """The division of a launch's work.

    Attributes:
        programs: programs per line of the plane table.
        rows: rows per step of a program.
        cols: 16-byte units (or narrow words) per step.
        chunk: slots per step of the range check.
        warps: warps per program.
        once: no program has more than one step.
        tail: units of a row beyond ``cols`` that are moved in the same step; else 0.
    """

    programs: int
    rows: int
    cols: int
    chunk: int
    warps: int
    once: bool
    tail: int = 0


@lru_cache(maxsize=1024)
def tile_for(planes: PlaneTable | None, num_rows: int, programs: int) -> MoveTile:
    """Choose the tile for a window; measured on an H200.

    Args:
        planes: the planes; None if a launch only counts.
        num_rows: rows of the window.
        programs: how many programs fill the GPU; 1 without a GPU.
    """
    few = num_rows <= _FEW_ROWS
    chunk = 128 if few else 512
    if planes is None:
        return MoveTile(1, 1, _MIN_COLS, chunk, 4, once=False)
    cols, tail = _columns(planes, num_rows)
    if programs == 1:  # interpreted: a step costs the same, however large it is
        rows = min(64, 1 << max(0, num_rows - 1).bit_length())
        return MoveTile(1, rows, cols, chunk, 4, once=num_rows <= rows, tail=tail)
    whole = planes.wide and planes.row_units > 0 and planes.row_units % _MIN_COLS == 0
    large = planes.num_lines * -(-num_rows // _STEP_ROWS)
    if whole and num_rows > _MANY_ROWS and large >= programs // 5:
        # Every program checks every slot, so few programs take many rows each, as long as there
        # are two for each processor.
        cols, warps, units = _MIN_COLS, 8, 4
    else:
        warps, units = (1, 8) if few else (4, 4 if cols <= _MAX_COLS else 8)
    rows = max(1, 32 * warps * units // cols)
    steps = -(-num_rows // rows)
    at_once = programs * (2 if few else 4) // planes.num_lines
    taken = max(1, min(steps, at_once))
    return MoveTile(taken, rows, cols, chunk, warps, once=steps <= at_once, tail=tail)


def _columns(planes: PlaneTable, num_rows: int) -> tuple[int, int]:
    """Return the units of a step, a power of two that leaves few lanes idle, and the tail.

    The tail is the rest of a row that the same step moves, such as a latent's rotary part; else 0.
    """
    units = planes.row_units
    if not planes.wide or not units:
        return _WIDEST, 0
    whole = units & -units
    if whole >= _MIN_COLS:
        if num_rows <= _FEW_ROWS:
            return min(whole, _WIDEST), 0
        return min(max(whole // 2, _MIN_COLS), _MAX_COLS), 0
    most = 1 << (units.bit_length() - 1)
    if most <= _WIDEST and units - most == whole and planes.run_units == units:
        return most, whole  # two pieces of a row, such as a latent's and its rotary part's
    return min(_WIDEST, 1 << (units - 1).bit_length()), 0
