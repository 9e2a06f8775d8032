"""How much one program of ``move_rows`` moves: chosen from the shape, never from the data."""

from __future__ import annotations

from typing import Final

import attrs

from .pointer_table import Plan

#: Fewest units a step of a program covers: enough that a row takes one step, or few.
_MIN_COLS: Final = 16
_MAX_COLS: Final = 128


#: Loads that each thread has under way at once.
_UNITS_PER_THREAD: Final = 8


#: Up to here, smaller programs: what counts is how soon the last one starts.
_FEW_ROWS: Final = 128


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
    cols = _columns(plan)
    if programs == 1:  # interpreted: every step costs the same, whatever its size
        rows = min(64, 1 << max(0, num_rows - 1).bit_length())
        return Tile(1, rows, cols, chunk, 4, once=num_rows <= rows)
    warps = 1 if num_rows <= _FEW_ROWS else 4
    rows = max(1, 32 * warps * _UNITS_PER_THREAD // cols)
    steps = -(-num_rows // rows)
    at_once = programs // plan.num_planes
    return Tile(max(1, min(steps, at_once)), rows, cols, chunk, warps, once=steps <= at_once)


def _columns(plan: Plan) -> int:
    """Units per step: a power of two that wastes few lanes on this row size."""
    if not plan.wide or not plan.row_units:
        return _MAX_COLS
    whole = plan.row_units & -plan.row_units
    if whole >= _MIN_COLS:
        return min(whole, _MAX_COLS)
    return min(_MAX_COLS, 1 << (plan.row_units - 1).bit_length())
