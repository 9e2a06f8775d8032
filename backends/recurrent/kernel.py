"""The kernel that advances recurrent states by a window's rows.

Memory contract of ``advance_states``:

- ``plan`` holds one line per state, columns as in ``plan.FIELDS``, and ``tiles`` one line per
  tile: the number of its state, and the tile's number within the state. Every address and
  stride is in bytes, every address computed in int64.
- A state is read and written by the programs of its own tiles alone; tiles of one state share no
  element. Distinct requests have distinct slots, which the window guarantees. So no two programs
  touch one byte, and no order among them matters.
- A slot is used only if it is in ``[0, limit)`` of its group; -1 is padding and is skipped. Any
  other slot outside its cache, in any known group, stops the whole launch: each program checks all
  slots before it writes anything, and as slots do not change, all reach one verdict.
- A tile is read once and written once. If its request crosses a boundary, the tile is written
  twice, to two slots. A state that no row advances is not written.
- The caller guarantees that a slot beyond a boundary belongs to no request. If such a slot is
  outside its cache, the window has put the request's own slot outside, too.
- Rows that advance no state are not read; staged rows are never written.
- Numbers: each product and each sum is rounded to float32 by itself. The launch forbids the
  compiler to fuse them (``enable_fp_fusion=False``), so that the bytes are those of the reference,
  ``kvtxn.recurrent.rank_one``. The kernel adds two numbers at a time, so no order is open.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..move_rows.kernel import slots_outside
from ..move_rows.selection import (
    KEPT,
    NOTHING,
    PATH,
    SETTLED,
    draft_numbers,
    path_sources,
    selected,
)
from .past import shift_in
from .plan import (
    AT_GROUP,
    AT_SHIFTS,
    NUM_CROSSING_FIELDS,
    NUM_FIELDS,
    NUM_PART_FIELDS,
    ROWS_UNTIL,
    SLOT_BEYOND,
)
from .take_in import take_in


@triton.jit(
    do_not_specialize=[
        "accepted",
        "trees",
        "num_requests",
        "num_tiles",
        "num_rows",
        "num_parts",
        "slot_stride",
        "known",
        "columns",
        "placeholder",
        "vocabulary",
        "depth",
        "per_request",
        "settled",
    ]
)
def advance_states(
    plan: tl.tensor,
    tiles: tl.tensor,
    parts: tl.tensor,
    slots: tl.tensor,
    limits: tl.tensor,
    starts: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    trees: tl.tensor,
    num_requests: tl.int32,
    num_tiles: tl.int32,
    num_rows: tl.int32,
    num_parts: tl.int32,
    slot_stride: tl.int32,
    known: tl.int64,
    columns: tl.int32,
    placeholder: tl.int64,
    vocabulary: tl.int64,
    depth: tl.int32,
    per_request: tl.int32,
    settled: tl.int32,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
    GROUPS: tl.constexpr,
    CROSSES: tl.constexpr,
    RANK_ONE: tl.constexpr,
    STATE: tl.constexpr,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFTS: tl.constexpr,
    WORD: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Advance the states of all requests by the settled rows and the accepted draft rows.

    Grid: (programs). There are ``num_requests * num_tiles`` pieces of work, all tiles of one
    request after another; of ``n`` programs, program ``i`` takes pieces ``i``, ``i + n``, ...

    Args:
        plan: int64 ``[num_states, NUM_FIELDS]``.
        tiles: int32 ``[num_tiles, 2]``: the number of the tile's state, the tile's number in it.
        parts: int64 ``[num_parts, 4]``: address and byte strides of row, head and element of each
            part of the staged rows. If ``CROSSES``, ``[GROUPS, 2]`` addresses of int64
            ``[num_requests]`` arrays follow: the rows until each request's boundary, and the slot
            beyond the boundary or -1. Both addresses are 0 for a group without boundaries.
        slots: int64 ``[GROUPS, slot_stride]``, one slot per row, -1 is padding; all rows of a
            request have its state's slot.
        limits: int64 ``[GROUPS]``, slots in the smallest cache of each group.
        starts: int64 ``[num_requests + 1]``, the first row of each request, and ``num_rows``;
            unread if ``UNIFORM``.
        request: int64 ``[num_rows]``, the number of each row's request; unread if ``UNIFORM``.
        position: int64 ``[num_rows]``, each row's number among its request's drafts, -1 for
            settled rows; unread if ``UNIFORM``.
        accepted: as for ``move_rows``.
        trees: as for ``move_rows``.
        num_requests: requests of the window.
        num_tiles: lines of ``tiles``.
        num_rows: rows of the window.
        num_parts: lines of ``parts``.
        slot_stride: elements between groups in ``slots``.
        known: bit g is set if group g has its slots.
        columns: as for ``move_rows``.
        placeholder: as for ``move_rows``.
        vocabulary: as for ``move_rows``.
        depth: as for ``move_rows``.
        per_request: rows of each request, if ``UNIFORM``.
        settled: settled rows of each request, which come first, if ``UNIFORM``.
        ACCEPT: the form of ``accepted``, a number of ``move_rows.selection.Accept``; ``NOTHING``
            keeps no draft.
        UNIFORM: all requests have the same numbers of settled rows and of drafts.
        GROUPS: number of groups.
        CROSSES: some request may cross a boundary.
        RANK_ONE: some state has heads, values and keys.
        STATE: as for ``take_in``.
        KEY: as for ``take_in``.
        VALUES: as for ``take_in``.
        KEYS: as for ``take_in``.
        VECTOR: as for ``take_in``.
        SHIFTS: some state is a convolution's past.
        WORD: as for ``shift_in``.
        TAPS: as for ``shift_in``.
        CHANNELS: as for ``shift_in``.
        LONGEST: a power of two, at least the rows of the longest request.
        CHUNK: slots per step of the check of all slots.
    """
    bad = slots_outside(slots, limits, slot_stride, known, num_rows, GROUPS, CHUNK)
    total = num_requests * num_tiles * (1 - tl.max(bad, axis=0))
    lanes = tl.arange(0, LONGEST)
    layout = (request, position, per_request, settled)
    acceptance = (accepted, columns, placeholder, vocabulary, trees, depth)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        owner = item // num_tiles
        piece = tiles + (item - owner * num_tiles) * 2
        line = plan + tl.load(piece) * NUM_FIELDS
        tile = tl.load(piece + 1)
        if UNIFORM:
            first = owner * per_request
            length = per_request
        else:
            first = tl.load(starts + owner).to(tl.int32)
            length = tl.load(starts + owner + 1).to(tl.int32) - first
        group = tl.load(line + AT_GROUP).to(tl.int32)
        slot = tl.load(slots + group * slot_stride + first, mask=length > 0, other=-1)
        rows = first + lanes
        live = lanes < length
        chosen = selected(rows, live, layout, acceptance, SETTLED, ACCEPT, UNIFORM)
        source = rows.to(tl.int64)
        if ACCEPT != NOTHING:
            kept = selected(rows, live, layout, acceptance, KEPT, ACCEPT, UNIFORM)
            chosen = chosen | kept
            if ACCEPT == PATH:
                whose = rows * 0 + owner
                number = draft_numbers(rows, live, layout, UNIFORM).to(tl.int32)
                moved = path_sources(rows, kept, whose, number, acceptance)
                source = tl.where(kept, moved, source)
        chosen = chosen.to(tl.int32)
        taken = tl.sum(chosen, axis=0)
        last_slot, boundary = slot, taken * 0 - 1
        if CROSSES:
            at = parts + num_parts * NUM_PART_FIELDS + group * NUM_CROSSING_FIELDS
            there = tl.load(at + ROWS_UNTIL) != 0
            rows_until = (tl.load(at + ROWS_UNTIL) + owner * 8).to(tl.pointer_type(tl.int64))
            slot_beyond = (tl.load(at + SLOT_BEYOND) + owner * 8).to(tl.pointer_type(tl.int64))
            until = tl.load(rows_until, mask=there, other=0)
            beyond = tl.load(slot_beyond, mask=there, other=-1)
            crosses = (beyond >= 0) & (taken > until)
            last_slot = tl.where(crosses, beyond, slot)
            boundary = tl.where(crosses, until, -1).to(tl.int32)
        if (slot >= 0) & (taken > 0):
            if RANK_ONE and SHIFTS:
                if tl.load(line + AT_SHIFTS) == 0:
                    take_in(
                        line, parts, slot, last_slot, boundary, tile, lanes, chosen, source,
                        CROSSES, STATE, KEY, VALUES, KEYS, VECTOR,
                    )  # fmt: skip
                else:
                    shift_in(
                        line, parts, slot, last_slot, boundary, tile, chosen, source,
                        CROSSES, WORD, TAPS, CHANNELS,
                    )  # fmt: skip
            elif RANK_ONE:
                take_in(
                    line, parts, slot, last_slot, boundary, tile, lanes, chosen, source,
                    CROSSES, STATE, KEY, VALUES, KEYS, VECTOR,
                )  # fmt: skip
            else:
                shift_in(
                    line, parts, slot, last_slot, boundary, tile, chosen, source,
                    CROSSES, WORD, TAPS, CHANNELS,
                )  # fmt: skip
