"""The kernel that resolves a step: rejected rows are marked, and others count as a request's own.

Memory contract:

- One request's facts and own digests are written by the program that has the request.
- ``words`` is written where the slots of rejected drafts lead, if they are inside their group.
- ``counters`` at ``OPEN`` is cleared by the first program.
- Every address is computed in int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines
from .plan import AT_ADDRESS, NUM_TENSOR_FIELDS
from .requests import place_of, rows_of
from .words import EMBEDDED, PLAIN, term

OPEN = tl.constexpr(book.OPEN)
KNOWN = tl.constexpr(book.KNOWN)
DURABLE = tl.constexpr(book.DURABLE)
KEPT = tl.constexpr(book.KEPT)
FIELDS = tl.constexpr(group_lines.FIELDS)


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
            taken = tl.load(drafts + index).to(tl.int64)
            taken = tl.minimum(tl.maximum(taken, 0), count)
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
