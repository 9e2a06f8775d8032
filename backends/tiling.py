"""How much one program of ``move_rows`` moves: chosen from the shape, never from the data."""

from __future__ import annotations

from typing import Final

import attrs

from .pointer_table import Plan

#: Fewest units a step of a program covers, and most: where rows are few, and elsewhere.
_MIN_COLS: Final = 16
_WIDEST: Final = 128
_MAX_COLS: Final = 64

#: Windows of so many rows count as small, and beyond so many as large.
_FEW_ROWS: Final = 128
_MANY_ROWS: Final = 256

#: Rows of a step in a large window.
_STEP_ROWS: Final = 64


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
        tail: units of a row beyond ``cols``, where those are taken in the same step; else 0.
    """

    programs: int
    rows: int
    cols: int
    chunk: int
    warps: int
    once: bool
    tail: int = 0


def tile_for(plan: Plan | None, num_rows: int, programs: int) -> Tile:
    """The tile for a window.

    Args:
        plan: the planes; None where a launch only counts.
        num_rows: rows of the window.
        programs: how many programs fill the device; 1 where there is none.
    """
    few = num_rows <= _FEW_ROWS
    chunk = 128 if few else 512
    if plan is None:
        return Tile(1, 1, _MIN_COLS, chunk, 4, once=False)
    cols, tail = _columns(plan, num_rows)
    if programs == 1:  # interpreted: every step costs the same, whatever its size
        rows = min(64, 1 << max(0, num_rows - 1).bit_length())
        return Tile(1, rows, cols, chunk, 4, once=num_rows <= rows, tail=tail)
    whole = plan.wide and plan.row_units > 0 and plan.row_units % _MIN_COLS == 0
    large = plan.num_planes * -(-num_rows // _STEP_ROWS)
    if whole and num_rows > _MANY_ROWS and large >= programs // 5:
        # Every program looks at every slot: few programs with many rows each, as long as there
        # are two for each processor.
        cols, warps, units = _MIN_COLS, 8, 4
    else:
        warps, units = (1, 8) if few else (4, 4 if cols <= _MAX_COLS else 8)
    rows = max(1, 32 * warps * units // cols)
    steps = -(-num_rows // rows)
    at_once = programs * (2 if few else 4) // plan.num_planes
    taken = max(1, min(steps, at_once))
    return Tile(taken, rows, cols, chunk, warps, once=steps <= at_once, tail=tail)


def _columns(plan: Plan, num_rows: int) -> tuple[int, int]:
    """Units per step, a power of two that wastes few lanes on this row size, and the tail."""
    units = plan.row_units
    if not plan.wide or not units:
        return _WIDEST, 0
    whole = units & -units
    if whole >= _MIN_COLS:
        if num_rows <= _FEW_ROWS:
            return min(whole, _WIDEST), 0
        return min(max(whole // 2, _MIN_COLS), _MAX_COLS), 0
    most = 1 << (units.bit_length() - 1)
    if most <= _WIDEST and units - most == whole and plan.run_units == units:
        return most, whole  # two pieces of a row, such as a latent's and its rotary part's
    return min(_WIDEST, 1 << (units - 1).bit_length()), 0
