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
#: The sampled ids themselves; placeholders and ids beyond the vocabulary count as nothing.
IDS: Final = 4
#: Nodes along the accepted path of each request's draft tree.
PATH: Final = 5


@triton.jit
def path_sources(
    rows: tl.tensor,
    live: tl.tensor,
    owner: tl.tensor,
    where: tl.tensor,
    path: tl.tensor,
    columns: tl.tensor,
    trees: tl.tensor,
    depth: tl.tensor,
) -> tl.tensor:
    """By place, the row that the accepted path puts there; -1 where it puts none.

    The node that the path names for a place is taken if the path up to it is that node's own way
    from the root; so a path that leaves its tree is cut there, whatever comes after.

    Pointers and rows:
        rows: int ``[ROWS]``, places.
        live: bool ``[ROWS]``.
        owner: int ``[ROWS]``, their requests.
        where: int ``[ROWS]``, their numbers among the request's drafts, negative for settled rows.
        path: int ``[num_requests, columns]``, anything in it.
        trees: address of int64 ``[num_rows, 1 + depth]``: how many drafts the row's request has,
            then the way from the root to the row, -1 after its end.
    """
    table = trees.to(tl.pointer_type(tl.int64))
    steps = path + owner.to(tl.int64) * columns
    found = live & (where >= 0) & (where < columns) & (where < depth)
    node = tl.load(steps + where, mask=found, other=-1).to(tl.int64)
    drafts = tl.load(table + rows.to(tl.int64) * (depth + 1), mask=found, other=0)
    good = (found & (node >= 0) & (node < drafts)).to(tl.int32)
    source = rows.to(tl.int64) - where + node
    for step in range(columns):
        due = (good != 0) & (where >= step)
        own = tl.load(table + source * (depth + 1) + 1 + step, mask=due, other=0)
        taken = tl.load(steps + step, mask=due, other=0).to(tl.int64)
        good = good * (own == taken).to(tl.int32)
    return tl.where(good != 0, source, -1)


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
    """Which of ``rows`` a launch moves; counts out of range clamp by comparison.

    With ``PATH`` these are places, and ``placeholder`` and ``vocabulary`` are the address of the
    trees and their depth, as ``path_sources`` takes them.
    """
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
            if ACCEPT == 5:
                count = path_sources(
                    rows, chosen, owner, where, accepted, columns, placeholder, vocabulary
                )
            elif ACCEPT == 4:
                count = where * 0
                for column in range(columns):
                    token = tl.load(accepted + owner * columns + column, mask=live, other=0)
                    real = (token != placeholder) & (token < vocabulary)
                    count += real.to(count.dtype)
            else:
                count = tl.load(accepted + owner, mask=live, other=0)
            kept = count >= 0 if ACCEPT == 5 else where < count - (1 if ACCEPT >= 3 else 0)
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
