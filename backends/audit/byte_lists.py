"""The kernels that list the slots whose bytes a step compares, seals or fills.

Memory contract of both: they write ``work`` (its entries, from 0 up to its capacity) and add to
``counts`` atomically; ``list_written`` also writes ``seals`` where it lists a slot to be sealed.
All else is read. Distinct programs list distinct rows. Padding and malformed requests list nothing;
every address is computed in int64 and lies inside, as in ``write_kernel``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines, passes
from . import byte_plan
from .compare_kernel import block_of, first_read, table_of, table_place
from .plan import AT_ADDRESS, NUM_TENSOR_FIELDS
from .requests import fill_first, rows_of

STEP = tl.constexpr(book.STEP)
RUN = tl.constexpr(passes.RUN)
BASE = tl.constexpr(group_lines.BASE)
STRIDE = tl.constexpr(group_lines.STRIDE)
BLOCK_SIZE = tl.constexpr(group_lines.BLOCK_SIZE)
NUM_BLOCKS = tl.constexpr(group_lines.NUM_BLOCKS)
RING = tl.constexpr(group_lines.RING)
IS_STATE = tl.constexpr(group_lines.IS_STATE)
FIELDS = tl.constexpr(group_lines.FIELDS)
SOURCE = tl.constexpr(byte_plan.SOURCE)
WATCHED = tl.constexpr(byte_plan.WATCHED)
POISONED = tl.constexpr(byte_plan.POISONED)
GROUP_FIELDS = tl.constexpr(byte_plan.GROUP_FIELDS)

#: int64 columns of an entry of ``work``.
MODE = tl.constexpr(0)
GROUP = tl.constexpr(1)
SLOT = tl.constexpr(2)
PLACE = tl.constexpr(3)
LINE = tl.constexpr(4)
POSITION = tl.constexpr(5)
ENTRY = tl.constexpr(6)

#: What is done with an entry. For a window, the slot is its state, and the position the accepted
#: count.
COMPARE = tl.constexpr(1)
SEAL = tl.constexpr(2)
FILL = tl.constexpr(3)
CLEAR = tl.constexpr(4)

#: Indices into ``counts``: the entries listed, and the programs of ``do_work`` that have ended.
LISTED = tl.constexpr(0)
DONE = tl.constexpr(1)


@triton.jit
def add(
    wanted: tl.tensor,
    mode: tl.tensor,
    group: tl.tensor,
    slot: tl.tensor,
    place: tl.tensor,
    line: tl.tensor,
    position: tl.tensor,
    work: tl.tensor,
    counts: tl.tensor,
    capacity: tl.tensor,
) -> tl.tensor:
    """Append an entry to ``work`` for each lane of ``wanted``; return the lanes that had room.

    ``counts`` counts the lanes without room, too. The other arguments are the entry's fields.
    """
    each = tl.where(wanted, position * 0 + 1, 0)
    begin = tl.atomic_add(counts + LISTED, tl.sum(each, axis=0))
    at = begin + tl.cumsum(each, axis=0) - 1
    fits = wanted & (at < capacity)
    entry = work + at * ENTRY
    tl.store(entry + MODE, at * 0 + mode, mask=fits)
    tl.store(entry + GROUP, group + at * 0, mask=fits)
    tl.store(entry + SLOT, slot, mask=fits)
    tl.store(entry + PLACE, place, mask=fits)
    tl.store(entry + LINE, line + at * 0, mask=fits)
    tl.store(entry + POSITION, position, mask=fits)
    return fits


@triton.jit(do_not_specialize=["num_rows", "own_stride", "num_lines", "every", "capacity"])
def list_reads(
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    sources: tl.tensor,
    groups: tl.tensor,
    watched: tl.tensor,
    words: tl.tensor,
    seals: tl.tensor,
    facts: tl.tensor,
    counters: tl.tensor,
    work: tl.tensor,
    counts: tl.tensor,
    compared: tl.tensor,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    every: tl.int64,
    capacity: tl.int64,
    FILLS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """List the sealed slots before the step's rows that a request reads and whose turn it is.

    An entry ``COMPARE`` is appended to ``work`` for each slot whose seal is its word, and whose
    number plus the step's is a multiple of ``every``. Beyond ``capacity`` nothing is appended;
    ``counts`` counts it, ``compared`` does not.

    Grid: (requests, groups, SPLITS). Arguments are those of ``compare_rows``, and:

        positions: int ``[num_rows]``; unread unless ``FILLS``.
        FILLS: as for ``compare_states``: ``first_position`` is filled first.
        sources: int64 ``[GROUPS, NUM_TENSOR_FIELDS]`` of ``[num_requests]``; see ``plan.TENSOR``.
        watched: int64 ``[GROUPS, GROUP_FIELDS]``.
        seals: int64 ``[num_words]``.
        work: int64 ``[capacity, ENTRY]``.
        counts: int64 ``[2]``, the entries wanted; 0 before the launch.
        compared: int64 ``[1]``, added to.
        every: one slot in so many has its turn.
        capacity: entries.
    """
    index = tl.program_id(0)
    number = tl.program_id(1)
    group = groups + number * FIELDS
    source = tl.load(watched + number * GROUP_FIELDS + SOURCE)
    is_state = tl.load(group + IS_STATE) != 0
    if FILLS:
        fill_first(index, starts, first_position, positions, num_rows)
    line, _start, first, count, admitted, _skipped, _refused = rows_of(
        index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
    )
    has_rows, table, width, block_map, length = table_of(tables, number, index)
    state_at = tl.load(sources + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
    wanted = admitted & (tl.load(watched + number * GROUP_FIELDS + WATCHED) != 0)
    end = tl.where(wanted & (count > 0), first, 0)
    low = first_read(group, first, first + count)
    low = tl.where(is_state, tl.maximum(first - 1, 0), low)
    end = tl.where(tl.where(is_state, state_at != 0, has_rows), end, 0)
    width = tl.where(is_state, 1, width)
    turn = tl.load(counters + STEP)
    size = tl.load(group + BLOCK_SIZE)
    blocks = tl.load(group + NUM_BLOCKS)
    begin = low // RUN * RUN + tl.program_id(2) * RUN
    for at in range(begin, end, SPLITS * RUN):
        position = at + tl.arange(0, RUN).to(tl.int64)
        live = (position >= low) & (position < end)
        seen = table_place(group, position)
        column = seen // size
        inside = live & (column < width)
        if is_state:
            block = tl.load(
                state_at.to(tl.pointer_type(tl.int64)) + index + column * 0, mask=inside, other=-1
            )
        else:
            block, inside = block_of(column, inside, table, block_map, length, group)
        inside = inside & (block >= 0) & (block < blocks)
        block = tl.where(inside, block, 0)
        place = tl.load(group + BASE) + block * tl.load(group + STRIDE) + seen % size
        slot = block * size + seen % size
        seal = tl.load(seals + place, mask=inside, other=0)
        due = inside & (seal != 0) & (seal == tl.load(words + place, mask=inside, other=0))
        due = due & ((slot + turn) % every == 0)
        due = add(due, COMPARE, source, slot, place, line, position, work, counts, capacity)
        tl.atomic_add(compared, tl.sum(due.to(tl.int64), axis=0))


@triton.jit(
    do_not_specialize=["num_rows", "own_stride", "num_lines", "every", "capacity", "besides"]
)
def list_written(
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    drafts: tl.tensor,
    accepted: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    watched: tl.tensor,
    words: tl.tensor,
    seals: tl.tensor,
    facts: tl.tensor,
    counters: tl.tensor,
    work: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    every: tl.int64,
    capacity: tl.int64,
    besides: tl.int64,
    DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """List the slots that a step leaves, to be sealed, and the dead ones, to be filled.

    A slot that is listed to be sealed gets its word as its seal at once. States that stay are
    listed in their turn alone. Dead slots are listed in groups that are poisoned; each request
    there that writes a state also gets an entry ``CLEAR`` with its number of kept drafts. Beyond
    ``capacity`` nothing is appended, sealed or filled.

    Grid: (requests, groups). Arguments are those of ``resolve_rows`` and of ``list_reads``.
    """
    index = tl.program_id(0)
    number = tl.program_id(1)
    group = groups + number * FIELDS
    line, start, _first, count, _admitted, _skipped, _refused = rows_of(
        index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
    )
    address = tl.load(slots + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
    own = tl.load(watched + number * GROUP_FIELDS + SOURCE) == number
    wanted = own & (tl.load(watched + number * GROUP_FIELDS + WATCHED) != 0) & (address != 0)
    if wanted & (count > 0):
        poisoned = tl.load(watched + number * GROUP_FIELDS + POISONED)
        taken = count * 0
        if DRAFTS:
            taken = tl.load(drafts + index).to(tl.int64)
            taken = tl.minimum(tl.maximum(taken, 0), count)
        stay = tl.load(accepted + index).to(tl.int64) - besides
        stay = tl.minimum(tl.maximum(stay, 0), taken)
        settled = count - taken
        written = address.to(tl.pointer_type(tl.int64)) + start
        is_state = tl.load(group + IS_STATE) != 0
        size = tl.load(group + BLOCK_SIZE)
        limit = tl.load(group + NUM_BLOCKS) * size
        ring = tl.load(group + RING)
        turn = tl.load(counters + STEP)
        kept_slot = tl.load(written + tl.maximum(settled + stay - 1, 0))
        for at in range(0, count, TILE):
            within = at + tl.arange(0, TILE).to(tl.int64)
            live = within < count
            slot = tl.load(written + within, mask=live, other=-1)
            inside = live & (slot >= 0) & (slot < limit)
            inside = inside & (within + tl.where(ring < 0, count, ring) >= count)
            slot = tl.where(inside, slot, 0)
            place = tl.load(group + BASE) + slot // size * tl.load(group + STRIDE) + slot % size
            alive = within < settled + stay
            dead = within >= settled + stay
            if is_state:
                last = within + 1 == settled + stay
                dead = (
                    (within + 1 >= settled) & (within + 1 != settled + stay) & (slot != kept_slot)
                )
                alive = (last | (within + 1 < settled)) & ((slot + turn) % every == 0)
            sealed = inside & alive
            sealed = add(sealed, SEAL, number, slot, place, line, within, work, counts, capacity)
            word = tl.load(words + place, mask=sealed, other=0)
            tl.store(seals + place, word, mask=sealed)
            can_fill = inside & (slot * 0 + poisoned != 0)
            filled = can_fill & dead
            add(filled, FILL, number, slot, place, line, within, work, counts, capacity)
            if is_state:
                head = can_fill & (within + 1 == settled)
                count_kept = stay + within * 0
                add(head, CLEAR, number, slot, place, line, count_kept, work, counts, capacity)
