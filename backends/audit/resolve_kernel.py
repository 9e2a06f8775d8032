"""The kernel that resolves a step: rejected rows are marked, and others count as a request's own.

Memory contract:

- One request's facts and own digests are written by the program that has the request. Of drafts
  that are trees, it reads the digests that ``write_rows`` has left for them, and puts those of the
  sampled path in their place when all its threads have read them.
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


@triton.jit
def kept_of_tree(
    most: tl.tensor,
    drafts: tl.tensor,
    taken: tl.tensor,
    position: tl.tensor,
    sampled: tl.tensor,
    key: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Count the leading sampled tokens that are drafts of a request's tree.

    Args:
        most: the most tokens that are counted.
        drafts: pointer to the digest up to the last settled row; that of each draft follows.
        taken: drafts.
        position: the position after the last settled row.
        sampled: pointer to the request's int ``[most]`` at least.
        key: int64 ``[3]``.
        TILE: drafts at a time.
    """
    digest = tl.load(drafts)
    kept = most * 0
    left = most
    while left > 0:
        token = tl.load(sampled + kept).to(tl.int64) & PLAIN
        digest += term(token, position + kept, key)
        found = most * 0
        for at in range(0, taken, TILE):
            draft = at + tl.arange(0, TILE).to(tl.int64)
            there = tl.load(drafts + 1 + draft, mask=draft < taken, other=0)
            same = (draft < taken) & (there == digest)
            found += tl.sum(same.to(tl.int64), axis=0)
        kept += (found > 0).to(tl.int64)
        left = tl.where(found > 0, left - 1, 0)
    return kept


@triton.jit
def on_path(
    drafts: tl.tensor,
    draft: tl.tensor,
    live: tl.tensor,
    kept: tl.tensor,
    position: tl.tensor,
    sampled: tl.tensor,
    key: tl.tensor,
) -> tl.tensor:
    """Tell which drafts are of the ``kept`` first sampled tokens, bool ``[TILE]``.

    Arguments are those of ``kept_of_tree``, and:
        draft: int64 ``[TILE]``, numbers of drafts.
        live: bool ``[TILE]``.
    """
    digest = tl.load(drafts)
    there = tl.load(drafts + 1 + draft, mask=live, other=0)
    found = draft < 0
    for number in range(0, kept):
        digest += term(tl.load(sampled + number).to(tl.int64) & PLAIN, position + number, key)
        found = found | (there == digest)
    return found & live


@triton.jit
def put_path(
    drafts: tl.tensor, kept: tl.tensor, position: tl.tensor, sampled: tl.tensor, key: tl.tensor
) -> None:
    """Put the digests of the ``kept`` first sampled tokens in the place of those of drafts.

    Arguments are those of ``kept_of_tree``.
    """
    tl.debug_barrier()
    digest = tl.load(drafts)
    for number in range(0, kept):
        digest += term(tl.load(sampled + number).to(tl.int64) & PLAIN, position + number, key)
        tl.store(drafts + 1 + number, digest)
    tl.debug_barrier()


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
    TREES: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Mark the rejected rows of one request, and count the others as its own. Grid: (requests,).

    Writes ``REJECTED`` where slots lead, ``KEPT``, ``DURABLE`` and ``KNOWN`` of an admitted
    request, and the digest of its next token, if one was sampled behind all that is known. Rows of
    a request that was released are marked, too. ``OPEN`` becomes 0.

    Arguments are those of ``write_rows``, and:
        accepted: int ``[num_requests]``; -1: nothing was sampled.
        sampled: int ``[num_requests, columns]``; unread if ``columns`` is 0. A draft whose row is
            of another token counts as rejected, and so does every draft after it. If ``TREES``, the
            drafts that are kept are of these tokens, each behind the last; all others are rejected.
        columns: tokens sampled per request, at most; -1 stands for none.
        besides: tokens that ``accepted`` counts beside drafts.
        REJECTED: the word of a rejected row.
        TREES: the drafts are trees. Those of a request that has ended are not marked.
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
        most = tl.minimum(stay, columns)
        tree = own + line * own_stride + first + settled
        drawn = sampled + index * columns
        if TREES:
            most = tl.where(admitted, most, 0)
            stay = kept_of_tree(most, tree, taken, first + settled, drawn, key, TILE)
            marked = tl.where(admitted, settled, count)
        else:
            for at in range(0, most, TILE):
                draft = at + tl.arange(0, TILE).to(tl.int64)
                here = draft < most
                theirs = tl.load(drawn + draft, mask=here, other=0).to(tl.int64)
                fed = tl.load(tokens + start + settled + draft, mask=here, other=0).to(tl.int64)
                other = here & (((theirs ^ fed) & PLAIN) != 0)
                stay = tl.minimum(stay, tl.min(tl.where(other, draft, stay), axis=0))
            marked = settled + stay
        for at in range(marked, count, TILE):
            within = at + tl.arange(0, TILE).to(tl.int64)
            live = within < count
            if TREES:
                is_kept = on_path(tree, within - settled, live, stay, first + settled, drawn, key)
                live = live & (is_kept == 0)
            for number in tl.static_range(GROUPS):
                address = tl.load(slots + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
                if address != 0:
                    group = groups + number * FIELDS
                    place = place_of(address, start + within, within, count, live, group)
                    tl.store(words + place, place * 0 + REJECTED, mask=place >= 0)
        length = first + settled + stay
        if admitted:
            if TREES:
                put_path(tree, stay, first + settled, drawn, key)
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
