"""Launches of the kernels: their constants, and the sizes of their tiles."""

from __future__ import annotations

from typing import Final

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import LayerError
from .advance_kernel import advance_rows
from .layers import DeltaLayers
from .rows import DeltaRows
from .verify_kernel import verify_rows

#: The most rows of a request: keys and queries of all of them are one operand of tensor cores.
MOST_ROWS: Final = 16

_TYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@attrs.frozen
class Tile:
    """The size of a program.

    Attributes:
        values: rows of a head's state, a power of two.
        warps: of 32 threads each. In one warp, the verify kernel moves nothing between threads.
    """

    values: int
    warps: int = 1


#: By dtype of the states. The fastest ones for Qwen3.5's layer from 32 requests on, on an H200; at
#: one and at 8 requests others take up to a tenth less of the verify kernel's time.
_VERIFY: Final = {torch.float32: Tile(32), torch.bfloat16: Tile(64)}
_ADVANCE: Final = {torch.float32: Tile(8), torch.bfloat16: Tile(16)}


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
    """Launch ``verify_rows``.

    Args:
        given: query, key, value, a, b, A_log and dt_bias.
        state: as for ``step.verify_gated_delta``, like all that follow.
        sources: the slots.
        starts: the first rows.
        out: room for the outputs.
        kept: room for the staged rows.
        scale: factor of the queries.
        normalise: divide queries and keys by their length.
        longest: the most rows of a request; None is all rows of ``out``.
        tile: None takes the fastest one.

    Raises:
        LayerError: a request may have more than ``MOST_ROWS`` rows.
    """
    longest = _longest("verify_gated_delta", longest, out.shape[0])
    query, key = given[:2]
    _, heads, value_size, key_size = state.shape
    tile = tile or _VERIFY[state.dtype]
    run = 16 // state.dtype.itemsize
    width = max(4 * run, _power(key_size))
    runs = (
        *(state.data_ptr() % 16 == 0, state.stride(0) % run == 0, key_size % run == 0),
        *(part.data_ptr() % (run * part.dtype.itemsize) == 0 for part in (query, key)),
        *(part.stride(0) % run == 0 for part in (query, key)),
    )
    values = min(tile.values, max(16, _power(value_size)))
    grid = triton.cdiv(value_size, values) * heads, sources.shape[0]
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
        COLUMNS=max(4, _power(longest)),
        RUN=run,
        ALIGNED=all(runs),
        NORMALISE=normalise,
        num_warps=tile.warps,
    )


def launch_advance(
    layers: DeltaLayers,
    sources: Tensor,
    count: Tensor,
    starts: Tensor,
    boundary: Tensor | None,
    beyond: Tensor | None,
    *,
    longest: int | None,
    tile: Tile | None = None,
) -> None:
    """Launch ``advance_rows``; arguments as for ``step.advance_gated_delta``.

    Args:
        layers: the layers.
        sources: the slots.
        count: the kept rows.
        starts: the first rows.
        boundary: the rows until a boundary.
        beyond: the slots beyond it.
        longest: the most rows of a request; None is all rows for which there is room.
        tile: None takes the fastest one.

    Raises:
        LayerError: a request may have more than ``MOST_ROWS`` rows.
    """
    longest = _longest("advance_gated_delta", longest, layers.rows[0].num_rows)
    state = layers.states[0]
    _, heads, value_size, key_size = state.shape
    tile = tile or _ADVANCE[state.dtype]
    run = 16 // state.dtype.itemsize
    values = min(tile.values, _power(value_size))
    grid = triton.cdiv(value_size, values) * heads, sources.shape[1], len(layers.states)
    advance_rows[grid](
        layers.table,
        sources,
        count,
        starts,
        count if boundary is None else boundary,
        count if beyond is None else beyond,
        sources.stride(1),
        sources.stride(0),
        STATE=_TYPES[state.dtype],
        KEY_HEADS=layers.rows[0].key.shape[1],
        HEADS=heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEYS=_power(key_size),
        VALUES=values,
        LONGEST=longest,
        RUN=1 if key_size % run else run,
        CROSSES=beyond is not None,
        num_warps=tile.warps,
    )


def _longest(operation: str, given: int | None, rows: int) -> int:
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


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
