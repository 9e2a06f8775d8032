"""The work of one program of ``paged_attention``: chosen from the shape, never from the data."""

from __future__ import annotations

from typing import Final

import attrs

from .call import AttnShape, power

#: Fewest cached rows that one program reads.
_MIN_SPLIT: Final = 64

#: Cached rows that a program reads in one step: few, so that a processor has room for four
#: programs, each with the rows of its next steps on their way from memory.
_CACHED_KEYS: Final = 32

#: Programs per processor that are worth having; beyond, each program takes more.
_WAVES: Final = 4


@attrs.frozen
class AttnTile:
    """The division of a launch's work.

    Attributes:
        rows: rows of a request per program.
        queries: query heads of these rows that the tile has room for.
        keys: cached rows that are read in one step.
        warps: warps per program.
        stages: steps whose rows are on their way from memory at once.
        splits: slices of a request's cached rows, a power of two.
    """

    rows: int
    queries: int
    keys: int
    warps: int
    stages: int
    splits: int


def tile_for(
    shape: AttnShape, pairs: int, capacity: int, processors: int, *, half: bool
) -> AttnTile:
    """Choose the tile for a shape; measured on an H200.

    A tile holds a whole request if it is short, and fits in registers. Tensor cores take 16 queries
    at a time, so each warp has 16 of its own.

    Args:
        shape: the layer and its requests.
        pairs: requests x KV heads.
        capacity: most cached rows that a row may see.
        processors: number of the device's processors.
        half: numbers are multiplied in 16 bits.
    """
    rows = min(shape.longest, max(1, 64 // shape.group))
    queries = power(rows * shape.group)
    narrow = max(power(shape.d), power(shape.dv)) <= 128
    programs = pairs * -(-shape.longest // rows)
    most, wanted = capacity // _MIN_SPLIT, _WAVES * processors // max(1, programs)
    splits = _floor_power(min(most, wanted, 64))
    few = programs * splits <= 2 * processors
    if few and half and narrow:
        # The length of a step counts: it is shortest on blocks of 64 queries, with four warps.
        return AttnTile(rows, max(64, queries), _CACHED_KEYS, 4, 4, splits)
    warps = min(8, queries // 16 * (1 if narrow else 2) * (2 if few else 1))
    return AttnTile(rows, queries, _CACHED_KEYS, warps, 3, splits)


def _floor_power(value: int) -> int:
    """Return the greatest power of two that is at most ``value``, and at least 1."""
    return 1 << (max(1, value).bit_length() - 1)
