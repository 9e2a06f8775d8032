"""The kernel that moves rows: commit, save, restore and write-through are one kernel.

Memory contract of ``move_rows``:

- ``plan`` holds one line per plane, columns as in ``pointer_table.FIELDS``; every address and
  stride in bytes, every address computed in int64.
- A slot is written only if it is in ``[0, limit)`` of its group; -1 is padding and is skipped.
  Any other slot outside its cache, in any known group, stops the whole launch: each program
  checks all slots before it writes anything, and as slots do not change, all reach one verdict.
  A program with a single step loads its staged rows first, so that the check costs no time.
- Distinct rows of a window have distinct slots, planes share no memory: the window and the
  manager guarantee it. So no two programs write one byte, and no order among them matters.
  In rings and states (``OVERWRITES``) rows of one request may share a slot, a multiple of the
  group's ``reuse`` apart; then of those selected only the last is written. Rows that are put
  back or saved have distinct slots, or are copies of one row.
- Rows that are not selected are neither read nor written.
- Along a ``PATH`` what is selected are places: a place gets the staged row of another one's
  number. Staged rows are never written by the launch that reads them, so nothing can overlap.
- One program of a counting launch, and no other, adds to ``counters``, refusal included. What
  publishes them is the end of the launch: a reader in stream order sees them after every write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_copy import copy_narrow, copy_wide
from .triton_select import overtaken, path_sources, selected


@triton.jit
def slots_outside(
    slots: tl.tensor,
    limits: tl.tensor,
    slot_stride: tl.tensor,
    known: tl.tensor,
    num_rows: tl.tensor,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Per lane, whether any slot it looked at is neither -1 nor inside the caches of its group.

    The lanes of a program look at all slots of all known groups.
    """
    lanes = tl.arange(0, CHUNK)
    bad = tl.zeros([CHUNK], dtype=tl.int32)
    for group in tl.static_range(GROUPS):
        limit = tl.load(limits + group)
        count = num_rows * ((known >> group) & 1)
        for start in range(0, count, CHUNK):
            inside = start + lanes < count
            slot = tl.load(slots + group * slot_stride + start + lanes, mask=inside, other=-1)
            bad = bad | ((slot < -1) | (slot >= limit)).to(tl.int32)
    return bad


@triton.jit
def count_rows(
    slots: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.tensor,
    slot_stride: tl.tensor,
    allowed: tl.tensor,
    columns: tl.tensor,
    placeholder: tl.tensor,
    vocabulary: tl.tensor,
    per_request: tl.tensor,
    settled: tl.tensor,
    limits: tl.tensor,
    GROUPS: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
    OVERWRITES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add drafts staged, committed, rejected and the refusal to int64 ``counters`` ``[lines, 4]``.

    One line per group; with several groups a first line for the window, in which a row counts
    once if any group has a slot for it. With ``OVERWRITES`` there always is that line, and the
    lines of rings and states count slots. Only one program of a launch runs this.
    """
    lanes = tl.arange(0, CHUNK)
    ALONE: tl.constexpr = GROUPS == 1 and not OVERWRITES
    for line in tl.static_range(1 if ALONE else GROUPS + 1):
        staged = tl.zeros([CHUNK], dtype=tl.int64)
        committed = tl.zeros([CHUNK], dtype=tl.int64)
        for start in range(0, num_rows, CHUNK):
            rows = start + lanes
            live = rows < num_rows
            if ALONE or line > 0:
                group = 0 if ALONE else line - 1
                slot = tl.load(slots + group * slot_stride + rows, mask=live, other=-1)
            else:
                slot = tl.full([CHUNK], -1, dtype=tl.int64)
                for group in tl.static_range(GROUPS):
                    each = tl.load(slots + group * slot_stride + rows, mask=live, other=-1)
                    slot = tl.maximum(slot, each)
            real = live & (slot >= 0)
            draft = selected(
                rows, live, request, position, accepted, columns, placeholder, vocabulary,
                per_request, settled, 2, 0, UNIFORM,
            )  # fmt: skip
            kept = selected(
                rows, live, request, position, accepted, columns, placeholder, vocabulary,
                per_request, settled, 3, ACCEPT, UNIFORM,
            )  # fmt: skip
            staged += (real & draft).to(tl.int64)
            committed += (real & kept).to(tl.int64)
            if OVERWRITES and line > 0:
                own = slots + (line - 1) * slot_stride
                reuse = tl.load(limits + GROUPS + line - 1)
                staged -= overtaken(
                    rows, draft, slot, own, reuse, request, position, accepted, num_rows, columns,
                    placeholder, vocabulary, per_request, settled, 2, 0, UNIFORM,
                )  # fmt: skip
                committed -= overtaken(
                    rows, kept, slot, own, reuse, request, position, accepted, num_rows, columns,
                    placeholder, vocabulary, per_request, settled, 3, ACCEPT, UNIFORM,
                )  # fmt: skip
        total = tl.sum(staged, axis=0)
        done = tl.sum(committed, axis=0) * allowed
        place = counters + line * 4
        tl.store(place, tl.load(place) + total)
        tl.store(place + 1, tl.load(place + 1) + done)
        tl.store(place + 2, tl.load(place + 2) + total - done)
        tl.store(place + 3, tl.load(place + 3) + 1 - allowed)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_planes",
        "slot_stride",
        "known",
        "columns",
        "placeholder",
        "vocabulary",
        "per_request",
        "settled",
        "first",
        "second",
        "accepted",
    ]
)
def move_rows(
    plan: tl.tensor,
    addresses: tl.tensor,
    first: tl.int64,
    second: tl.int64,
    slots: tl.tensor,
    limits: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.int32,
    num_planes: tl.int32,
    slot_stride: tl.int32,
    known: tl.int64,
    columns: tl.int32,
    placeholder: tl.int64,
    vocabulary: tl.int64,
    per_request: tl.int32,
    settled: tl.int32,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    TO_CACHE: tl.constexpr,
    COUNT: tl.constexpr,
    UNIFORM: tl.constexpr,
    DIRECT: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERWRITES: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    UNITS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNK: tl.constexpr,
    ONCE: tl.constexpr,
) -> None:
    """Move the selected rows of all planes between the caches and the staged rows.

    Grid: (programs per plane, planes, and one more row of programs that counts if ``COUNT``).

    Args:
        plan: int64 ``[num_planes, 15]``.
        addresses: int64 ``[num_planes]``, addresses of the staged rows of each plane; unused
            if ``DIRECT``.
        first: if ``DIRECT``, the address for plane 0 ...
        second: ... and for plane 1.
        slots: int64 ``[GROUPS, slot_stride]``, -1 is padding.
        limits: int64 ``[GROUPS]``, slots in the smallest cache of each group; if ``OVERWRITES``
            ``[2, GROUPS]``, each group's ``reuse`` in the second line.
        request: int64 ``[num_rows]``; unread if ``UNIFORM``, as is the next.
        position: int64 ``[num_rows]``, -1 for settled rows.
        accepted: int ``[num_requests]`` (``COUNTS``, ``SAMPLED``), uint8 ``[num_rows]`` (``MASK``),
            int ``[num_requests, columns]`` (``IDS``, ``PATH``), or unread.
        counters: int64 ``[lines, 4]``, added to if ``COUNT``.
        num_rows: rows of the window.
        num_planes: lines of the plan.
        slot_stride: elements between groups in ``slots``.
        known: bit g is set where group g has its slots.
        columns: if ``IDS``, ids per request ...
        placeholder: ... the one that stands for nothing ...
        vocabulary: ... and the first that is none. If ``PATH``, nodes per request, the address of
            the trees, and their depth: see ``triton_select.path_sources``.
        per_request: if ``UNIFORM``, rows of each request ...
        settled: ... and how many of them come first and are settled.
        SELECT: which rows.
        ACCEPT: what ``accepted`` is.
        TO_CACHE: True writes caches, False reads them.
        COUNT: add to the counters.
        UNIFORM: all requests are alike; ``request`` and ``position`` are not read.
        DIRECT: at most two planes, addresses as arguments.
        GROUPS: number of groups.
        OVERWRITES: some group is one of rings or states.
        WIDE: some plane moves in 16-byte units.
        NARROW: bytes of a word for planes that do not; 0 without any.
        UNITS: units per row, if all planes agree, else 0.
        RUN: units per run, likewise.
        BLOCK: slots per block, likewise.
        ROWS: rows per step of a program.
        COLS: units per step.
        TAIL: what is left of a row then, if it is taken in the same step; else 0.
        CHUNK: slots per step of the check.
        ONCE: no program has more than one step.
    """
    plane = tl.program_id(1)
    bad = slots_outside(slots, limits, slot_stride, known, num_rows, GROUPS, CHUNK)
    if COUNT and plane == num_planes:
        if tl.program_id(0) == 0:
            count_rows(
                slots,
                request,
                position,
                accepted,
                counters,
                num_rows,
                slot_stride,
                1 - tl.max(bad, axis=0),
                columns,
                placeholder,
                vocabulary,
                per_request,
                settled,
                limits,
                GROUPS,
                ACCEPT,
                UNIFORM,
                OVERWRITES,
                CHUNK,
            )
    else:
        line = plan + plane * 15
        base = tl.load(line)
        block_stride = tl.load(line + 1)
        slot_stride_bytes = tl.load(line + 2)
        rows_stride = tl.load(line + 4)
        group = 0
        if GROUPS > 1:
            group = tl.load(line + 9).to(tl.int32)
        block_size = tl.load(line + 8)
        outside = tl.where(plane == 0, first, second) if DIRECT else tl.load(addresses + plane)
        LATE: tl.constexpr = ONCE and TO_CACHE and NARROW == 0
        limit = num_rows
        if not LATE:
            limit = num_rows * (1 - tl.max(bad, axis=0))
        blocks = tl.cdiv(num_rows, ROWS)
        for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
            rows = index * ROWS + tl.arange(0, ROWS)
            live = rows < limit
            slot = tl.load(slots + group * slot_stride + rows, mask=live, other=-1)
            chosen = selected(
                rows,
                live,
                request,
                position,
                accepted,
                columns,
                placeholder,
                vocabulary,
                per_request,
                settled,
                SELECT,
                ACCEPT,
                UNIFORM,
            )
            wanted = chosen & (slot >= 0)
            if OVERWRITES and TO_CACHE and (SELECT < 2 or SELECT == 3):
                taken = overtaken(
                    rows, wanted, slot, slots + group * slot_stride,
                    tl.load(limits + GROUPS + group), request, position, accepted, num_rows,
                    columns, placeholder, vocabulary, per_request, settled,
                    SELECT, ACCEPT, UNIFORM,
                )  # fmt: skip
                wanted = wanted & (taken == 0)
            slot = tl.where(wanted, slot, 0)
            if BLOCK > 0:
                block = slot // BLOCK
                inside = slot % BLOCK
            else:
                block = slot // block_size
                inside = slot % block_size
            source = rows.to(tl.int64)
            if ACCEPT == 5 and SELECT == 3:
                if UNIFORM:
                    owner = rows // per_request
                    where = rows - owner * per_request - settled
                else:
                    owner = tl.load(request + rows, mask=wanted, other=0)
                    where = tl.load(position + rows, mask=wanted, other=-1)
                source = path_sources(
                    rows, wanted, owner, where, accepted, columns, placeholder, vocabulary
                )
                source = tl.where(wanted, source, 0)
            there = outside + source * rows_stride
            here = base + block * block_stride + inside * slot_stride_bytes
            # A launch may have planes of both kinds; then each kind's steps skip the other's rows.
            for_wide = wanted
            for_narrow = wanted
            if WIDE and NARROW > 0:
                is_wide = tl.load(line + 11)
                for_wide = tl.where(wanted, is_wide, 0) != 0
                for_narrow = tl.where(wanted, 1 - is_wide, 0) != 0
            if WIDE:
                copy_wide(here, there, for_wide, bad, line, TO_CACHE, LATE, COLS, TAIL, UNITS, RUN)
            if NARROW > 0:
                copy_narrow(here, there, for_narrow, line, inside, TO_CACHE, COLS, NARROW)
