"""The writes of a step into the books, compiled: its rows, and the fate of its drafts.

Both functions do what ``kvtxn.audit.torch_passes.TorchPasses`` does, request by request. Arguments
that they share:

    requests: lines, starts, first positions and drafts, see ``StepArrays``.
    parents: int64 ``[num_rows]``; empty: drafts are no trees. See ``kvtxn.audit.draft_trees``.
    tokens: int64 ``[num_rows]``.
    slots: for each group, int64 ``[num_rows]``; empty: the step writes nothing there.
    groups: int64 ``[num_groups, FIELDS]``, as ``kvtxn.audit.group_lines`` makes it.
    key: int64 ``[3]``.
    words, owners, own, facts, journal, counters, fingerprints: the tensors of ``Books``.
    num_rows: rows for which ``tokens`` and all ``slots`` have room.
"""

from __future__ import annotations

from typing import Final

import numpy

from ...audit import books as book
from ...audit import digest
from ...audit import group_lines as line_of
from ...audit.passes import PLACE_FACTOR, STEP_FACTOR
from .machine_code import cached, compiled
from .requests import rows_of
from .words import EMBEDDED, PLAIN, as_word, term, token_of

SERIAL, KNOWN, DURABLE = book.SERIAL, book.KNOWN, book.DURABLE
KEPT: Final = book.KEPT
TOLD, TELLING, IMPORTED = book.TOLD, book.TELLING, book.IMPORTED
TOLD_STALE, TELLING_STALE = book.TOLD_STALE, book.TELLING_STALE
STEP, JOURNALLED, REFUSED = book.STEP, book.JOURNALLED, book.REFUSED
OPEN, UNRESOLVED = book.OPEN, book.UNRESOLVED
AT_STEP, AT_SERIAL, AT_POSITION = book.JOURNAL_STEP, book.JOURNAL_SERIAL, book.JOURNAL_POSITION
AT_TERMS, AT_PLACES = book.JOURNAL_TERMS, book.JOURNAL_PLACES
BASE, STRIDE, BLOCK_SIZE = line_of.BASE, line_of.STRIDE, line_of.BLOCK_SIZE
NUM_BLOCKS, RING, SALT = line_of.NUM_BLOCKS, line_of.RING, line_of.SALT
IS_STATE, OWNERS = line_of.IS_STATE, line_of.OWNERS
REJECTED: Final = digest.REJECTED
MAX_POSITION: Final = digest.MAX_POSITION
BY_STEP: Final = digest.signed(STEP_FACTOR)
BY_PLACE: Final = digest.signed(PLACE_FACTOR)


@compiled
def place_of(slot, group, left):
    """Return the index in ``words`` of a slot's word; -1 if it has none.

    Args:
        slot: the slot; -1: none.
        group: int64 ``[FIELDS]``.
        left: rows of the same request that come after this one in the step: in a ring, one of them
            may have the slot.
    """
    size, ring = group[BLOCK_SIZE], group[RING]
    if slot < 0 or slot >= group[NUM_BLOCKS] * size or 0 <= ring <= left:
        return -1
    return group[BASE] + slot // size * group[STRIDE] + slot % size


@compiled
def state_at(place, group):
    """Return the index in ``owners`` of the state whose word has an index in ``words``."""
    return group[OWNERS] + (place - group[BASE]) // group[STRIDE]


@compiled
def term_at(digests, position):
    """Return the term of a request's own token at a position; below 0, that of its first token."""
    position = max(position, 0)
    return digests[position + 1] - digests[position]


@compiled
def followed(within, settled, row, parents):
    """Return the number within its request of the row that a row follows; -1: an earlier step's.

    Args:
        within: the row's number within its request.
        settled: the request's rows before its drafts.
        row: the row's number in the step.
        parents: as ``write_rows`` gets them.
    """
    if len(parents) == 0 or within < settled:
        return within - 1
    return settled + min(max(parents[row], -1), within - settled - 1)


@cached
def write_rows(
    requests, positions, parents, tokens, slots, groups, key, words, owners, own, facts,
    journal, counters, fingerprints, num_rows,
):  # fmt: skip
    """Record the rows of a step in the books, request by request; see ``Passes.write``.

    Their digests go into ``words``, ``own`` and the journal, states' owners into ``owners``; the
    requests' facts, the counters and the fingerprints move on. States that the step reads are not
    compared here. ``positions`` is int64 ``[num_rows]``; empty: rows are computed for those they
    stand for.
    """
    now, noted = counters[STEP] + 1, counters[JOURNALLED]
    chains, terms = numpy.empty(num_rows, numpy.int64), numpy.empty(num_rows, numpy.int64)
    depths = numpy.empty(num_rows if len(parents) else 0, numpy.int64)
    written, refusals, unsure, columns = 0, 0, 0, own.shape[1]
    for index in range(len(requests[0])):
        line, start, at, count, taken, refused = rows_of(
            index, requests, facts, columns, num_rows, False
        )
        refusals += refused
        if count == 0:
            continue
        digests, known, settled = own[line], facts[KNOWN, line], count - taken
        for within in range(count):
            ahead = followed(within, settled, start + within, parents)
            position = at + within
            if len(parents):
                depths[start + within] = depths[start + ahead] + 1 if ahead >= 0 else 0
                position = at + depths[start + within]
            token, given = tokens[start + within] & PLAIN, position
            each = term(token, position, key)
            if position < known and not (len(parents) and within >= settled):
                theirs = digests[position + 1] - digests[position]
                if token_of(theirs, key) >= EMBEDDED:
                    each = theirs
            else:
                digests[at + within + 1] = digests[at + ahead + 1] + each
            if len(positions) and positions[start + within] != position:
                given = positions[start + within]
                given = given if 0 <= given < MAX_POSITION else -1
                each = term(token, given, key)
            chain = (chains[start + ahead] if ahead >= 0 else digests[at]) + each
            chains[start + within], terms[start + within] = chain, each
            written += chain
            entry = journal[noted % len(journal)]
            entry[AT_STEP], entry[AT_SERIAL], entry[AT_POSITION] = (
                now,
                facts[SERIAL, line],
                given,
            )
            entry[AT_TERMS], noted = each, noted + 1
            for back in range(1, 3):
                here = ahead >= 0
                before = terms[start + ahead] if here else term_at(digests, position - back)
                entry[AT_TERMS + back] = before
                ahead = followed(ahead, settled, start + ahead, parents) if here else -1
        settled += at
        goes_on = facts[TOLD, line] == IMPORTED or at >= facts[DURABLE, line]
        told = min(facts[TELLING, line], at) if goes_on else -1
        facts[TOLD, line], facts[TELLING, line] = told, told
        told = min(facts[TELLING_STALE, line], at) if goes_on else -1
        facts[TOLD_STALE, line], facts[TELLING_STALE, line] = told, told
        replaced = len(parents) and taken  # by the digests of drafts
        facts[KNOWN, line] = settled if replaced else max(known, settled)
        facts[DURABLE, line] = settled
        facts[KEPT, line] = -1 if taken else 0
        unsure += taken > 0
    prints = fingerprints[now % len(fingerprints)]
    before = fingerprints[(now - 1) % len(fingerprints)]
    for number in range(len(slots)):
        # Group by group: of two that share a block by mistake, the later one's word stands.
        marks, noted = written, counters[JOURNALLED]
        for index in range(len(requests[0])):
            line, start, _, count, _, _ = rows_of(index, requests, facts, columns, num_rows, False)
            for within in range(count):
                place = -1
                if len(slots[number]):
                    slot = slots[number][start + within]
                    place = place_of(slot, groups[number], count - 1 - within)
                    marks += place * BY_PLACE
                journal[noted % len(journal), AT_PLACES + number] = place
                noted += 1
                if place >= 0:
                    words[place] = as_word(chains[start + within] + groups[number, SALT])
                    if groups[number, IS_STATE]:
                        owners[state_at(place, groups[number])] = facts[SERIAL, line]
        prints[number] = before[number] * BY_STEP + (marks if len(slots[number]) else 0)
    counters[STEP], counters[JOURNALLED] = now, noted
    counters[REFUSED] += refusals
    counters[UNRESOLVED] += counters[OPEN]
    counters[OPEN] = unsure


@compiled
def on_path(digest, path, length):
    """Tell whether a digest is one of the first ``length`` of a path, int64 ``[n]``."""
    number = 0
    while number < length and path[number] != digest:
        number += 1
    return number < length


@compiled
def sampled_path(drafts, before, position, sampled, most, key, path):
    """Count the leading sampled tokens that are drafts of a tree; see ``SampledPath``.

    Args:
        drafts: int64 ``[num_drafts]``, the digest up to each draft.
        before: the digest up to the last settled row.
        position: the position after that row.
        sampled: int64 ``[n]``.
        most: the most tokens that are counted.
        key: int64 ``[3]``.
        path: int64 ``[n]``, filled with the digests up to the counted tokens.
    """
    for number in range(min(most, len(sampled))):
        before += term(sampled[number] & PLAIN, position + number, key)
        if not on_path(before, drafts, len(drafts)):
            return number
        path[number] = before
    return min(most, len(sampled))


@cached
def resolve_rows(
    requests, parents, tokens, accepted, besides, sampled, slots, groups, key, words,
    own, facts, counters, num_rows,
):  # fmt: skip
    """Mark rejected rows in ``words``, and count the others as the request's own.

    The digest of the token sampled behind them is added to ``own``. Requests that were released are
    marked, too, unless their drafts are trees. ``accepted`` is int64 ``[num_requests]``, and counts
    ``besides`` other tokens. ``sampled`` is int64 ``[num_requests, columns]``; without columns
    nobody said what was sampled. See ``Passes.resolve``.
    """
    counters[OPEN] = 0
    columns = sampled.shape[1]
    path, trees = numpy.empty(columns, numpy.int64), len(parents) > 0
    for index in range(len(requests[0])):
        line, start, at, count, taken, _ = rows_of(
            index, requests, facts, own.shape[1], num_rows, True
        )
        if count == 0:
            continue
        given, settled = accepted[index] - besides, count - taken
        stay, begin = min(max(given, 0), taken), at + settled
        drafts, first_rejected = own[line, begin + 1 : begin + 1 + taken], settled
        if trees:
            before = own[line, begin]
            stay = sampled_path(drafts, before, begin, sampled[index], stay, key, path)
            if facts[SERIAL, line] < 0:  # its digests are gone; the words say what its drafts are
                continue
        else:
            for draft in range(min(stay, columns)):
                if (tokens[start + settled + draft] ^ sampled[index, draft]) & PLAIN:
                    stay = draft
                    break
            first_rejected += stay
        for within in range(first_rejected, count):
            if trees and on_path(drafts[within - settled], path, stay):
                continue
            for number in range(len(slots)):
                if len(slots[number]):
                    slot = slots[number][start + within]
                    place = place_of(slot, groups[number], count - 1 - within)
                    if place >= 0:
                        words[place] = REJECTED
        if facts[SERIAL, line] < 0:
            continue
        if trees:
            for draft in range(stay):  # an assigned slice would compile a message, for a second
                drafts[draft] = path[draft]
        length = at + settled + stay
        known = max(facts[KNOWN, line], length)
        if stay < columns and given >= 0 and known == length < own.shape[1] - 1:
            token = sampled[index, stay]
            if 0 <= token < EMBEDDED:
                own[line, length + 1] = own[line, length] + term(token, length, key)
                known += 1
        facts[KEPT, line], facts[DURABLE, line], facts[KNOWN, line] = stay, length, known
