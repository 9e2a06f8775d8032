"""The kernels that compare: rows with the digests of who reads them, and states.

Memory contract of ``compare_rows`` and ``compare_states``:

- ``words`` is read.
- ``first_position`` is written by ``compare_states`` if it is that of the books, each request's by
  its own program.
- ``facts`` are read, but for ``OUTSIDE``, where bits are set atomically, and ``TELLING``, which no
  program reads here: a request is told of a wrong row by each program that sees one.
- ``own`` and ``journal`` are read, ``found`` is written by ``reports.record_violation`` alone.
- ``counters`` and ``ages`` are added to atomically.
- Padding and malformed requests are left out, as by ``write_rows``.
- A table is read up to its width, at the request's line; a column beyond, a line that the table
  does not have, or a block outside the group, leads nowhere and counts as unwritten. The line is
  read at the request's number from the address that the plan has beside the table's own, and a
  map of blocks from 0 up to its length. Every address is computed in int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines, passes
from .plan import (
    AT_ADDRESS,
    AT_BLOCK_MAP,
    AT_COLUMNS,
    AT_LINES,
    AT_MAP_LENGTH,
    AT_STRIDE,
    AT_TABLE_LINES,
    NUM_TENSOR_FIELDS,
)
from .reports import (
    IS_COUNT,
    IS_DRAFT,
    IS_FOREIGN,
    IS_OWNER,
    IS_REJECTED,
    IS_STALE,
    IS_UNWRITTEN,
    STATE,
    record_violation,
)
from .requests import fill_first, rows_of
from .words import REJECTED, TARGET_AGE, UNWRITTEN, age_of, as_word

STEP = tl.constexpr(book.STEP)
ROWS_CHECKED = tl.constexpr(book.ROWS_CHECKED)
STATES_CHECKED = tl.constexpr(book.STATES_CHECKED)
EPOCH = tl.constexpr(book.EPOCH)
ALARM = tl.constexpr(book.ALARM)
ROWS = tl.constexpr(book.ROWS)
DRAFT_ROWS = tl.constexpr(book.DRAFT_ROWS)
STATES = tl.constexpr(book.STATES)
NUM_AGED = tl.constexpr(book.NUM_AGED)
AGES = tl.constexpr(book.AGES)
SERIAL = tl.constexpr(book.SERIAL)
DURABLE = tl.constexpr(book.DURABLE)
KEPT = tl.constexpr(book.KEPT)
OUTSIDE = tl.constexpr(book.OUTSIDE)
TOLD = tl.constexpr(book.TOLD)
TELLING = tl.constexpr(book.TELLING)
TOLD_STALE = tl.constexpr(book.TOLD_STALE)
TELLING_STALE = tl.constexpr(book.TELLING_STALE)
RUN = tl.constexpr(passes.RUN)

BASE = tl.constexpr(group_lines.BASE)
STRIDE = tl.constexpr(group_lines.STRIDE)
BLOCK_SIZE = tl.constexpr(group_lines.BLOCK_SIZE)
NUM_BLOCKS = tl.constexpr(group_lines.NUM_BLOCKS)
WINDOW = tl.constexpr(group_lines.WINDOW)
CHUNK = tl.constexpr(group_lines.CHUNK)
RING = tl.constexpr(group_lines.RING)
SALT = tl.constexpr(group_lines.SALT)
IS_STATE = tl.constexpr(group_lines.IS_STATE)
OWNERS = tl.constexpr(group_lines.OWNERS)
AGED_BY = tl.constexpr(group_lines.AGED_BY)
FIELDS = tl.constexpr(group_lines.FIELDS)


@triton.jit
def table_of(
    tables: tl.tensor, number: tl.tensor, index: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the line of a group's table that is a request's.

    Args:
        tables: int64 ``[GROUPS, NUM_TENSOR_FIELDS]`` of int32 tables; see ``plan.TENSOR``.
        number: the group's number.
        index: the request's number in the step.

    Returns:
        True if the group is read; a pointer to int32 ``[width]``; the width, which is 0 where the
        table does not have the line; the address of int64 ``[length]``, the block that each number
        in the table stands for, or 0; and the length.
    """
    entry = tables + number * NUM_TENSOR_FIELDS
    address = tl.load(entry + AT_ADDRESS)
    named = tl.load(entry + AT_TABLE_LINES)
    line = index + address * 0
    if named != 0:
        line = tl.load(named.to(tl.pointer_type(tl.int64)) + index)
    inside = (line >= 0) & (line < tl.load(entry + AT_LINES))
    line = tl.where(inside, line, 0)
    width = tl.where(inside, tl.load(entry + AT_COLUMNS), 0)
    table = address.to(tl.pointer_type(tl.int32)) + line * tl.load(entry + AT_STRIDE)
    block_map, length = tl.load(entry + AT_BLOCK_MAP), tl.load(entry + AT_MAP_LENGTH)
    return address != 0, table, width, block_map, length


@triton.jit
def block_of(
    column: tl.tensor,
    inside: tl.tensor,
    table: tl.tensor,
    block_map: tl.tensor,
    length: tl.tensor,
    group: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the blocks that columns of a table lead to, 0 for none; and where there is one.

    Args:
        column: int64 ``[TILE]``.
        inside: bool ``[TILE]``, the columns that the table has.
        table: as from ``table_of``; so are ``block_map`` and ``length``.
        block_map: likewise.
        length: likewise.
        group: the group's line of the plan.
    """
    block = tl.load(table + column, mask=inside, other=-1).to(tl.int64)
    if block_map != 0:
        known = inside & (block >= 0) & (block < length)
        block = tl.load(block_map.to(tl.pointer_type(tl.int64)) + block, mask=known, other=-1)
    inside = inside & (block >= 0) & (block < tl.load(group + NUM_BLOCKS))
    return tl.where(inside, block, 0), inside


@triton.jit
def table_place(group: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return each position's place in the block table: its position in a ring, 0 for a state.

    Elsewhere it is the position itself. The block's size divides it into column and offset.
    """
    ring = tl.load(group + RING)
    at = tl.where(ring > 0, position % tl.maximum(ring, 1), position)
    return tl.where(tl.load(group + IS_STATE) != 0, 0, at)


@triton.jit
def first_read(group: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Return the first position that a query at ``first`` reads of a step's rows up to ``end``.

    The sliding window, the chunk and the ring of the group bound it; 0 without any of them.
    """
    window = tl.load(group + WINDOW)
    chunk = tl.load(group + CHUNK)
    ring = tl.load(group + RING)
    low = tl.where(window > 0, tl.maximum(first - window + 1, 0), 0)
    by_chunk = first // tl.maximum(chunk, 1) * chunk
    low = tl.maximum(low, tl.where(chunk > 0, by_chunk, 0))
    return tl.maximum(low, tl.where(ring > 0, end - ring, 0))


@triton.jit
def judge(
    position: tl.tensor,
    live: tl.tensor,
    table: tl.tensor,
    width: tl.tensor,
    block_map: tl.tensor,
    length: tl.tensor,
    group: tl.tensor,
    digests: tl.tensor,
    words: tl.tensor,
    durable: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Look rows up through a block table, and compare their words with the reader's digests.

    Args:
        position: int64 ``[RUN]``.
        live: bool ``[RUN]``.
        table: pointer to the request's int32 ``[width]``.
        width: columns.
        block_map: as from ``table_of``; so is ``length``.
        length: likewise.
        group: the group's line of the plan.
        digests: pointer to the digests of the request that reads.
        words: int64 ``[num_words]``.
        durable: positions from here on count as drafts.

    Returns:
        A number of ``FOUND`` per row, -1 where it is in order; where its word lies, -1 where the
        table leads nowhere; and the word less the one that is expected. A stale row is foreign
        here: see ``judge_ages``.
    """
    size = tl.load(group + BLOCK_SIZE)
    at = table_place(group, position)
    column = at // size
    block, inside = block_of(column, live & (column < width), table, block_map, length, group)
    place = tl.load(group + BASE) + block * tl.load(group + STRIDE) + at % size
    word = tl.load(words + place, mask=inside, other=UNWRITTEN)
    wanted = as_word(tl.load(digests + position + 1, mask=live, other=0) + tl.load(group + SALT))
    code = tl.where(position >= durable, IS_DRAFT, -1)
    wrong = tl.where(word == REJECTED, IS_REJECTED, IS_FOREIGN)
    wrong = tl.where(word == UNWRITTEN, IS_UNWRITTEN, wrong)
    code = tl.where(word == wanted, code, wrong)
    code = tl.where(live, code, -1)
    return code, tl.where(inside, place, -1), word - wanted


@triton.jit
def judge_ages(
    code: tl.tensor,
    apart: tl.tensor,
    position: tl.tensor,
    durable: tl.tensor,
    told: tl.tensor,
    group: tl.tensor,
    counters: tl.tensor,
    STEPPING: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Judge rows of earlier weights as right; if a step reads them and shall alarm, ``IS_STALE``.

    Args:
        code: of ``judge``, ``[RUN]``.
        apart: of ``judge``, int64 ``[RUN]``.
        position: int64 ``[RUN]``.
        durable: positions from here on count as drafts.
        told: the request's ``TOLD_STALE``; unread unless ``STEPPING``.
        group: the group's line of the plan.
        counters: of the books.
        STEPPING: a step reads the rows.

    Returns:
        Numbers of ``FOUND``, -1 for a right row and ``IS_DRAFT`` for a right draft; and ages, int64
        ``[RUN]``, as far as they concern the group, else 0.
    """
    age = tl.where(code == IS_FOREIGN, age_of(apart, tl.load(counters + EPOCH)), 0)
    right = tl.where(position >= durable, IS_DRAFT, -1)
    stale = age & tl.load(group + AGED_BY)
    if STEPPING:
        stale = tl.where(position < told, 0, stale)
        right = tl.where((stale > 0) & (tl.load(counters + ALARM) != 0), IS_STALE, right)
    return tl.where(age > 0, right, code), stale


@triton.jit
def count_age(
    ages: tl.tensor, line: tl.tensor, KIND: tl.constexpr, age: tl.tensor, number: tl.tensor
) -> None:
    """Add ``number`` to the reads of one age by the request of a line; nothing of age 0.

    Ages beyond the last column count there.

    Pointers:
        ages: int64 ``[num_lines + 1, NUM_AGED, AGES]``.
    """
    at = (line * NUM_AGED + KIND) * AGES + tl.minimum(age, AGES) - 1
    tl.atomic_add(ages + at, number, mask=age > 0)


@triton.jit(
    do_not_specialize=["kind", "num_rows", "own_stride", "num_lines", "journal_size", "capacity"]
)
def compare_rows(
    lines: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    tables: tl.tensor,
    groups: tl.tensor,
    words: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    journal: tl.tensor,
    found: tl.tensor,
    counters: tl.tensor,
    ages: tl.tensor,
    kind: tl.int64,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    journal_size: tl.int64,
    capacity: tl.int64,
    STEPPING: tl.constexpr,
    EXPORTED: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compare what one request reads through one group. Grid: (requests, GROUPS, SPLITS).

    A run of wrong rows is one violation. Reads of earlier epochs are added to ``ages``, all rows to
    ``ROWS_CHECKED``. ``TELLING`` is raised to the end of what was wrong, so that the next steps do
    not report it again; not by what is wrong in an export.

    Arguments are those of ``write_rows``, and:
        low: int ``[num_requests]``, the first position of a stretch; if ``STEPPING`` that of the
            request's first row.
        high: int ``[num_requests]``, the position after a stretch; if ``STEPPING`` the ``starts``
            of a step, int ``[num_requests + 1]``.
        tables: int64 ``[GROUPS, NUM_TENSOR_FIELDS]`` of int32 tables; see ``plan.TENSOR``.
        found: int64 ``[capacity, NUM_FIELDS]``.
        ages: int64 ``[num_lines + 1, NUM_AGED, AGES]``; unread unless ``STEPPING``.
        kind: of the violations; -1: by what was found.
        num_rows: unread unless ``STEPPING``.
        STEPPING: a step reads, so only rows that its groups' queries see are compared.
        EXPORTED: every row must be durable.
        SPLITS: programs that share a request's rows of a group.
        TILE: journal entries at a time.
    """
    index = tl.program_id(0)
    number = tl.program_id(1)
    group = groups + number * FIELDS
    is_read, table, width, block_map, length = table_of(tables, number, index)
    if STEPPING:
        line, _start, first, count, admitted, _skipped, _refused = rows_of(
            index, lines, high, low, facts, num_lines, own_stride, num_rows
        )
        end = first + count
        seen = first_read(group, first, end)
        first = tl.maximum(seen, tl.load(facts + TOLD * num_lines + line))
    else:
        given = tl.load(lines + index).to(tl.int64)
        line = tl.where((given >= 0) & (given < num_lines), given, 0)
        admitted = (line == given) & (tl.load(facts + SERIAL * num_lines + line) >= 0)
        first = tl.maximum(tl.load(low + index).to(tl.int64), 0)
        end = tl.minimum(tl.load(high + index).to(tl.int64), own_stride - 1)
    end = tl.where(admitted & is_read, end, 0)
    digests = own + line * own_stride
    told = line * 0 - 1
    if STEPPING:
        told = tl.load(facts + TOLD_STALE * num_lines + line)
    durable = own_stride + 0
    if EXPORTED:
        durable = tl.load(facts + DURABLE * num_lines + line)
    begin = first // RUN * RUN + tl.program_id(2) * RUN
    for at in range(begin, end, SPLITS * RUN):
        position = at + tl.arange(0, RUN).to(tl.int64)
        live = (position >= first) & (position < end)
        code, place, apart = judge(
            position, live, table, width, block_map, length, group, digests, words, durable
        )
        age = position * 0
        if tl.max(code, axis=0) >= 0:
            code, age = judge_ages(code, apart, position, durable, told, group, counters, STEPPING)
            if STEPPING:
                left_to_count = age
                while tl.max(left_to_count, axis=0) > 0:
                    one = tl.max(left_to_count, axis=0)
                    of_one = left_to_count == one
                    number_of_one = tl.sum(of_one.to(tl.int64), axis=0)
                    count_age(ages, line, ROWS, one & TARGET_AGE, number_of_one)
                    count_age(ages, line, DRAFT_ROWS, one >> 32, number_of_one)
                    left_to_count = tl.where(of_one, 0, left_to_count)
        if tl.max(code, axis=0) >= 0:
            size = tl.load(group + BLOCK_SIZE)
            inner = live & (position > first) & (position % RUN != 0)
            inner = inner & (table_place(group, position) % size != 0)
            before, _, apart = judge(
                position - 1, inner, table, width, block_map, length, group, digests, words, durable
            )
            before, _ = judge_ages(
                before, apart, position - 1, durable, told, group, counters, STEPPING
            )
            heads = ((code >= 0) & ((inner & (before == code)) == 0)).to(tl.int32)
            left = tl.sum(heads, axis=0)
            while left > 0:
                here = tl.min(tl.where(heads != 0, position, end), axis=0)
                lane = position == here
                what = tl.sum(tl.where(lane, code, 0), axis=0).to(tl.int64)
                where = tl.sum(tl.where(lane, place, 0), axis=0)
                aged = tl.sum(tl.where(lane, age, 0), axis=0)
                aged = tl.where(what == IS_STALE, aged, -1)
                is_new = tl.full((), True, tl.int1)
                if STEPPING:  # noqa: SIM102 - one is known when this is compiled, the other is not
                    if where < 0:
                        bit = number % 63
                        outside = facts + OUTSIDE * num_lines + line
                        bits = tl.atomic_or(outside, (line * 0 + 1) << bit)
                        is_new = ((bits >> bit) & 1) == 0
                if is_new:
                    base = tl.load(group + BASE)
                    rows = tl.load(group + STRIDE)
                    slot = (where - base) // rows * size + (where - base) % rows
                    slot = tl.where(where >= 0, slot, -1)
                    record_violation(
                        tl.where(kind < 0, what, kind), tl.load(counters + STEP), line,
                        number, here, where, slot, what, aged, own, own_stride, facts,
                        num_lines, journal, journal_size, found, capacity, counters, GROUPS, TILE,
                    )  # fmt: skip
                heads = tl.where(lane, 0, heads)
                left -= 1
            if not EXPORTED:  # who exports a wrong row may go on, and is compared as before
                if tl.max(tl.where(code == IS_STALE, -1, code), axis=0) >= 0:
                    tl.atomic_max(facts + TELLING * num_lines + line, end)
                if tl.max(tl.where(code == IS_STALE, code, -1), axis=0) >= 0:
                    tl.atomic_max(facts + TELLING_STALE * num_lines + line, end)
    mine = tl.maximum(end - first, 0)
    if tl.program_id(2) == 0:
        tl.atomic_add(counters + ROWS_CHECKED, mine)


@triton.jit(do_not_specialize=["num_rows", "own_stride", "num_lines", "journal_size", "capacity"])
def compare_states(
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    positions: tl.tensor,
    sources: tl.tensor,
    told: tl.tensor,
    groups: tl.tensor,
    words: tl.tensor,
    owners: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    journal: tl.tensor,
    found: tl.tensor,
    counters: tl.tensor,
    ages: tl.tensor,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    journal_size: tl.int64,
    capacity: tl.int64,
    TOLD: tl.constexpr,
    FILLS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compare the states that one request goes on from, and its count. Grid: (requests,).

    A state has to be written, of the tokens before the step, and not owned by another request;
    ``told`` has to be the number of drafts kept last. What is not is reported. ``STATES_CHECKED``
    and ``ages`` are added to.

    Arguments are those of ``compare_rows``, and:

        starts: int ``[num_requests + 1]``.
        first_position: int ``[num_requests]``.
        positions: int ``[num_rows]``; unread unless ``FILLS``.
        sources: int64 ``[GROUPS, NUM_TENSOR_FIELDS]`` of ``[num_requests]``; see ``plan.TENSOR``.
        told: int ``[num_requests]``; unread unless ``TOLD``.
        owners: int64 ``[num_states]``.
        FILLS: ``first_position`` is that of the books, and is filled from ``positions`` at first.
    """
    index = tl.program_id(0)
    if FILLS:
        fill_first(index, starts, first_position, positions, num_rows)
    line, _start, first, count, admitted, _skipped, _refused = rows_of(
        index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
    )
    if admitted & (count > 0):
        step = tl.load(counters + STEP) + 1
        serial = tl.load(facts + SERIAL * num_lines + line)
        nowhere = first * 0 - 1
        for number in tl.static_range(GROUPS):
            address = tl.load(sources + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
            if address != 0:
                group = groups + number * FIELDS
                block = tl.load(address.to(tl.pointer_type(tl.int64)) + index)
                if (first > 0) | (block >= 0):  # else it begins without a state
                    inside = (block >= 0) & (block < tl.load(group + NUM_BLOCKS))
                    place = tl.load(group + BASE) + block * tl.load(group + STRIDE)
                    place = tl.where(inside, place, -1)
                    word = tl.load(words + place, mask=inside, other=UNWRITTEN)
                    owner = tl.load(owners + tl.load(group + OWNERS) + block, mask=inside, other=-1)
                    digest = tl.load(own + line * own_stride + first)
                    apart = word - as_word(digest + tl.load(group + SALT))
                    age = age_of(apart, tl.load(counters + EPOCH))
                    right = (apart == 0) | (age > 0)
                    age = age & TARGET_AGE
                    alarms = (age > 0) & (tl.load(counters + ALARM) != 0)
                    code = tl.where(alarms, IS_STALE, -1)
                    code = tl.where((owner >= 0) & (owner != serial), IS_OWNER, code)
                    wrong = tl.where(word == REJECTED, IS_REJECTED, IS_FOREIGN)
                    wrong = tl.where(word == UNWRITTEN, IS_UNWRITTEN, wrong)
                    code = tl.where(right, code, wrong).to(tl.int64)
                    count_age(ages, line, STATES, age, age * 0 + 1)
                    if code >= 0:
                        record_violation(
                            tl.where(code == IS_STALE, code, STATE), step, line, number, first - 1,
                            place, tl.where(inside, block, -1), code,
                            tl.where(code == IS_STALE, age, nowhere), own, own_stride, facts,
                            num_lines, journal, journal_size, found, capacity, counters, GROUPS,
                            TILE,
                        )  # fmt: skip
                    tl.atomic_add(counters + STATES_CHECKED, 1)
        if TOLD:
            count_told = tl.load(told + index).to(tl.int64)
            kept = tl.load(facts + KEPT * num_lines + line)
            wrong_count = (count_told >= 0) & (kept >= 0) & (count_told != kept)
            if wrong_count & (first > 0):
                record_violation(
                    STATE, step, line, -1, first - 1, nowhere, nowhere, IS_COUNT, nowhere, own,
                    own_stride, facts, num_lines, journal, journal_size, found, capacity, counters,
                    GROUPS, TILE,
                )  # fmt: skip
