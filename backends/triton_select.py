"""Which rows of a window a launch moves, worked out on the device.

Nothing here reads a row or a cache: only the layout, the acceptance, and slots.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

#: Which rows a launch moves.
ALL: Final = 0
SETTLED: Final = 1
DRAFT: Final = 2
KEPT: Final = 3
REJECTED: Final = 4

#: What ``accepted`` is.
NOTHING: Final = 0
COUNTS: Final = 1
MASK: Final = 2
#: Tokens sampled per request: the accepted drafts and one more.
SAMPLED: Final = 3
#: The sampled ids themselves; those that are no placeholder and below the vocabulary's size.
IDS: Final = 4


@triton.jit
def selected(
    rows: tl.tensor,
    live: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    columns: tl.tensor,
    placeholder: tl.tensor,
    vocabulary: tl.tensor,
    per_request: tl.tensor,
    settled: tl.tensor,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
) -> tl.tensor:
    """Which of ``rows`` a launch moves; counts out of range clamp by comparison."""
    owner = rows // per_request
    where = rows - owner * per_request - settled
    if not UNIFORM:
        where = tl.load(position + rows, mask=live, other=-1)
    chosen = live
    if SELECT == 1:
        chosen = live & (where < 0)
    if SELECT >= 2:
        chosen = live & (where >= 0)
    if SELECT >= 3:
        if ACCEPT == 2:
            kept = tl.load(accepted + rows, mask=live, other=0) != 0
        else:
            if not UNIFORM:
                owner = tl.load(request + rows, mask=live, other=0)
            if ACCEPT == 4:
                count = where * 0
                for column in range(columns):
                    token = tl.load(accepted + owner * columns + column, mask=live, other=0)
                    real = (token != placeholder) & (token < vocabulary)
                    count += real.to(count.dtype)
            else:
                count = tl.load(accepted + owner, mask=live, other=0)
            kept = where < count - (1 if ACCEPT >= 3 else 0)
        chosen = chosen & kept if SELECT == 3 else chosen & (kept == 0)
    return chosen


@triton.jit
def overtaken(
    rows: tl.tensor,
    chosen: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    reuse: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    placeholder: tl.tensor,
    vocabulary: tl.tensor,
    per_request: tl.tensor,
    settled: tl.tensor,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
) -> tl.tensor:
    """Which of ``chosen`` have the slot of a later row that is selected as well, int32.

    Of a ring or a state only the last selected row is written. Two rows of a request may share
    a slot where they lie a multiple of ``reuse`` apart, so that is where this looks, until no
    row of a program has a successor in its request: not at all where the ring is longer than a
    request's rows, and never where ``reuse`` is 0.

    Pointers and rows:
        rows: int ``[ROWS]``.
        chosen: bool ``[ROWS]``, rows that the launch selects.
        slot: int64 ``[ROWS]``, their slots.
        slots: int64 ``[num_rows]``, the slots of the group.
        reuse: of the group, see ``kvtxn.layers.Kind``.
    """
    if UNIFORM:
        owner = rows // per_request
    else:
        owner = tl.load(request + rows, mask=chosen, other=-1).to(tl.int32)
    alive = (chosen & (slot >= 0)).to(tl.int32) * (reuse > 0).to(tl.int32)
    taken = alive * 0
    later = rows
    going = tl.max(alive, axis=0)
    while going > 0:
        later += reuse.to(tl.int32)
        there = (alive != 0) & (later < num_rows)
        if UNIFORM:
            theirs = later // per_request
        else:
            theirs = tl.load(request + later, mask=there, other=-2).to(tl.int32)
        there = there & (theirs == owner)
        same = tl.load(slots + later, mask=there, other=-1) == slot
        too = selected(
            later, there, request, position, accepted, columns, placeholder, vocabulary,
            per_request, settled, SELECT, ACCEPT, UNIFORM,
        )  # fmt: skip
        taken = taken | (too & same).to(tl.int32)
        alive = there.to(tl.int32)
        going = tl.max(alive, axis=0)
    return taken
