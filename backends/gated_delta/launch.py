"""Launches of the kernels, and their constants."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import LayerError
from ..launching.kernel_call import KernelCall
from .advance_kernel import advance_rows
from .layers import DeltaLayers, DeltaRows
from .tile_sizes import ADVANCE, Tile, verify_tile_for
from .verify_kernel import verify_rows

#: The most rows of a request: keys and queries of all of them are one operand of tensor cores.
MOST_ROWS: Final = 16

_TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def launch_verify(
    given: tuple[Tensor, ...],
    state: Tensor,
    sources: Tensor,
    starts: Tensor,
    out: Tensor,
    kept: DeltaRows,
    *,
    scale: float,
    normalise: bool,
    longest: int | None,
    tile: Tile | None = None,
) -> None:
    """Launch ``verify_rows``; arguments as for ``step.verify_gated_delta``.

    ``given`` are those from ``query`` to ``dt_bias``; without a ``tile``, ``verify_tile_for``
    chooses one.

    Raises:
        LayerError: a request may have more than ``MOST_ROWS`` rows.
    """
    longest = longest_of("verify_gated_delta", longest, out.shape[0])
    query, key = given[:2]
    _, heads, value_size, key_size = state.shape
    tile = tile or verify_tile_for(state, sources.shape[0])
    run = 16 // state.dtype.itemsize
    width = max(4 * run, power_of_two(key_size))
    runs = (
        *(state.data_ptr() % 16 == 0, state.stride(0) % run == 0, key_size % run == 0),
        *(part.data_ptr() % (run * part.dtype.itemsize) == 0 for part in (query, key)),
        *(part.stride(0) % run == 0 for part in (query, key)),
    )
    values = min(tile.values, max(16, power_of_two(value_size)))
    tiles = min(tile.tiles, triton.cdiv(value_size, values))
    grid = triton.cdiv(value_size, values * tiles) * heads, sources.shape[0]
    verify_rows[grid](
        *given,
        state,
        sources,
        starts,
        out,
        *(kept.key, kept.corrected, kept.decay),
        scale,
        *(part.stride(0) for part in given[:5]),
        state.stride(0),
        out.stride(0),
        sources.stride(0),
        KEY_HEADS=key.shape[1],
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEYS=width,
        VALUES=values,
        LONGEST=longest,
        COLUMNS=max(4, power_of_two(longest)),
        RUN=run,
        ALIGNED=all(runs),
        NORMALISE=normalise,
        TILES=tiles,
        STAGES=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )


def launch_advance(
    layers: DeltaLayers,
    sources: Tensor,
    count: Tensor,
    starts: Tensor,
    boundary: Tensor | None,
    snapshots: Tensor | None,
    *,
    longest: int | None,
    tile: Tile | None = None,
) -> None:
    """Launch ``advance_rows``; arguments as for ``step.advance_gated_delta``.

    ``tile`` is the fastest one unless it is given.

    Raises:
        LayerError: a request may have more than ``MOST_ROWS`` rows.
    """
    where = layers, sources, count, starts, boundary, snapshots
    advance_call(*where, longest=longest, tile=tile).run()


def advance_call(
    layers: DeltaLayers,
    sources: Tensor,
    count: Tensor,
    starts: Tensor,
    boundary: Tensor | None,
    snapshots: Tensor | None,
    *,
    longest: int | None,
    tile: Tile | None = None,
    least: int = 0,
) -> KernelCall:
    """Arrange the launch of ``advance_rows``; arguments as for ``launch_advance``.

    Each request keeps ``least`` rows in any case, as far as it has them.

    Raises:
        LayerError: a request may have more than ``MOST_ROWS`` rows.
    """
    longest = longest_of("advance_gated_delta", longest, layers.rows[0].num_rows)
    state = layers.states[0]
    _, heads, value_size, key_size = state.shape
    tile = tile or ADVANCE[state.dtype]
    run = 16 // state.dtype.itemsize
    values = min(tile.values, power_of_two(value_size))
    tiles = min(tile.tiles, triton.cdiv(value_size, values))
    programs = triton.cdiv(value_size, values * tiles) * heads
    arguments = {
        "table": layers.table,
        "sources": sources,
        "count": count,
        "starts": starts,
        "boundary": count if boundary is None else boundary,
        "snapshots": count if snapshots is None else snapshots,
        "source_stride": sources.stride(1),
        "group_stride": sources.stride(0),
        "snapshot_stride": 0 if snapshots is None else snapshots.stride(0),
        "STATE": _TYPES[state.dtype],
        "KEY_HEADS": layers.rows[0].key.shape[1],
        "HEADS": heads,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "KEYS": power_of_two(key_size),
        "VALUES": values,
        "LONGEST": longest,
        "RUN": 1 if key_size % run else run,
        "SNAPSHOTS": snapshots is not None,
        "TILES": tiles,
        "LEAST": least,
    }
    grid = programs, sources.shape[1], len(layers.states)
    return KernelCall(advance_rows, grid, arguments, tile.warps, {"maxnreg": tile.registers})


def longest_of(operation: str, given: int | None, rows: int) -> int:
    """Return the most rows of a request: ``given``, or ``rows`` if that is None, but at least 1.

    Raises:
        LayerError: it is more than ``MOST_ROWS``.
    """
    longest = max(1, rows) if given is None else given
    if longest > MOST_ROWS:
        raise LayerError(
            operation,
            "a request may have too many rows",
            expected=f"longest, at most {MOST_ROWS}",
            got=longest,
            hint="pass longest=1 + the most drafts of a request",
        )
    return longest


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()
