"""The choice of the rows that a launch moves, made on the device.

Nothing here reads a row or a cache: the functions read the layout, the acceptance and slots only.
They take the first two as tuples:

- ``layout`` is ``(request, position, per_request, settled)``: int64 ``[num_rows]`` pointers to each
  row's request and to its number among the request's drafts (-1 for settled rows), both unread if
  ``UNIFORM``; then the rows of each request and how many of them are settled, read if ``UNIFORM``.
- ``acceptance`` is ``(accepted, columns, placeholder, vocabulary, trees, depth)``: arguments of
  ``move_rows.kernel.move_rows``, which describes them; ``Accept`` says which of them are read.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl


class Select:
    """Numbers for the rows that a launch moves."""

    ALL: Final = 0
    SETTLED: Final = 1
    DRAFT: Final = 2
    KEPT: Final = 3
    REJECTED: Final = 4


class Accept:
    """Numbers for the form of ``accepted``, which says which draft rows are kept."""

    #: There is no acceptance; ``accepted`` is not read.
    NOTHING: Final = 0
    #: int ``[num_requests]``: accepted drafts.
    COUNTS: Final = 1
    #: uint8 ``[num_rows]``: 0 for rejected rows.
    MASK: Final = 2
    #: int ``[num_requests]``: sampled tokens, which are the accepted drafts and one more.
    SAMPLED: Final = 3
    #: int ``[num_requests, columns]``: the sampled ids; ``placeholder`` and ids from ``vocabulary``
    #: on count as nothing.
    IDS: Final = 4
    #: int ``[num_requests, columns]``: nodes along the accepted path of each request's draft tree.
    PATH: Final = 5


# Kernels read global numbers only as ``tl.constexpr``: the same numbers under the same names.
ALL = tl.constexpr(Select.ALL)
SETTLED = tl.constexpr(Select.SETTLED)
DRAFT = tl.constexpr(Select.DRAFT)
KEPT = tl.constexpr(Select.KEPT)
REJECTED = tl.constexpr(Select.REJECTED)
NOTHING = tl.constexpr(Accept.NOTHING)
MASK = tl.constexpr(Accept.MASK)
SAMPLED = tl.constexpr(Accept.SAMPLED)
IDS = tl.constexpr(Accept.IDS)
PATH = tl.constexpr(Accept.PATH)


@triton.jit
def owners(rows: tl.tensor, live: tl.tensor, layout: tl.tuple, UNIFORM: tl.constexpr) -> tl.tensor:
    """Return the request of each row, int ``[ROWS]``.

    Unless ``UNIFORM``, 0 where ``live`` is false.
    """
    request, _, per_request, _ = layout
    return rows // per_request if UNIFORM else tl.load(request + rows, mask=live, other=0)


@triton.jit
def draft_numbers(
    rows: tl.tensor, live: tl.tensor, layout: tl.tuple, UNIFORM: tl.constexpr
) -> tl.tensor:
    """Return each row's number among its request's drafts, int ``[ROWS]``; negative if settled.

    Unless ``UNIFORM``, it is -1 where ``live`` is false.
    """
    _, position, per_request, settled = layout
    if UNIFORM:
        number = rows - rows // per_request * per_request - settled
    else:
        number = tl.load(position + rows, mask=live, other=-1)
    return number


@triton.jit
def path_sources(
    rows: tl.tensor, live: tl.tensor, owner: tl.tensor, number: tl.tensor, acceptance: tl.tuple
) -> tl.tensor:
    """Return, for each row's place, the row that the accepted path puts there; -1 for none.

    The path names a node for each place. The node is taken if the path up to it is that node's own
    way from the root; so a path that leaves its tree is cut there, whatever follows.

    Args:
        rows: int ``[ROWS]``, the places.
        live: bool ``[ROWS]``; where it is false nothing is read and the result is -1.
        owner: int ``[ROWS]``, the requests of the places.
        number: int ``[ROWS]``, the places' numbers among their request's drafts, negative for
            settled rows.
        acceptance: of the form ``PATH``; any number may stand in a path.
    """
    path, columns, _, _, trees, depth = acceptance
    steps = path + owner.to(tl.int64) * columns
    found = live & (number >= 0) & (number < columns) & (number < depth)
    node = tl.load(steps + number, mask=found, other=-1).to(tl.int64)
    drafts = tl.load(trees + rows.to(tl.int64) * (depth + 1), mask=found, other=0)
    good = (found & (node >= 0) & (node < drafts)).to(tl.int32)
    source = rows.to(tl.int64) - number + node
    for step in range(columns):
        due = (good != 0) & (number >= step)
        own = tl.load(trees + source * (depth + 1) + 1 + step, mask=due, other=0)
        taken = tl.load(steps + step, mask=due, other=0).to(tl.int64)
        good = good * (own == taken).to(tl.int32)
    return tl.where(good != 0, source, -1)


@triton.jit
def kept(
    rows: tl.tensor,
    live: tl.tensor,
    drafts: tl.tensor,
    number: tl.tensor,
    layout: tl.tuple,
    acceptance: tl.tuple,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
) -> tl.tensor:
    """Find the draft rows that the acceptance keeps, bool ``[ROWS]``; undefined for other rows.

    Counts out of range clamp by comparison. With ``PATH``, rows are places, and a place is kept if
    the path puts a row there.

    Of ``rows``, int ``[ROWS]``, ``live`` are of the window, and ``drafts`` draft rows among them.
    ``number`` is from ``draft_numbers``, ``ACCEPT`` a number of ``Accept``; ``UNIFORM``: all
    requests are alike.
    """
    accepted, columns, placeholder, vocabulary, _, _ = acceptance
    if ACCEPT == MASK:
        keep = tl.load(accepted + rows, mask=live, other=0) != 0
    else:
        owner = owners(rows, live, layout, UNIFORM)
        if ACCEPT == PATH:
            keep = path_sources(rows, drafts, owner, number, acceptance) >= 0
        elif ACCEPT == IDS:
            count = number * 0
            for column in range(columns):
                token = tl.load(accepted + owner * columns + column, mask=live, other=0)
                real = (token != placeholder) & (token < vocabulary)
                count += real.to(count.dtype)
            keep = number < count - 1
        else:
            count = tl.load(accepted + owner, mask=live, other=0)
            keep = number < count - (1 if ACCEPT == SAMPLED else 0)
    return keep


@triton.jit
def selected(
    rows: tl.tensor,
    live: tl.tensor,
    layout: tl.tuple,
    acceptance: tl.tuple,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
) -> tl.tensor:
    """Return the rows (with ``PATH``: the places) that a launch moves, bool ``[ROWS]``.

    Of ``rows``, int ``[ROWS]``, none is selected that is not ``live``. ``SELECT`` and ``ACCEPT``
    are numbers of ``Select`` and ``Accept``; the acceptance is read for ``KEPT`` and ``REJECTED``.
    """
    number = draft_numbers(rows, live, layout, UNIFORM)
    chosen = live
    if SELECT == SETTLED:
        chosen = live & (number < 0)
    elif SELECT != ALL:
        chosen = live & (number >= 0)
        if SELECT != DRAFT:
            keep = kept(rows, live, chosen, number, layout, acceptance, ACCEPT, UNIFORM)
            chosen = chosen & keep if SELECT == KEPT else chosen & (keep == 0)
    return chosen


@triton.jit
def superseded(
    rows: tl.tensor,
    chosen: tl.tensor,
    slot: tl.tensor,
    slots: tl.tensor,
    reuse: tl.tensor,
    num_rows: tl.tensor,
    layout: tl.tuple,
    acceptance: tl.tuple,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
) -> tl.tensor:
    """Find the rows in ``chosen`` whose slot a later selected row has, too: int32 ``[ROWS]``.

    If rows share a slot of a ring or a state, only the last selected one is written. Two rows of a
    request may share a slot if they lie a multiple of ``reuse`` apart, so the search goes on in
    steps of ``reuse`` until no row of the program has a successor in its request. It ends at once
    if the ring is longer than a request's rows, or if ``reuse`` is 0.

    ``slot``, int64 ``[ROWS]``, are the slots of ``rows``, and ``slots``, int64 ``[num_rows]``,
    those of the whole window, of a group with this ``reuse``, see ``kvtxn.layers.SlotKind``. All
    else is as for ``selected``.
    """
    owner = owners(rows, chosen, layout, UNIFORM).to(tl.int32)
    alive = (chosen & (slot >= 0)).to(tl.int32) * (reuse > 0).to(tl.int32)
    taken = alive * 0
    later = rows
    going = tl.max(alive, axis=0)
    while going > 0:
        later += reuse.to(tl.int32)
        there = (alive != 0) & (later < num_rows)
        there = there & (owners(later, there, layout, UNIFORM).to(tl.int32) == owner)
        same = tl.load(slots + later, mask=there, other=-1) == slot
        too = selected(later, there, layout, acceptance, SELECT, ACCEPT, UNIFORM)
        taken = taken | (too & same).to(tl.int32)
        alive = there.to(tl.int32)
        going = tl.max(alive, axis=0)
    return taken
