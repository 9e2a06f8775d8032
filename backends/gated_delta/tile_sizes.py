"""Sizes of the kernels' programs, chosen by what the host knows of a launch."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor


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
#: Of commits, by dtype of the states, as said above.
ADVANCE: Final = {
    torch.float32: Tile(8, tiles=2),
    **dict.fromkeys((torch.bfloat16, torch.float16), Tile(16, warps=2)),
}


def verify_tile_for(state: Tensor, requests: int) -> Tile:
    """Choose the verify kernel's tile, by the states' dtype and the bytes of all requests' states.

    Args:
        state: ``[slots, heads, value_size, key_size]``.
        requests: their number; in a captured graph, those for which there is room.
    """
    size = state[0].numel() * state.element_size()
    return (_VERIFY_MANY if requests * size >= _MANY_BYTES else _VERIFY_FEW)[state.dtype]
