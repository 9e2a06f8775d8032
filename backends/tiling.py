"""How much one program of ``move_rows`` moves: chosen from the shape, never from the data."""

from __future__ import annotations

from typing import Final

import attrs

from .pointer_table import Plan

#: Fewest units a step of a program covers, and most in a window of many rows.
_MIN_COLS: Final = 16
_MAX_COLS: Final = 32

#: Most where rows are few, or no multiple of the least, or of narrow words.
_WIDEST: Final = 128


#: Windows of so many rows count as small, and beyond so many as large.
_FEW_ROWS: Final = 128
_MANY_ROWS: Final = 1024


@attrs.frozen
class Tile:
    """A launch's shape.

    Attributes:
        programs: programs per plane.
        rows: rows per step of a program.
        cols: 16-byte units (or narrow words) per step.
        chunk: slots per step of the range check.
        warps: warps per program.
        once: no program has more than one step.
    """

    programs: int
    rows: int
    cols: int
    chunk: int
    warps: int
    once: bool


def tile_for(plan: Plan | None, num_rows: int, programs: int) -> Tile:
    """The tile for a window.

    Args:
        plan: the planes; None where a launch only counts.
        num_rows: rows of the window.
        programs: how many programs fill the device; 1 where there is none.
    """
    chunk = 128 if num_rows <= 128 else 1024
    if plan is None:
        return Tile(1, 1, _MIN_COLS, chunk, 4, once=False)
    few = num_rows <= _FEW_ROWS
    cols = _columns(plan, _WIDEST if few else _MAX_COLS)
    if programs == 1:  # interpreted: every step costs the same, whatever its size
        rows = min(64, 1 << max(0, num_rows - 1).bit_length())
        return Tile(1, rows, cols, chunk, 4, once=num_rows <= rows)
    warps, units = _shape_of_steps(num_rows, cols)
    rows = max(1, 32 * warps * units // cols)
    steps = -(-num_rows // rows)
    at_once = programs * (2 if few else 1) // plan.num_planes
    return Tile(max(1, min(steps, at_once)), rows, cols, chunk, warps, once=steps <= at_once)


def _shape_of_steps(num_rows: int, cols: int) -> tuple[int, int]:
    """Warps, and loads that each thread has under way at once; measured on an H200.

    Few rows: what counts is how soon the last program starts. Many: a step covers more rows
    than it keeps, so that small steps leave fewer threads without work.
    """
    if num_rows <= _FEW_ROWS:
        return 1, 8
    return (4 if num_rows <= _MANY_ROWS else 8), (4 if cols <= _MAX_COLS else 8)


def _columns(plan: Plan, most: int) -> int:
    """Units per step: a power of two that wastes few lanes on this row size."""
    if not plan.wide or not plan.row_units:
        return _WIDEST
    whole = plan.row_units & -plan.row_units
    if whole >= _MIN_COLS:
        return min(whole, most)
    return min(_WIDEST, 1 << (plan.row_units - 1).bit_length())
