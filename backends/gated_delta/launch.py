"""Launches of the kernels: their constants, and the sizes of their tiles."""

from __future__ import annotations

from typing import Final

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import LayerError
from ..launching.kernel_call import KernelCall
from .advance_kernel import advance_rows
from .layers import DeltaLayers, DeltaRows
from .verify_kernel import verify_rows

#: The most rows of a request: keys and queries of all of them are one operand of tensor cores.
MOST_ROWS: Final = 16

_TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@attrs.frozen
class Tile:
    """The size of a kernel's program: the rows, tiles and warps that it takes at once.

    Attributes:
        values: rows of a head's state, a power of two.
        warps: of 32 threads each. In one warp, the verify kernel moves nothing between threads.
        tiles: tiles that a program takes, one after another.
        stages: in the verify kernel, tiles that are loaded before they are needed, and one more.
        registers: the most registers of a thread; None lets the compiler choose.
    """

    values: int
    warps: int = 1
    tiles: int = 1
    stages: int = 1
    registers: int | None = None


#: From so many bytes of states in a launch on, the verify kernel's programs take several tiles
#: each and load ahead: enough programs are left for every multiprocessor of an H100 or H200.
_MANY_BYTES: Final = 32 << 20

#: By dtype of the states: the fastest ones for Qwen3.5's layer at 1 to 16 requests, at 16 (float32)
#: or 32 (bfloat16) and more, and in commits; on an H200, with 4 and with 7 drafts, at
#: 7a8dcc8a663d. float16 was not timed, and takes the tiles of bfloat16.
_VERIFY_FEW: Final = {
    torch.float32: Tile(16),
    **dict.fromkeys((torch.bfloat16, torch.float16), Tile(32)),
}
_VERIFY_MANY: Final = {
    torch.float32: Tile(16, tiles=8, stages=3),
    **dict.fromkeys((torch.bfloat16, torch.float16), Tile(16, tiles=8, stages=3, registers=128)),
}
_ADVANCE: Final = {
    torch.float32: Tile(8, tiles=2),
    **dict.fromkeys((torch.bfloat16, torch.float16), Tile(16, warps=2)),
}


def verify_tile_for(state: Tensor, requests: int) -> Tile:
    """Choose the verify kernel's tile, by what the host knows of a launch.

    Args:
        state: ``[slots, heads, value_size, key_size]``.
        requests: their number; in a captured graph, those for which there is room.
    """
    size = state[0].numel() * state.element_size()
    return (_VERIFY_MANY if requests * size >= _MANY_BYTES else _VERIFY_FEW)[state.dtype]


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
    tile = tile or _ADVANCE[state.dtype]
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
    """Return the most rows of a request: those given, or all for which there is room.

    Raises:
        LayerError: they are more than ``MOST_ROWS``.
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
