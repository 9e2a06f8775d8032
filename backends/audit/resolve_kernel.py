"""The kernels that resolve a step: rejected rows are marked, and others count as a request's own.

``resolve_rows`` reads the step's tensors. ``resolve_last`` comes later, when an engine may have
written the next step into them: it reads what ``write_rows`` has saved.

Memory contract:

- One request's facts and own digests are written by the program that has the request.
- ``words`` is written where the slots of rejected drafts lead, if they are inside their group.
- ``counters`` at ``OPEN`` is cleared by the first program.
- ``saved`` and ``saved_rows`` have room for every request and row of a step that is saved. Each
  request's part is written by its own program. ``resolve_last`` empties it, so that a step is
  resolved once, however often the kernel is launched.
- The addresses in a record are those of the tensors that ``NextStep.resolve`` was given, which
  hold as many numbers as the record says.
- Every address is computed in int64.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import digest, group_lines
from . import next_step
from .plan import AT_ADDRESS, NUM_TENSOR_FIELDS
from .requests import place_of, rows_of
from .words import EMBEDDED, PLAIN, term

STEP = tl.constexpr(book.STEP)
OPEN = tl.constexpr(book.OPEN)
SERIAL = tl.constexpr(book.SERIAL)
KNOWN = tl.constexpr(book.KNOWN)
DURABLE = tl.constexpr(book.DURABLE)
KEPT = tl.constexpr(book.KEPT)
FIELDS = tl.constexpr(group_lines.FIELDS)
REJECTED_WORD = tl.constexpr(digest.REJECTED)

RECORDS = tl.constexpr(next_step.RECORDS)
COLUMNS = tl.constexpr(next_step.COLUMNS)
OUTCOME = tl.constexpr(next_step.OUTCOME)
ACCEPTED = tl.constexpr(next_step.ACCEPTED)
LONG_COUNTS = tl.constexpr(next_step.LONG_COUNTS)
SAMPLED = tl.constexpr(next_step.SAMPLED)
LONG_IDS = tl.constexpr(next_step.LONG_IDS)
WIDTH = tl.constexpr(next_step.WIDTH)
REQUESTS = tl.constexpr(next_step.REQUESTS)
BESIDES = tl.constexpr(next_step.BESIDES)

#: Columns of ``saved``, one line per request of a step: its line in the ledger, its first row in
#: the step, its first position, its rows (0: there is nothing to resolve), and its drafts.
SAVED: Final = ("line", "start", "first", "count", "drafts")
NUM_SAVED = tl.constexpr(len(SAVED))
(AT_LINE, AT_START, AT_FIRST, AT_COUNT, AT_DRAFTS) = (
    tl.constexpr(column) for column in range(len(SAVED))
)
#: Columns of ``saved_rows`` before the places, one line per row of a step: the token; then, for
#: each group, the row's place.
TOKENS: Final = 1
PLACES = tl.constexpr(TOKENS)
#: Drafts of a request that are saved at a time.
_TILE = tl.constexpr(16)


@triton.jit
def drafts_of(drafts: tl.tensor, index: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the drafts of a request, clamped to its rows."""
    taken = tl.load(drafts + index).to(tl.int64)
    return tl.minimum(tl.maximum(taken, 0), count)


@triton.jit
def save_request(
    index: tl.tensor,
    line: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    drafts: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    saved: tl.tensor,
    saved_rows: tl.tensor,
    DRAFTS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Save what ``resolve_last`` needs of one request of a step.

    Args:
        index: the request's number in the step.
        line: of the request; this and the next three as ``rows_of`` returns them.
        start: its first row.
        first: the position of that.
        count: its rows.
        tokens: as for ``write_rows``, and so the next three.
        drafts: int ``[num_requests]``.
        slots: of ``plan.Addresses``.
        groups: int64 ``[GROUPS, FIELDS]``.
        saved: int64 ``[max_requests, NUM_SAVED]``.
        saved_rows: int64 ``[max_rows, PLACES + GROUPS]``; the rows of drafts are written.
        DRAFTS: some request has drafts.
        GROUPS: number of groups.
    """
    taken = count * 0
    if DRAFTS:
        taken = drafts_of(drafts, index, count)
    head = saved + index.to(tl.int64) * NUM_SAVED
    tl.store(head + AT_LINE, line)
    tl.store(head + AT_START, start)
    tl.store(head + AT_FIRST, first)
    tl.store(head + AT_COUNT, count)
    tl.store(head + AT_DRAFTS, taken)
    for at in range(count - taken, count, _TILE):
        within = at + tl.arange(0, _TILE).to(tl.int64)
        live = within < count
        row = saved_rows + (start + within) * (PLACES + GROUPS)
        token = tl.load(tokens + start + within, mask=live, other=0).to(tl.int64)
        tl.store(row, token, mask=live)
        for number in tl.static_range(GROUPS):
            address = tl.load(slots + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
            place = within * 0 - 1
            if address != 0:
                group = groups + number * FIELDS
                place = place_of(address, start + within, within, count, live, group)
            tl.store(row + PLACES + number, place, mask=live)


@triton.jit(do_not_specialize=["num_rows", "own_stride", "num_lines", "columns", "besides"])
def resolve_rows(
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    tokens: tl.tensor,
    drafts: tl.tensor,
    accepted: tl.tensor,
    sampled: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    key: tl.tensor,
    words: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    counters: tl.tensor,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    columns: tl.int64,
    besides: tl.int64,
    REJECTED: tl.constexpr,
    DRAFTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Mark the rejected rows of one request, and count the others as its own. Grid: (requests,).

    Arguments are those of ``write_rows``, and:
        accepted: int ``[num_requests]``; -1: nothing was sampled.
        sampled: int ``[num_requests, columns]``; unread if ``columns`` is 0. A draft whose row is
            of another token counts as rejected, and so do those after it.
        columns: tokens sampled per request, at most; -1 stands for none.
        besides: tokens that ``accepted`` counts beside drafts.
        REJECTED: the word of a rejected row.
    """
    index = tl.program_id(0)
    if index == 0:
        tl.store(counters + OPEN, 0)
    line, start, first, count, admitted, _skipped, _refused = rows_of(
        index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
    )
    if count > 0:
        taken = count * 0
        if DRAFTS:
            taken = drafts_of(drafts, index, count)
        given = tl.load(accepted + index).to(tl.int64) - besides
        stay = tl.minimum(tl.maximum(given, 0), taken)
        settled = count - taken
        compared = tl.minimum(stay, columns)
        for at in range(0, compared, TILE):
            draft = at + tl.arange(0, TILE).to(tl.int64)
            here = draft < compared
            drawn = tl.load(sampled + index * columns + draft, mask=here, other=0).to(tl.int64)
            fed = tl.load(tokens + start + settled + draft, mask=here, other=0).to(tl.int64)
            other = here & (((drawn ^ fed) & PLAIN) != 0)
            stay = tl.minimum(stay, tl.min(tl.where(other, draft, stay), axis=0))
        for at in range(settled + stay, count, TILE):
            within = at + tl.arange(0, TILE).to(tl.int64)
            live = within < count
            for number in tl.static_range(GROUPS):
                address = tl.load(slots + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
                if address != 0:
                    group = groups + number * FIELDS
                    place = place_of(address, start + within, within, count, live, group)
                    tl.store(words + place, place * 0 + REJECTED, mask=place >= 0)
        length = first + settled + stay
        if admitted:
            fact = facts + line
            tl.store(fact + KEPT * num_lines, stay)
            tl.store(fact + DURABLE * num_lines, length)
            known = tl.maximum(tl.load(fact + KNOWN * num_lines), length)
            if (given >= 0) & (stay < columns):
                token = tl.load(sampled + index * columns + stay).to(tl.int64)
                is_token = (token >= 0) & (token < EMBEDDED)
                if is_token & (known == length) & (length < own_stride - 1):
                    digest = own + line * own_stride + length
                    tl.store(digest + 1, tl.load(digest) + term(token, length, key))
                    known += 1
            tl.store(fact + KNOWN * num_lines, known)


@triton.jit
def number_at(
    address: tl.tensor, is_long: tl.tensor, index: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Return numbers of a tensor that lies at an address, int64, of int32 or of int64."""
    long = address.to(tl.pointer_type(tl.int64)) + index
    short = address.to(tl.pointer_type(tl.int32)) + index
    in_long = mask & (is_long + index * 0 != 0)
    in_short = mask & (is_long + index * 0 == 0)
    found = tl.load(long, mask=in_long, other=0)
    return found + tl.load(short, mask=in_short, other=0).to(tl.int64)


@triton.jit(do_not_specialize=["own_stride", "num_lines", "max_requests"])
def resolve_last(
    records: tl.tensor,
    saved: tl.tensor,
    saved_rows: tl.tensor,
    key: tl.tensor,
    words: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    counters: tl.tensor,
    own_stride: tl.int64,
    num_lines: tl.int64,
    max_requests: tl.int64,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Resolve the last step by the outcome that waits for the next one, if there is any.

    Does what ``resolve_rows`` does, for many requests at a time. Grid: (-(-max_requests // TILE),).

    Args:
        records: int64 ``[RECORDS, COLUMNS]``, see ``next_step``.
        saved: as for ``save_request``.
        saved_rows: likewise.
        key: int64 ``[3]``.
        words: int64 ``[num_words]``.
        own: int64 ``[num_lines, own_stride]``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        counters: int64 ``[NUM_COUNTERS]``.
        own_stride: columns of ``own``.
        num_lines: lines.
        max_requests: requests of a step, at most.
        GROUPS: number of groups.
        TILE: requests of a program.
    """
    block = tl.program_id(0)
    step = tl.load(counters + STEP) + 1
    record = records + step % RECORDS * COLUMNS
    # No load waits for another one: each takes a way to the host and back.
    of_step, requests = tl.load(record + OUTCOME), tl.load(record + REQUESTS)
    accepted, long_counts = tl.load(record + ACCEPTED), tl.load(record + LONG_COUNTS)
    sampled, long_ids = tl.load(record + SAMPLED), tl.load(record + LONG_IDS)
    columns, besides = tl.load(record + WIDTH), tl.load(record + BESIDES)
    if of_step == step:
        if block == 0:
            tl.store(counters + OPEN, 0)
        index = block.to(tl.int64) * TILE + tl.arange(0, TILE).to(tl.int64)
        here = (index < requests) & (index < max_requests)
        head = saved + index * NUM_SAVED
        count = tl.load(head + AT_COUNT, mask=here, other=0)
        live = count > 0
        line = tl.load(head + AT_LINE, mask=live, other=0)
        start = tl.load(head + AT_START, mask=live, other=0)
        first = tl.load(head + AT_FIRST, mask=live, other=0)
        taken = tl.load(head + AT_DRAFTS, mask=live, other=0)
        given = number_at(accepted, long_counts, index, live) - besides
        stay = tl.minimum(tl.maximum(given, 0), taken)
        settled = count - taken
        compared = tl.minimum(stay, columns)
        most = tl.max(taken, axis=0)
        draft = most * 0
        while draft < most:
            judged = live & (draft < compared)
            drawn = number_at(sampled, long_ids, index * columns + draft, judged)
            row = saved_rows + (start + settled + draft) * (PLACES + GROUPS)
            fed = tl.load(row, mask=judged, other=0)
            other = judged & (((drawn ^ fed) & PLAIN) != 0)
            stay = tl.where(other, tl.minimum(stay, draft), stay)
            draft += 1
        draft = most * 0
        while draft < most:
            gone = live & (draft >= stay) & (draft < taken)
            row = saved_rows + (start + settled + draft) * (PLACES + GROUPS) + PLACES
            for number in tl.static_range(GROUPS):
                place = tl.load(row + number, mask=gone, other=-1)
                tl.store(words + place, place * 0 + REJECTED_WORD, mask=place >= 0)
            draft += 1
        length = first + settled + stay
        fact = facts + line
        admitted = live & (tl.load(fact + SERIAL * num_lines, mask=live, other=-1) >= 0)
        tl.store(fact + KEPT * num_lines, stay, mask=admitted)
        tl.store(fact + DURABLE * num_lines, length, mask=admitted)
        known = tl.load(fact + KNOWN * num_lines, mask=admitted, other=0)
        known = tl.maximum(known, length)
        drawn = admitted & (given >= 0) & (stay < columns)
        token = number_at(sampled, long_ids, index * columns + stay, drawn)
        drawn = drawn & (token >= 0) & (token < EMBEDDED)
        drawn = drawn & (known == length) & (length < own_stride - 1)
        digests = own + line * own_stride + length
        before = tl.load(digests, mask=drawn, other=0)
        tl.store(digests + 1, before + term(token, length, key), mask=drawn)
        tl.store(fact + KNOWN * num_lines, known + drawn.to(tl.int64), mask=admitted)
        tl.debug_barrier()  # each warp has read the count
        tl.store(head + AT_COUNT, count * 0, mask=here)
