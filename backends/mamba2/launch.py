"""The launch of the kernel: its constants, and the size of its programs."""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

from ..gated_delta.launch import longest_of, power_of_two
from ..gated_delta.layers import DeltaRows
from .verify_kernel import verify_rows

#: Rows of a head's state in a program of one warp. Of the sizes that were timed for Nemotron-H's
#: layer on an H200 (16, 32 and 64 rows; one, two, four and eight such tiles in a program, loaded
#: ahead or not), this one was the fastest with float32 states for 1 to 128 requests, and within
#: 7 % of the fastest with bfloat16.
_VALUES: Final = 16


def launch_verify(
    given: tuple[Tensor, ...],
    state: Tensor,
    sources: Tensor,
    starts: Tensor,
    out: Tensor,
    kept: DeltaRows,
    *,
    longest: int | None,
) -> None:
    """Launch ``verify_rows``; arguments as for ``step.verify_mamba2``, ``x`` to ``dt_bias`` in one.

    Raises:
        LayerError: a request may have too many rows.
    """
    longest = longest_of("verify_mamba2", longest, out.shape[0])
    _, _, b, c = given[:4]
    _, heads, head_size, state_size = state.shape
    groups = b.shape[1]
    run = 16 // state.dtype.itemsize
    runs = (
        *(state.data_ptr() % 16 == 0, state.stride(0) % run == 0, state_size % run == 0),
        *(part.data_ptr() % (run * part.dtype.itemsize) == 0 for part in (b, c)),
        *(part.stride(0) % run == 0 for part in (b, c)),
    )
    verify_rows[triton.cdiv(head_size, _VALUES) * heads, sources.shape[0]](
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
        VALUES=_VALUES,
        LONGEST=longest,
        COLUMNS=max(8, power_of_two(longest)),
        RUN=run,
        ALIGNED=all(runs),
        num_warps=1,
    )
