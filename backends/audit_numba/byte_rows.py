"""The slots of a step whose bytes are compared or sealed, and their checksums, compiled.

Arguments that the functions share are those of ``write_rows`` and ``compare_rows``, and:

    group: int64 ``[FIELDS]``, of the group that is read or written.
    seals: int64 ``[num_words]``, as in ``ByteBooks``.
    turn: the number of the last step.
    every: one slot in so many has its turn in each step.
"""

from __future__ import annotations

from typing import Final

import numpy

from ...audit import group_lines as line_of
from .compare_rows import first_read, run_of, table_of
from .machine_code import cached, compiled
from .requests import rows_of
from .words import permuted
from .write_rows import place_of

BASE, STRIDE, BLOCK_SIZE = line_of.BASE, line_of.STRIDE, line_of.BLOCK_SIZE
NUM_BLOCKS, RING, IS_STATE = line_of.NUM_BLOCKS, line_of.RING, line_of.IS_STATE
_BITS: Final = 8
_WORD_BYTES: Final = 8


@compiled
def is_due(where, words, seals):
    """Tell whether a slot is sealed and its word the one that it was sealed with.

    ``where`` is the index of the slot's word.
    """
    return seals[where] != 0 and seals[where] == words[where]


@compiled
def due_in_table(low, end, table, block_map, group, words, seals, turn, every, found, number):
    """List the sealed slots of a request's positions whose turn it is.

    Return ``number`` and their count. The positions are those from ``low`` to before ``end``.
    ``found``, int64 ``[n]``, gets the slots from place ``number`` on; if it is empty, they are
    counted alone.
    """
    position = low
    while position < end:
        where, run = run_of(position, end, table, block_map, group)
        if where >= 0:
            within = where - group[BASE]
            slot = within // group[STRIDE] * group[BLOCK_SIZE] + within % group[STRIDE]
            for ahead in range(-(slot + turn) % every, run, every):
                if is_due(where + ahead, words, seals):
                    if len(found):
                        found[number] = slot + ahead
                    number += 1
        position += run
    return number


@cached
def due_rows(
    requests,
    table,
    table_lines,
    block_map,
    group,
    words,
    facts,
    columns,
    num_rows,
    seals,
    turn,
    every,
):
    """Return the sealed slots whose turn it is, and that a step reads of one group; int64 ``[n]``.

    The rows of the step itself are left out. A slot that two requests read is there twice.
    """
    found = numpy.empty(0, numpy.int64)
    for _ in range(2):  # count them, then list them
        number = 0
        for index in range(len(requests[0])):
            _, _, at, count, _, _ = rows_of(index, requests, facts, columns, num_rows, False)
            if count:
                own = table_of(index, table, table_lines)
                number = due_in_table(
                    *(first_read(at, at + count, group), at, own, block_map, group),
                    *(words, seals, turn, every, found, number),
                )
        if number == 0 or len(found):
            break
        found = numpy.empty(number, numpy.int64)
    return found


@cached
def due_states(requests, source, group, words, facts, columns, num_rows, seals, turn, every):
    """Return the sealed states that a step continues and whose turn it is, int64 ``[n]``."""
    found, number = numpy.empty(len(requests[0]), numpy.int64), 0
    for index in range(len(requests[0])):
        _, _, at, count, _, _ = rows_of(index, requests, facts, columns, num_rows, False)
        block = source[index]
        if count == 0 or at == 0 or block < 0 or block >= group[NUM_BLOCKS]:
            continue
        where = group[BASE] + block * group[STRIDE]
        if (block + turn) % every == 0 and is_due(where, words, seals):
            found[number] = block
            number += 1
    return found[:number]


@cached
def slots_left(
    requests, accepted, besides, slots, group, words, facts, columns, num_rows, seals, turn, every
):
    """Seal the slots that a step leaves, and return them, int64 ``[n]``.

    A step leaves its settled rows and its accepted drafts: of rows that share a slot of a ring the
    last one, and of states those whose turn has come and that no accepted draft followed.

    ``requests``, ``columns`` and ``num_rows`` are those of ``write_rows``; ``words`` and
    ``facts`` lie in ``Books``; ``slots`` are those of ``group``, int64 ``[num_rows]``, -1: none.

    - ``accepted``: int64 ``[num_requests]``, counts of accepted drafts and ``besides`` more each, 1
      if they include the token sampled after the drafts, else 0.
    - ``seals``: int64 ``[num_words]``, written: the digest that each slot had when it was sealed.
    - ``turn``, ``every``: the number of the last step; one state in so many has its turn in a step.
    """
    found, number = numpy.empty(num_rows, numpy.int64), 0
    for index in range(len(requests[0])):
        _, start, _, count, taken, _ = rows_of(index, requests, facts, columns, num_rows, True)
        if count == 0:
            continue
        settled = count - taken
        stay = settled + min(max(accepted[index] - besides, 0), taken)
        for within in range(stay):
            slot = slots[start + within]
            where = place_of(slot, group, count - 1 - within)
            if where < 0:
                continue
            if group[IS_STATE]:
                last = within + 1 == stay or within + 1 < settled
                if not last or (slot + turn) % every:
                    continue
            seals[where] = words[where]
            found[number] = slot
            number += 1
    return found[:number]


@compiled
def packed(cells, begin, places, bits):
    """Return up to 8 bytes of a row as one word: the elements at ``places``, ``bits`` each.

    The first element has the lowest bits; ``places`` count from ``begin``.
    """
    mask, word = -1 if bits == 64 else (1 << bits) - 1, 0
    for part in range(len(places)):
        word |= (numpy.int64(cells[begin + places[part]]) & mask) << (bits * part)
    return word


@compiled
def packed_four(cells, begin, places):
    """Return four elements of 2 bytes, those of most caches, as one word, like ``packed``."""
    first, second = numpy.int64(cells[begin + places[0]]), numpy.int64(cells[begin + places[1]])
    third, fourth = numpy.int64(cells[begin + places[2]]), numpy.int64(cells[begin + places[3]])
    low = (first & 0xFFFF) | (second & 0xFFFF) << 16
    return low | (third & 0xFFFF) << 32 | fourth << 48


@cached
def add_checksums(cells, origin, strides, block_size, offsets, keys, key, slots, sums):
    """Add the checksums of slots in one plane, as ``kvtxn.audit.checksum`` defines them.

    Args:
        cells: ints of 1 to 8 bytes ``[n]``, the plane's memory.
        origin: the element in which the first block begins.
        strides: elements from block to block, and from slot to slot of a block.
        block_size: slots per block.
        offsets: int64 ``[block_size or 1, units]``, the place of each element of a row, from the
            begin of its slot.
        keys: int64 ``[words]``, added to each 8 bytes of a row before they are permuted.
        key: int64 ``[3]``.
        slots: int64 ``[num_slots]``.
        sums: int64 ``[num_slots]``, added to.
    """
    per_word = _WORD_BYTES // cells.itemsize
    bits, whole = _BITS * cells.itemsize, offsets.shape[1] // per_word
    for number in range(len(slots)):
        block, within = slots[number] // block_size, slots[number] % block_size
        begin = origin + block * strides[0] + within * strides[1]
        places, total = offsets[within % len(offsets)], 0
        done = 0
        if per_word == 4:
            for index in range(whole):
                word = packed_four(cells, begin, places[4 * index : 4 * index + 4])
                total += permuted(word + keys[index], key)
            done = whole
        for index in range(done, len(keys)):
            word = packed(cells, begin, places[per_word * index : per_word * (index + 1)], bits)
            total += permuted(word + keys[index], key)
        sums[number] += total
