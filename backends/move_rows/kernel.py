"""The kernel that moves rows: commit, save, restore and write-through are one kernel.

Memory contract of ``move_rows``:

- ``planes`` is a plane table, columns as in ``plane_table.FIELDS``; every address and stride is in
  bytes, and every address is computed in int64.
- A slot is written only if it is in ``[0, limit)`` of its group; -1 is padding and is skipped.
  Any other slot outside its cache, in any known group, stops the whole launch: each program
  checks all slots before it writes anything, and as slots do not change, all reach one verdict.
  A program with a single step loads its staged rows first, so that the check costs no time.
- Distinct rows of a window have distinct slots, and planes share no memory: the window and the
  manager guarantee both. So no two programs write one byte, and no order among them matters.
  In rings and states (``OVERWRITES``) rows of one request may share a slot, a multiple of the
  group's ``reuse`` apart; then only the last selected one is written. Rows that are put
  back or saved have distinct slots, or are copies of one row.
- Rows that are not selected are neither read nor written.
- Along a ``PATH`` the selected rows are places: a place gets the staged row whose number the path
  names. No launch writes the staged rows that it reads, so nothing can overlap.
- One program of a counting launch, and no other, adds to ``counters``, also if the launch is
  refused. The end of the launch publishes them: a later reader on the stream sees every write.
- One program of a launch that keeps slots, and no other, writes ``kept``, also if the launch is
  refused: an abort reads there which slots were wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .copy_words import copy_narrow, copy_wide
from .plane_table import (
    AT_BLOCK_SIZE,
    AT_BLOCK_STRIDE,
    AT_CACHE,
    AT_GROUP,
    AT_ROWS_STRIDE,
    AT_SLOT_STRIDE,
    AT_WIDE,
    NUM_FIELDS,
)
from .selection import (
    DRAFT,
    KEPT,
    NOTHING,
    PATH,
    REJECTED,
    draft_numbers,
    owners,
    path_sources,
    selected,
    superseded,
)

#: Columns of ``counters``, and where each stands; see ``kvtxn.executor.Txn.count``.
NUM_COUNTERS = tl.constexpr(4)
AT_STAGED = tl.constexpr(0)
AT_COMMITTED = tl.constexpr(1)
AT_REJECTED = tl.constexpr(2)
AT_REFUSED = tl.constexpr(3)


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
    """Find slots that are neither -1 nor inside the caches of their group.

    The lanes of a program share all slots of all known groups. Group ``g`` is known if bit ``g`` of
    ``known`` is set; its slots are int ``[num_rows]`` at ``slots + g * slot_stride``, and below
    ``limits[g]``. Returns int32 ``[CHUNK]``: 1 for each lane that found one.
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
    slot_stride: tl.tensor,
    reuse: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.tensor,
    allowed: tl.tensor,
    layout: tl.tuple,
    acceptance: tl.tuple,
    GROUPS: tl.constexpr,
    ACCEPT: tl.constexpr,
    UNIFORM: tl.constexpr,
    OVERWRITES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Add drafts staged, committed and rejected, and the refusal, to ``counters``.

    One line per group; with several groups a first line for the window, in which a row counts once
    if any group has a slot for it. With ``OVERWRITES`` there always is that line, and the lines of
    rings and states count slots. Only one program of a launch runs this.

    See ``move_rows.selection`` for ``layout`` and ``acceptance``; ``allowed`` is 0 if the launch is
    refused and writes nothing, else 1. A refused launch counts as refused, and all its drafts as
    rejected. ``move_rows`` describes all other arguments.
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
            draft = selected(rows, live, layout, acceptance, DRAFT, NOTHING, UNIFORM)
            kept = selected(rows, live, layout, acceptance, KEPT, ACCEPT, UNIFORM)
            staged += (real & draft).to(tl.int64)
            committed += (real & kept).to(tl.int64)
            if OVERWRITES and line > 0:
                own = slots + (line - 1) * slot_stride
                apart = tl.load(reuse + line - 1)
                staged -= superseded(
                    rows, draft, slot, own, apart, num_rows, layout, acceptance,
                    DRAFT, NOTHING, UNIFORM,
                )  # fmt: skip
                committed -= superseded(
                    rows, kept, slot, own, apart, num_rows, layout, acceptance,
                    KEPT, ACCEPT, UNIFORM,
                )  # fmt: skip
        total = tl.sum(staged, axis=0)
        done = tl.sum(committed, axis=0) * allowed
        place = counters + line * NUM_COUNTERS
        tl.store(place + AT_STAGED, tl.load(place + AT_STAGED) + total)
        tl.store(place + AT_COMMITTED, tl.load(place + AT_COMMITTED) + done)
        tl.store(place + AT_REJECTED, tl.load(place + AT_REJECTED) + total - done)
        tl.store(place + AT_REFUSED, tl.load(place + AT_REFUSED) + 1 - allowed)


@triton.jit
def keep_slots(
    slots: tl.tensor,
    slot_stride: tl.tensor,
    kept: tl.tensor,
    kept_stride: tl.tensor,
    num_rows: tl.tensor,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Copy every group's slots of the window's rows to ``kept``, as ``move_rows`` describes.

    Only one program of a launch runs this.
    """
    lanes = tl.arange(0, CHUNK)
    for group in tl.static_range(GROUPS):
        for start in range(0, num_rows, CHUNK):
            live = start + lanes < num_rows
            own = tl.load(slots + group * slot_stride + start + lanes, mask=live)
            tl.store(kept + group * kept_stride + start + lanes, own, mask=live)


@triton.jit(
    do_not_specialize=[
        "first_address",
        "second_address",
        "reuse",
        "accepted",
        "trees",
        "num_rows",
        "num_planes",
        "slot_stride",
        "kept_stride",
        "known",
        "columns",
        "placeholder",
        "vocabulary",
        "depth",
        "per_request",
        "settled",
    ]
)
def move_rows(
    planes: tl.tensor,
    addresses: tl.tensor,
    first_address: tl.int64,
    second_address: tl.int64,
    slots: tl.tensor,
    limits: tl.tensor,
    reuse: tl.tensor,
    request: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    trees: tl.tensor,
    counters: tl.tensor,
    kept: tl.tensor,
    num_rows: tl.int32,
    num_planes: tl.int32,
    slot_stride: tl.int32,
    kept_stride: tl.int32,
    known: tl.int64,
    columns: tl.int32,
    placeholder: tl.int64,
    vocabulary: tl.int64,
    depth: tl.int32,
    per_request: tl.int32,
    settled: tl.int32,
    SELECT: tl.constexpr,
    ACCEPT: tl.constexpr,
    TO_CACHE: tl.constexpr,
    COUNT: tl.constexpr,
    KEEP: tl.constexpr,
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

    No row moves if a slot of a known group is neither -1 nor inside the group's caches; counters
    and ``kept`` are written all the same.

    Grid: (programs per line, lines of ``planes``, and one more row of programs if ``COUNT`` or
    ``KEEP``).

    Args:
        planes: int64 ``[num_planes, NUM_FIELDS]``, one line per plane or piece of a plane.
        addresses: int64 ``[num_planes]``, addresses of the staged rows of each line; unread if
            ``DIRECT``.
        first_address: the address of the staged rows of line 0, if ``DIRECT``.
        second_address: the address of the staged rows of line 1, if ``DIRECT``.
        slots: int64 ``[GROUPS, slot_stride]``, -1 is padding.
        limits: int64 ``[GROUPS]``, slots of the smallest cache of each group.
        reuse: int64 ``[GROUPS]``, see ``kvtxn.layers.SlotKind``; read if ``OVERWRITES``.
        request: int64 ``[num_rows]``; unread if ``UNIFORM``.
        position: int64 ``[num_rows]``, each row's number among its request's drafts, -1 for settled
            rows; unread if ``UNIFORM``.
        accepted: see ``selection.Accept`` for its shape and dtype.
        trees: int64 ``[num_rows, 1 + depth]``: how many drafts the row's request has, then the way
            from the root of its tree to the row, -1 after its end; read for ``PATH``.
        counters: int64 ``[lines, NUM_COUNTERS]``, added to if ``COUNT``.
        kept: int64 ``[GROUPS, kept_stride]``, gets the slots of the window's rows if ``KEEP``.
        num_rows: rows of the window.
        num_planes: lines of ``planes``.
        slot_stride: elements between groups in ``slots``.
        kept_stride: elements between groups in ``kept``.
        known: bit g is set if group g has its slots.
        columns: ids or nodes per request in ``accepted``, for ``IDS`` and ``PATH``.
        placeholder: the id that stands for nothing, for ``IDS``.
        vocabulary: the first id that counts as nothing, for ``IDS``.
        depth: of the trees, for ``PATH``.
        per_request: rows of each request, if ``UNIFORM``; else any number but 0.
        settled: how many of a request's rows come first and are settled, if ``UNIFORM``.
        SELECT: which rows, a number of ``selection.Select``.
        ACCEPT: the form of ``accepted``, a number of ``selection.Accept``.
        TO_CACHE: True writes the caches, False the staged rows.
        COUNT: add to the counters.
        KEEP: keep the slots; a launch that counts keeps none.
        UNIFORM: all requests are alike.
        DIRECT: at most two lines, whose addresses are arguments.
        GROUPS: number of groups.
        OVERWRITES: some group is one of rings or states.
        WIDE: some line moves in 16-byte units.
        NARROW: bytes of a word for the lines that do not; 0 if all do.
        UNITS: units per row, if all lines agree, else 0.
        RUN: units per run, if all lines agree, else 0.
        BLOCK: slots per block, if all lines agree, else 0.
        ROWS: rows per step of a program.
        COLS: units per step.
        TAIL: units of a row beyond ``COLS`` that are moved in the same step; else 0.
        CHUNK: slots per step of the check.
        ONCE: no program has more than one step.
    """
    plane = tl.program_id(1)
    layout = (request, position, per_request, settled)
    acceptance = (accepted, columns, placeholder, vocabulary, trees, depth)
    bad = slots_outside(slots, limits, slot_stride, known, num_rows, GROUPS, CHUNK)
    if COUNT and plane == num_planes:
        if tl.program_id(0) == 0:
            allowed = 1 - tl.max(bad, axis=0)
            count_rows(
                slots, slot_stride, reuse, counters, num_rows, allowed, layout, acceptance,
                GROUPS, ACCEPT, UNIFORM, OVERWRITES, CHUNK,
            )  # fmt: skip
    elif KEEP and plane == num_planes:
        if tl.program_id(0) == 0:
            keep_slots(slots, slot_stride, kept, kept_stride, num_rows, GROUPS, CHUNK)
    else:
        line = planes + plane * NUM_FIELDS
        base = tl.load(line + AT_CACHE)
        block_stride = tl.load(line + AT_BLOCK_STRIDE)
        slot_stride_bytes = tl.load(line + AT_SLOT_STRIDE)
        rows_stride = tl.load(line + AT_ROWS_STRIDE)
        group = 0
        if GROUPS > 1:
            group = tl.load(line + AT_GROUP).to(tl.int32)
        block_size = BLOCK if BLOCK > 0 else tl.load(line + AT_BLOCK_SIZE)
        if DIRECT:
            outside = tl.where(plane == 0, first_address, second_address)
        else:
            outside = tl.load(addresses + plane)
        LATE: tl.constexpr = ONCE and TO_CACHE and NARROW == 0
        limit = num_rows
        if not LATE:
            limit = num_rows * (1 - tl.max(bad, axis=0))
        blocks = tl.cdiv(num_rows, ROWS)
        for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
            rows = index * ROWS + tl.arange(0, ROWS)
            live = rows < limit
            own = slots + group * slot_stride
            slot = tl.load(own + rows, mask=live, other=-1)
            wanted = selected(rows, live, layout, acceptance, SELECT, ACCEPT, UNIFORM) & (slot >= 0)
            if OVERWRITES and TO_CACHE and (SELECT != DRAFT and SELECT != REJECTED):
                apart = tl.load(reuse + group)
                taken = superseded(
                    rows, wanted, slot, own, apart, num_rows, layout, acceptance,
                    SELECT, ACCEPT, UNIFORM,
                )  # fmt: skip
                wanted = wanted & (taken == 0)
            slot = tl.where(wanted, slot, 0)
            block = slot // block_size
            inside = slot % block_size
            source = rows.to(tl.int64)
            if ACCEPT == PATH and SELECT == KEPT:
                owner = owners(rows, wanted, layout, UNIFORM)
                number = draft_numbers(rows, wanted, layout, UNIFORM)
                source = path_sources(rows, wanted, owner, number, acceptance)
                source = tl.where(wanted, source, 0)
            there = outside + source * rows_stride
            here = base + block * block_stride + inside * slot_stride_bytes
            # A launch may have lines of both kinds; then each kind's steps skip the other's rows.
            for_wide = wanted
            for_narrow = wanted
            if WIDE and NARROW > 0:
                is_wide = tl.load(line + AT_WIDE)
                for_wide = tl.where(wanted, is_wide, 0) != 0
                for_narrow = tl.where(wanted, 1 - is_wide, 0) != 0
            if WIDE:
                copy_wide(here, there, for_wide, bad, line, TO_CACHE, LATE, COLS, TAIL, UNITS, RUN)
            if NARROW > 0:
                copy_narrow(here, there, for_narrow, line, inside, TO_CACHE, COLS, NARROW)
