"""Compiled calls that take what an engine says: begun requests, copied steps, sampled tokens."""

from __future__ import annotations

from typing import Final

from ...audit import books as book
from ...audit import new_requests as field
from .machine_code import cached, compiled
from .words import term

LINE, SERIAL, BEGIN, COUNT = field.LINE, field.SERIAL, field.BEGIN, field.COUNT
SEED, AGAIN, FIELDS = field.SEED, field.AGAIN, field.NUM_FIELDS
OWNER: Final = book.SERIAL
OUTSIDE, KNOWN, DURABLE = book.OUTSIDE, book.KNOWN, book.DURABLE
#: What ``copy_step`` returns if the step does not lie inside its buffers.
OUTSIDE_BUFFERS: Final = -1


@cached
def begin_requests(packed, num_tokens, num_requests, key, own, facts):
    """Put the digests of new requests into ``own``, and their facts into ``facts``.

    See ``Passes.change``. ``packed`` is that of ``PackedRequests``.
    """
    for number in range(num_requests):
        given = packed[num_tokens + number * FIELDS :]
        line, begin, count, digest = given[LINE], given[BEGIN], given[COUNT], given[SEED]
        own[line, 0] = digest
        for position in range(count):
            digest += term(packed[begin + position], position, key)
            own[line, position + 1] = digest
        durable = min(facts[DURABLE, line], count) if given[AGAIN] else count
        facts[:, line] = -1
        facts[OWNER, line], facts[OUTSIDE, line] = given[SERIAL], 0
        facts[KNOWN, line], facts[DURABLE, line] = count, durable


@compiled
def lies_inside(
    starts, positions, tokens, slots, tables, lengths,
    own_starts, own_positions, own_tokens, own_slots, own_tables, first, drafts, number,
):  # fmt: skip
    """Tell whether the step's requests and rows fit the engine's buffers and the ledger's own.

    First rows have to ascend, and tables to be equally wide. Slots and blocks in the buffers are
    not looked at.
    """
    requests = min(len(starts) - 1, len(own_starts) - 1, len(first), len(drafts))
    rows = min(len(positions), len(tokens), len(own_positions), len(own_tokens))
    for group in range(len(slots)):
        rows = min(rows, len(slots[group]), len(own_slots[group]))
    for group in range(len(tables)):
        requests = min(requests, tables[group].shape[0], own_tables[group].shape[0])
        if tables[group].shape[1] != own_tables[group].shape[1]:
            return False
    for group in range(len(lengths)):
        if len(lengths[group]):
            requests = min(requests, len(lengths[group]))
    if number > requests or starts[0] < 0 or starts[number] > rows:
        return False
    for index in range(number):
        if starts[index] > starts[index + 1] or starts[index] >= rows:
            return False
    return True


@cached
def copy_step(
    starts, positions, tokens, slots, tables, lengths,
    own_starts, own_positions, own_tokens, own_slots, own_tables, first, drafts, number,
):  # fmt: skip
    """Copy a step into the ledger's own buffers; fill ``first``, and cut ``drafts`` to the rows.

    Tuples have an array for each group. See ``StepInput.copy_step``.

    Returns:
        1 if all known lengths are right, 0 if some are not, and ``OUTSIDE_BUFFERS`` if nothing was
        copied, because the step does not lie inside all of the buffers.
    """
    if not lies_inside(
        starts, positions, tokens, slots, tables, lengths,
        own_starts, own_positions, own_tokens, own_slots, own_tables, first, drafts, number,
    ):  # fmt: skip
        return OUTSIDE_BUFFERS
    for index in range(number + 1):
        own_starts[index] = starts[index]
    total, right = own_starts[number], 1
    for row in range(total):
        own_positions[row], own_tokens[row] = positions[row], tokens[row]
    for index in range(number):
        count = own_starts[index + 1] - own_starts[index]
        first[index] = own_positions[own_starts[index]]
        drafts[index] = min(drafts[index], count)
        for group in range(len(lengths)):
            if len(lengths[group]) and lengths[group][index] != first[index] + count:
                right = 0
    for group in range(len(slots)):
        for row in range(total):
            own_slots[group][row] = slots[group][row]
    for group in range(len(tables)):
        for index in range(number):
            for column in range(tables[group].shape[1]):
                own_tables[group][index, column] = tables[group][index, column]
    return right


@cached
def count_tokens(ids, left_out, drafts, end, counts, kept):
    """Count the sampled tokens of each request into ``counts``, and copy them into ``kept``.

    ``kept`` gets -1 for what is no token: below 0, from ``end`` on, or of a request ``left_out``.
    Without ``drafts`` counts have no bound. See ``StepInput.count``.
    """
    for index in range(ids.shape[0]):
        found = 0
        for column in range(ids.shape[1]):
            token = ids[index, column]
            real = 0 <= token < end and not left_out[index]
            kept[index, column] = token if real else -1
            found += real
        counts[index] = min(found, drafts[index] + 1) if len(drafts) else found


@cached
def reaches(requests, ends):
    """Tell whether the rows before a request's drafts reach its line's position in ``ends``."""
    lines, starts, first, drafts = requests
    for index in range(len(lines)):
        settled = first[index] + starts[index + 1] - starts[index]
        if len(drafts):
            settled -= drafts[index]
        if settled >= ends[lines[index]]:
            return True
    return False
