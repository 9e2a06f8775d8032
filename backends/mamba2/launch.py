"""Launches of the kernel: its constants, and the sizes of its tiles."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from ..gated_delta.launch import Tile, longest_of, power_of_two, tile_by_bytes
from ..gated_delta.rows import DeltaRows
from .verify_kernel import verify_rows

#: From so many bytes of float32 states in a launch on, programs take several tiles each and load
#: ahead: enough programs are left for every multiprocessor of an H100 or H200.
_MANY_BYTES: Final = 64 << 20

#: By dtype of the states: the fastest ones for Nemotron-H's layer on an H200, with 4 drafts, at 1
#: to 8 requests, and at 16 and more. float16 was not timed, and takes those of bfloat16.
_FEW: Final = {
    torch.float32: Tile(16),
    **dict.fromkeys((torch.bfloat16, torch.float16), Tile(32)),
}
_MANY: Final = {**_FEW, torch.float32: Tile(32, tiles=4, stages=2)}


def verify_tile_for(state: Tensor, requests: int) -> Tile:
    """Choose the kernel's tile for a state ``[slots, heads, head_size, state_size]``."""
    return tile_by_bytes(state, requests, _FEW, _MANY, _MANY_BYTES)


def launch_verify(
    given: tuple[Tensor, ...],
    state: Tensor,
    sources: Tensor,
    starts: Tensor,
    out: Tensor,
    kept: DeltaRows,
    *,
    longest: int | None,
    tile: Tile | None = None,
) -> None:
    """Launch ``verify_rows``.

    Args:
        given: x, dt, B, C, A, D and dt_bias.
        state: as for ``step.verify_mamba2``, like all that follow.
        sources: the slots.
        starts: the first rows.
        out: room for the outputs.
        kept: room for the staged rows.
        longest: the most rows of a request; None is all rows of ``out``.
        tile: None takes that of ``verify_tile_for``.

    Raises:
        LayerError: a request may have too many rows.
    """
    longest = longest_of("verify_mamba2", longest, out.shape[0])
    _, _, b, c = given[:4]
    _, heads, head_size, state_size = state.shape
    groups = b.shape[1]
    tile = tile or verify_tile_for(state, sources.shape[0])
    run = 16 // state.dtype.itemsize
    runs = (
        *(state.data_ptr() % 16 == 0, state.stride(0) % run == 0, state_size % run == 0),
        *(part.data_ptr() % (run * part.dtype.itemsize) == 0 for part in (b, c)),
        *(part.stride(0) % run == 0 for part in (b, c)),
    )
    values = min(tile.values, max(16, power_of_two(head_size)))
    of_group = triton.cdiv(head_size, values) * (heads // groups)
    tiles = max(count for count in range(1, tile.tiles + 1) if of_group % count == 0)
    verify_rows[of_group // tiles * groups, sources.shape[0]](
        *given,
        state,
        sources,
        starts,
        out,
        *(kept.key, kept.corrected, kept.decay),
        *(part.stride(0) for part in given[:4]),
        state.stride(0),
        out.stride(0),
        sources.stride(0),
        GROUPS=groups,
        HEADS=heads,
        STATE_SIZE=state_size,
        HEAD_SIZE=head_size,
        KEYS=max(4 * run, power_of_two(state_size)),
        VALUES=values,
        LONGEST=longest,
        COLUMNS=max(8, power_of_two(longest)),
        RUN=run,
        ALIGNED=all(runs),
        TILES=tiles,
        STAGES=tile.stages,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
