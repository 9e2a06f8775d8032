"""The kernels that read and fill bytes: checksums of listed slots, and the search for a NaN.

Memory contract of ``do_work``: an entry's slot is read in every plane of a layer (COMPARE, SEAL),
or written there in planes whose format has a NaN (FILL), or in the dead part of the layer's window
(CLEAR). ``sums`` are read or written at the slot. Entries of one list are of distinct slots, but
for COMPARE, which writes ``seals`` by an atomic exchange: of the programs that find one slot
changed, one reports it. Addresses are int64; every slot was checked when it was listed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines
from ...audit.violation import FOUND_NUMBER, KIND_NUMBER
from ..move_rows.copy_words import narrow_pointer
from . import byte_plan
from .byte_lists import (
    CLEAR,
    COMPARE,
    DONE,
    ENTRY,
    FILL,
    GROUP,
    LINE,
    LISTED,
    MODE,
    PLACE,
    POSITION,
    SEAL,
    SLOT,
)
from .compare_kernel import block_of, table_of
from .reports import record_violation
from .requests import rows_of
from .words import REJECTED, RESERVED, permute

STEP = tl.constexpr(book.STEP)
SERIAL = tl.constexpr(book.SERIAL)
TELLING = tl.constexpr(book.TELLING)
CHANGED = tl.constexpr(KIND_NUMBER["changed"])
IS_BYTES = tl.constexpr(FOUND_NUMBER["bytes"])
IS_NAN = tl.constexpr(FOUND_NUMBER["nan"])
BASE = tl.constexpr(group_lines.BASE)
STRIDE = tl.constexpr(group_lines.STRIDE)
BLOCK_SIZE = tl.constexpr(group_lines.BLOCK_SIZE)
NUM_BLOCKS = tl.constexpr(group_lines.NUM_BLOCKS)
FIELDS = tl.constexpr(group_lines.FIELDS)

POISONED = tl.constexpr(byte_plan.POISONED)
GROUP_FIELDS = tl.constexpr(byte_plan.GROUP_FIELDS)
LAYER_GROUP = tl.constexpr(byte_plan.GROUP)
SUMS = tl.constexpr(byte_plan.SUMS)
FIRST_PLANE = tl.constexpr(byte_plan.FIRST_PLANE)
NUM_PLANES = tl.constexpr(byte_plan.NUM_PLANES)
NUMBER = tl.constexpr(byte_plan.NUMBER)
WINDOW = tl.constexpr(byte_plan.WINDOW)
WINDOW_STRIDE = tl.constexpr(byte_plan.WINDOW_STRIDE)
WINDOW_OFFSETS = tl.constexpr(byte_plan.WINDOW_OFFSETS)
WINDOW_INPUTS = tl.constexpr(byte_plan.WINDOW_INPUTS)
WINDOW_OTHERS = tl.constexpr(byte_plan.WINDOW_OTHERS)
WINDOW_LENGTH = tl.constexpr(byte_plan.WINDOW_LENGTH)
WINDOW_ITEM = tl.constexpr(byte_plan.WINDOW_ITEM)
LAYER_FIELDS = tl.constexpr(byte_plan.LAYER_FIELDS)

CELLS = tl.constexpr(byte_plan.CELLS)
BLOCK_STRIDE = tl.constexpr(byte_plan.BLOCK_STRIDE)
SLOT_STRIDE = tl.constexpr(byte_plan.SLOT_STRIDE)
RUN = tl.constexpr(byte_plan.RUN)
ELEMENT = tl.constexpr(byte_plan.STEP)
UNITS = tl.constexpr(byte_plan.UNITS)
RUN_UNITS = tl.constexpr(byte_plan.RUN_UNITS)
PLANE_BLOCK = tl.constexpr(byte_plan.BLOCK_SIZE)
ITEM = tl.constexpr(byte_plan.ITEM)
OFFSETS = tl.constexpr(byte_plan.OFFSETS)
PART = tl.constexpr(byte_plan.PART)
HAS_NAN = tl.constexpr(byte_plan.HAS_NAN)
PLANE_FIELDS = tl.constexpr(byte_plan.PLANE_FIELDS)


@triton.jit
def element_at(
    plane: tl.tensor, slot: tl.tensor, element: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Return the addresses of elements of a slot's row, in the order of the row.

    ``inside`` masks the elements whose offset is loaded, in a plane with an offset table.
    """
    size = tl.load(plane + PLANE_BLOCK)
    block = tl.load(plane + CELLS) + slot // size * tl.load(plane + BLOCK_STRIDE)
    offsets = tl.load(plane + OFFSETS)
    if offsets != 0:
        table = offsets.to(tl.pointer_type(tl.int64)) + slot % size * tl.load(plane + UNITS)
        address = block + tl.load(table + element, mask=inside, other=0) * tl.load(plane + ITEM)
    else:
        run_units = tl.load(plane + RUN_UNITS)
        run = element // run_units
        address = block + slot % size * tl.load(plane + SLOT_STRIDE) + run * tl.load(plane + RUN)
        address += (element - run * run_units) * tl.load(plane + ELEMENT)
    return address


@triton.jit
def sum_of(
    plane: tl.tensor, slot: tl.tensor, key: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Return the checksum of a slot's row in a plane of elements of ``SIZE`` bytes, int64.

    It is keyed, and depends on the plane's part; a layer's checksum is the sum of its planes'.
    """
    PER: tl.constexpr = 8 // SIZE
    units = tl.load(plane + UNITS)
    part = tl.load(plane + PART)
    lane = tl.arange(0, PER).to(tl.int64)
    total = part * 0
    for at in range(0, (units + PER - 1) // PER, TILE):
        word = at + tl.arange(0, TILE).to(tl.int64)
        element = word[:, None] * PER + lane[None, :]
        inside = element < units
        value = tl.load(
            narrow_pointer(element_at(plane, slot, element, inside), SIZE), mask=inside, other=0
        )
        value = value.to(tl.int64)
        if SIZE < 8:
            value = value & ((1 << (8 * SIZE)) - 1)
        packed = tl.sum(value << (lane * (8 * SIZE))[None, :], axis=1)
        mixed = permute(packed + permute(word * RESERVED + part, key), key)
        total += tl.sum(tl.where(word * PER < units, mixed, 0), axis=0)
    return total


@triton.jit
def fill(plane: tl.tensor, slot: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr) -> None:
    """Set all bits of a slot's row, a NaN, in a plane of elements of ``SIZE`` bytes."""
    units = tl.load(plane + UNITS)
    for at in range(0, units, TILE):
        element = at + tl.arange(0, TILE).to(tl.int64)
        inside = element < units
        pointer = narrow_pointer(element_at(plane, slot, element, inside), SIZE)
        ones = (element * 0 - 1).to(pointer.dtype.element_ty)
        tl.store(pointer, ones, mask=inside)


@triton.jit
def clear(
    layer: tl.tensor, slot: tl.tensor, stay: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Set all bits of the inputs in a state's window that the next step does not read: a NaN.

    Those are the inputs before number ``stay``, and from ``stay`` plus the window's length on.
    """
    others = tl.load(layer + WINDOW_OTHERS)
    base = tl.load(layer + WINDOW) + slot * tl.load(layer + WINDOW_STRIDE)
    offsets = tl.load(layer + WINDOW_OFFSETS).to(tl.pointer_type(tl.int64))
    total = tl.load(layer + WINDOW_INPUTS) * others
    for at in range(0, total, TILE):
        element = at + tl.arange(0, TILE).to(tl.int64)
        number = element // others
        dead = (number < stay) | (number >= stay + tl.load(layer + WINDOW_LENGTH))
        dead = dead & (element < total)
        pointer = narrow_pointer(base + tl.load(offsets + element, mask=dead, other=0), SIZE)
        tl.store(pointer, (element * 0 - 1).to(pointer.dtype.element_ty), mask=dead)


@triton.jit(do_not_specialize=["own_stride", "num_lines", "journal_size", "violations", "capacity"])
def do_work(
    layers: tl.tensor,
    planes: tl.tensor,
    key: tl.tensor,
    seals: tl.tensor,
    work: tl.tensor,
    counts: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    journal: tl.tensor,
    found: tl.tensor,
    counters: tl.tensor,
    own_stride: tl.int64,
    num_lines: tl.int64,
    journal_size: tl.int64,
    violations: tl.int64,
    capacity: tl.int64,
    GROUPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compare, seal, fill or clear the listed slots in one layer. Grid: (PROGRAMS, layers).

    ``SEAL`` stores a slot's checksum; ``COMPARE`` reports one that differs, once for all layers,
    and takes the slot's seal away; ``FILL`` sets all bits in planes whose format has a NaN;
    ``CLEAR`` does so in the dead inputs of a layer's window. The program that ends last empties the
    list.

    Arguments are those of ``write_rows``, and:

        layers: int64 ``[num_layers, LAYER_FIELDS]``.
        planes: int64 ``[num_planes, PLANE_FIELDS]``.
        seals: int64 ``[num_words]``.
        work: int64 ``[capacity, ENTRY]``.
        counts: int64 ``[2]``, the entries listed, and 0; both 0 afterwards.
        found: int64 ``[violations, NUM_FIELDS]``.
        PROGRAMS: programs that share the entries.
        ENTRIES: journal entries at a time.
        TILE: words or elements at a time.
    """
    layer = layers + tl.program_id(1) * LAYER_FIELDS
    mine = tl.load(layer + LAYER_GROUP)
    sums = tl.load(layer + SUMS).to(tl.pointer_type(tl.int64))
    first = tl.load(layer + FIRST_PLANE)
    listed = tl.minimum(tl.load(counts + LISTED), capacity)
    for number in range(tl.program_id(0), listed, PROGRAMS):
        entry = work + number * ENTRY
        if tl.load(entry + GROUP) == mine:
            mode = tl.load(entry + MODE)
            slot = tl.load(entry + SLOT)
            total = slot * 0
            for each in range(0, tl.load(layer + NUM_PLANES)):
                plane = planes + (first + each) * PLANE_FIELDS
                item = tl.load(plane + ITEM)
                if mode == FILL:
                    if tl.load(plane + HAS_NAN) != 0:
                        if item == 1:
                            fill(plane, slot, 1, TILE)
                        elif item == 2:
                            fill(plane, slot, 2, TILE)
                        elif item == 4:
                            fill(plane, slot, 4, TILE)
                        else:
                            fill(plane, slot, 8, TILE)
                elif mode != CLEAR:
                    if item == 1:
                        total += sum_of(plane, slot, key, 1, TILE)
                    elif item == 2:
                        total += sum_of(plane, slot, key, 2, TILE)
                    elif item == 4:
                        total += sum_of(plane, slot, key, 4, TILE)
                    else:
                        total += sum_of(plane, slot, key, 8, TILE)
            if mode == SEAL:
                tl.store(sums + slot, total)
            elif mode == COMPARE:
                if tl.load(sums + slot) != total:
                    place = tl.load(entry + PLACE)
                    if tl.atomic_xchg(seals + place, place * 0) != 0:
                        record_violation(
                            CHANGED, tl.load(counters + STEP) + 1, tl.load(entry + LINE), mine,
                            tl.load(entry + POSITION), place, slot, IS_BYTES,
                            tl.load(layer + NUMBER), own, own_stride, facts, num_lines, journal,
                            journal_size, found, violations, counters, GROUPS, ENTRIES,
                        )  # fmt: skip
            elif (mode == CLEAR) & (tl.load(layer + WINDOW) != 0):
                stay = tl.load(entry + POSITION)
                item = tl.load(layer + WINDOW_ITEM)
                if item == 1:
                    clear(layer, slot, stay, 1, TILE)
                elif item == 2:
                    clear(layer, slot, stay, 2, TILE)
                elif item == 4:
                    clear(layer, slot, stay, 4, TILE)
                else:
                    clear(layer, slot, stay, 8, TILE)
    tl.debug_barrier()
    done = tl.atomic_add(counts + DONE, 1)
    if done == PROGRAMS * tl.num_programs(1) - 1:  # all others have read how many are listed
        tl.store(counts + LISTED, 0)
        tl.store(counts + DONE, 0)


@triton.jit(
    do_not_specialize=[
        "num_requests", "num_rows", "columns", "own_stride", "num_lines", "journal_size",
        "violations",
    ]
)  # fmt: skip
def find_nan(
    outputs: tl.tensor,
    rows: tl.tensor,
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    tables: tl.tensor,
    groups: tl.tensor,
    watched: tl.tensor,
    words: tl.tensor,
    nans: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    journal: tl.tensor,
    found: tl.tensor,
    counters: tl.tensor,
    num_requests: tl.int64,
    num_rows: tl.int64,
    columns: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    journal_size: tl.int64,
    violations: tl.int64,
    GROUPS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Look for a NaN in one output, and report its request, once. Grid: (n,).

    With it goes the first dead row that the request's tables name in a poisoned group, if any.
    Nothing is reported for a request that reads rows known to be wrong, nor for a negative number
    in ``rows``.

    Arguments are those of ``write_rows``, and:
        outputs: float ``[n, columns]``, contiguous.
        rows: int64 ``[n]``, the step's row of each output; -1: none.
        tables: int64 ``[GROUPS, NUM_TENSOR_FIELDS]`` of int32 tables; see ``plan.TENSOR``.
        watched: int64 ``[GROUPS, GROUP_FIELDS]``.
        nans: int64 ``[num_lines]``, exchanged atomically.
        found: int64 ``[violations, NUM_FIELDS]``.
        ENTRIES: journal entries at a time.
        TILE: numbers at a time.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    wrong = tl.zeros([TILE], dtype=tl.int32)
    if row >= 0:
        for at in range(0, columns, TILE):
            column = at + tl.arange(0, TILE).to(tl.int64)
            value = tl.load(outputs + number * columns + column, mask=column < columns, other=0.0)
            wrong = wrong | (value != value).to(tl.int32)
    if tl.max(wrong, axis=0) > 0:
        for index in range(0, num_requests):
            line, start, first, count, admitted, _skipped, _refused = rows_of(
                index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
            )
            if admitted & (start <= row) & (row < start + count):
                serial = tl.load(facts + SERIAL * num_lines + line) + 1
                if tl.atomic_xchg(nans + line, serial) != serial:
                    told = tl.load(facts + TELLING * num_lines + line) >= 0
                    group_found = serial * 0 - 1
                    place_found = serial * 0 - 1
                    slot_found = serial * 0 - 1
                    for each in tl.static_range(GROUPS):
                        is_read, table, width, block_map, length = table_of(tables, each, index)
                        poisoned = tl.load(watched + each * GROUP_FIELDS + POISONED)
                        if is_read & (poisoned != 0):
                            group = groups + each * FIELDS
                            size = tl.load(group + BLOCK_SIZE)
                            total = width * size
                            for at in range(0, total, TILE):
                                lane = at + tl.arange(0, TILE).to(tl.int64)
                                inside = lane < total
                                block, inside = block_of(
                                    lane // size, inside, table, block_map, length, group
                                )
                                place = tl.load(group + BASE) + block * tl.load(group + STRIDE)
                                place += lane % size
                                word = tl.load(words + place, mask=inside, other=0)
                                dead = inside & (word == REJECTED)
                                here = tl.min(tl.where(dead, lane, total), axis=0)
                                if (here < total) & (place_found < 0):
                                    it = lane == here
                                    group_found = group_found * 0 + each
                                    place_found = tl.sum(tl.where(it, place, 0), axis=0)
                                    offset = block * size + lane % size
                                    slot_found = tl.sum(tl.where(it, offset, 0), axis=0)
                    if told == 0:
                        record_violation(
                            CHANGED, tl.load(counters + STEP), line, group_found,
                            first + row - start, place_found, slot_found, IS_NAN, serial * 0 - 1,
                            own, own_stride, facts, num_lines, journal, journal_size, found,
                            violations, counters, GROUPS, ENTRIES,
                        )  # fmt: skip
