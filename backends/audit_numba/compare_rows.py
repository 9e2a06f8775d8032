"""The reads of a step, compiled: they are counted, and all of them right or not.

None of these functions reports or changes anything. Where something is wrong, the passes in torch
look at the whole step again, and report it. Arguments are those of ``write_rows``, and:

    tables: for each group, int32 ``[num_requests, blocks]``; without lines: the group is not read.
    table_lines: int64 ``[num_requests]``, each request's line of the tables; empty: its own number.
    block_maps: for each group, int64 ``[n]``, the block that a number in its table stands for;
        empty: itself.
    sources: for each group, int64 ``[num_requests]``; empty: the step continues no states there.
    told: int64 ``[num_requests]``; empty: the engine never says.

Each returns the number of rows or states that were compared; -1 if one of them is not right.
"""

from __future__ import annotations

from ...audit import books as book
from ...audit import group_lines as line_of
from .machine_code import cached, compiled
from .requests import rows_of
from .words import as_word

SERIAL, DURABLE, KEPT, TOLD = book.SERIAL, book.DURABLE, book.KEPT, book.TOLD
BASE, STRIDE, BLOCK_SIZE = line_of.BASE, line_of.STRIDE, line_of.BLOCK_SIZE
NUM_BLOCKS, RING, SALT = line_of.NUM_BLOCKS, line_of.RING, line_of.SALT
WINDOW, CHUNK, OWNERS = line_of.WINDOW, line_of.CHUNK, line_of.OWNERS


@compiled
def first_read(first, end, group):
    """Return the first position that a query at ``first`` reads of a step's rows up to ``end``.

    The sliding window, the chunk and the ring of the group bound it; 0 without any of them.
    """
    low = 0
    if group[WINDOW] >= 0:
        low = max(low, first - group[WINDOW] + 1)
    if group[CHUNK] >= 0:
        low = max(low, first // group[CHUNK] * group[CHUNK])
    if group[RING] >= 0:
        low = max(low, end - group[RING])
    return low


@compiled
def table_of(index, table, table_lines):
    """Return a request's line of a table; without columns if the table has no such line."""
    line = table_lines[index] if len(table_lines) else index
    return table[line] if 0 <= line < len(table) else table[0][:0]


@compiled
def run_of(position, end, table, block_map, group):
    """Return the index of a position's word, and how many positions from there on follow it.

    Positions of one block have neighbouring words. The index is -1 if the table leads outside.
    """
    size, at, run = group[BLOCK_SIZE], position, end - position
    if group[RING] >= 0:
        at = position % group[RING]
        run = min(run, group[RING] - at)
    column, within = at // size, at % size
    run = min(run, size - within)
    block = table[column] if column < len(table) else -1
    if len(block_map):
        block = block_map[block] if 0 <= block < len(block_map) else -1
    if block < 0 or block >= group[NUM_BLOCKS]:
        return -1, run
    return group[BASE] + block * group[STRIDE] + within, run


@compiled
def are_right(first, end, digests, table, block_map, group, words):
    """Tell whether the words of positions ``first`` to before ``end`` are those of ``digests``.

    False, too, where the table leads to no block.
    """
    position, salt = first, group[SALT]
    while position < end:
        where, run = run_of(position, end, table, block_map, group)
        if where < 0:
            return False
        wrong = 0
        for number in range(run):
            word = words[where + number]
            wanted = as_word(digests[position + number + 1] + salt)
            wrong += word != wanted
        if wrong:
            return False
        position += run
    return True


@cached
def compare_rows(requests, tables, table_lines, block_maps, groups, words, own, facts, num_rows):
    """Compare the rows that a step reads in every group with the readers' digests.

    Rows before the end of what was reported of a request are left out. Returns the number of rows,
    or -1 at the first that is not right; nothing is reported. See ``Passes.check``.
    """
    compared = 0
    for index in range(len(requests[0])):
        line, _, at, count, _, _ = rows_of(index, requests, facts, own.shape[1], num_rows, False)
        if count == 0:
            continue
        for number in range(len(tables)):
            if tables[number].shape[0] == 0:
                continue
            group, end = groups[number], at + count
            low = max(first_read(at, end, group), facts[TOLD, line])
            table = table_of(index, tables[number], table_lines)
            block_map = block_maps[number]
            if not are_right(low, end, own[line], table, block_map, group, words):
                return -1
            compared += max(end - low, 0)
    return compared


@cached
def compare_stretches(
    lines, first, end, tables, table_lines, block_maps, groups, words, own, facts, exported
):
    """Compare rows that are published, or leave, with the digests of their requests.

    ``first`` and ``end``, int64 ``[num_requests]``, are each request's first position and the one
    after its last; rows that are ``exported`` have to be durable. Returns the number of rows, or -1
    at the first that is not right; nothing is reported. See ``Passes.inspect``.
    """
    compared = 0
    for index in range(len(lines)):
        line = lines[index]
        if line < 0 or line >= facts.shape[1] or facts[SERIAL, line] < 0:
            continue
        low, stop = max(first[index], 0), min(end[index], own.shape[1] - 1)
        if stop <= low:
            continue
        if exported and stop > facts[DURABLE, line]:
            return -1
        for number in range(len(tables)):
            if tables[number].shape[0] == 0:
                continue
            table = table_of(index, tables[number], table_lines)
            block_map, group = block_maps[number], groups[number]
            if not are_right(low, stop, own[line], table, block_map, group, words):
                return -1
            compared += stop - low
    return compared


@cached
def compare_states(requests, sources, told, groups, words, owners, own, facts, num_rows):
    """Compare the states that a step continues, and the counts that its engine was told.

    Returns the number of states; -1 if one is of other tokens or another request, lies outside its
    group, or a count is not the one of drafts kept last.
    """
    compared = 0
    for index in range(len(requests[0])):
        line, _, at, count, _, _ = rows_of(index, requests, facts, own.shape[1], num_rows, False)
        if count == 0:
            continue
        for number in range(len(sources)):
            if len(sources[number]) == 0:
                continue
            group, block = groups[number], sources[number][index]
            if at == 0 and block < 0:
                continue  # it begins without a state
            compared += 1
            if block < 0 or block >= group[NUM_BLOCKS]:
                return -1
            word = words[group[BASE] + block * group[STRIDE]]
            owner = owners[group[OWNERS] + block]
            if word != as_word(own[line, at] + group[SALT]):
                return -1
            if owner >= 0 and owner != facts[SERIAL, line]:
                return -1
        if at > 0 and len(told) and told[index] >= 0:
            kept = facts[KEPT, line]
            if kept >= 0 and kept != told[index]:
                return -1
    return compared
