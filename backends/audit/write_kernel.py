"""The kernel that notes the rows of a step.

Memory contract of ``write_rows``:

- One program per request. It reads the request's own digests and facts, and writes them; nobody
  else does in this launch.
- ``first_position`` is written if it is that of the books, each request's by its own program.
- ``words`` and ``owners`` are written where slots lead, if they are inside their group. Distinct
  rows of a step have distinct slots; where an engine breaks that, either row may stand.
- ``journal`` is written at ``(journalled + row) % size``, by the last ``size`` rows of the step: no
  two programs write one entry.
- Of drafts that are trees, ``parents`` and the rows that a draft follows are read, all of the same
  request: a draft comes after the one that it follows. Nothing that this launch writes is read for
  that.
- ``counters`` and ``fingerprints`` are added to atomically. The program that ends last moves the
  clock on, so that all others have read the old one. What publishes it is the end of the launch.
  It also takes ``OPENING``, to which the others have added, for ``OPEN``.
- Every address is computed in int64. Padding and malformed requests (see ``kvtxn.audit.Step``)
  write empty journal entries alone; the latter are counted. Whatever the tensors of a step hold,
  no address lies outside: rows are below ``num_rows``, lines below ``num_lines``, positions below
  ``own_stride``, slots inside their group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import group_lines, passes
from .plan import AT_ADDRESS, NUM_TENSOR_FIELDS
from .requests import fill_first, parent_of, place_of, rows_of
from .words import EMBEDDED, MAX_POSITION, PLAIN, as_word, term, token_of

STEP = tl.constexpr(book.STEP)
JOURNALLED = tl.constexpr(book.JOURNALLED)
ENDED = tl.constexpr(book.ENDED)
REFUSED = tl.constexpr(book.REFUSED)
OPEN = tl.constexpr(book.OPEN)
OPENING = tl.constexpr(book.OPENING)
UNRESOLVED = tl.constexpr(book.UNRESOLVED)
SERIAL = tl.constexpr(book.SERIAL)
KNOWN = tl.constexpr(book.KNOWN)
DURABLE = tl.constexpr(book.DURABLE)
TOLD = tl.constexpr(book.TOLD)
IMPORTED = tl.constexpr(book.IMPORTED)
TELLING = tl.constexpr(book.TELLING)
TOLD_STALE = tl.constexpr(book.TOLD_STALE)
TELLING_STALE = tl.constexpr(book.TELLING_STALE)
KEPT = tl.constexpr(book.KEPT)
ENTRY_STEP = tl.constexpr(book.JOURNAL_STEP)
ENTRY_SERIAL = tl.constexpr(book.JOURNAL_SERIAL)
ENTRY_POSITION = tl.constexpr(book.JOURNAL_POSITION)
TERMS = tl.constexpr(book.JOURNAL_TERMS)
PLACES = tl.constexpr(book.JOURNAL_PLACES)
FINGERPRINTS = tl.constexpr(book.FINGERPRINTS)
FACTOR = tl.constexpr(passes.PLACE_FACTOR)
STEP_FACTOR = tl.constexpr(passes.STEP_FACTOR)

BASE = tl.constexpr(group_lines.BASE)
STRIDE = tl.constexpr(group_lines.STRIDE)
SALT = tl.constexpr(group_lines.SALT)
IS_STATE = tl.constexpr(group_lines.IS_STATE)
OWNERS = tl.constexpr(group_lines.OWNERS)
FIELDS = tl.constexpr(group_lines.FIELDS)


@triton.jit
def own_term(digests: tl.tensor, position: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Return the term of a request's own token at each position, from its digests.

    0 where masked.
    """
    after = tl.load(digests + position + 1, mask=mask, other=0)
    return after - tl.load(digests + position, mask=mask, other=0)


@triton.jit
def computed_for(
    positions: tl.tensor, row: tl.tensor, position: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Return the position that each row is computed for, -1 for a number that is none.

    Args:
        positions: int ``[num_rows]``.
        row: int ``[TILE]``, the index of each row in the step.
        position: int64 ``[TILE]``, the position that each row stands for, returned without mask.
        mask: bool ``[TILE]``.
    """
    given = tl.load(positions + row, mask=mask, other=0).to(tl.int64)
    given = tl.where((given >= 0) & (given < MAX_POSITION), given, -1)
    return tl.where(mask, given, position)


@triton.jit
def term_before(
    POSITIONS: tl.constexpr,
    positions: tl.tensor,
    tokens: tl.tensor,
    start: tl.tensor,
    ahead: tl.tensor,
    earlier: tl.tensor,
    live: tl.tensor,
    known: tl.tensor,
    digests: tl.tensor,
    key: tl.tensor,
) -> tl.tensor:
    """Return the terms of tokens before those of some rows: of this step, or older.

    Older ones come from the request's own digests, and so do embedded tokens of this step.

    Args:
        POSITIONS: as for ``write_rows``.
        positions: as for ``write_rows``.
        tokens: as for ``write_rows``.
        start: the request's first row.
        ahead: int64 ``[TILE]``, the number within the request of the row with the token; below 0:
            it is older.
        earlier: int64 ``[TILE]``, the token's position; below 0: the first one.
        live: bool ``[TILE]``.
        known: positions from here on are not told; int64, or int64 ``[TILE]``.
        digests: pointer to the request's own digests.
        key: int64 ``[3]``.
    """
    here = live & (ahead >= 0)
    earlier = tl.maximum(earlier, 0)
    old = own_term(digests, earlier, live)
    token = tl.load(tokens + start + ahead, mask=here, other=0).to(tl.int64) & PLAIN
    opaque = (earlier < known) & (token_of(old, key) >= EMBEDDED)
    given = earlier
    if POSITIONS:
        given = computed_for(positions, start + ahead, earlier, here)
        opaque = opaque & (given == earlier)
    return tl.where(here & (opaque == 0), term(token, given, key), old)


@triton.jit
def depth_of(parents: tl.tensor, draft: tl.tensor) -> tl.tensor:
    """Return the number of drafts on the way to each draft; 0 for whatever is below 0.

    Arguments are those of ``parent_of``.
    """
    depth = draft * 0
    draft = parent_of(parents, draft)
    while tl.max(draft, axis=0) >= 0:
        depth += (draft >= 0).to(tl.int64)
        draft = parent_of(parents, draft)
    return depth


@triton.jit
def terms_along(
    POSITIONS: tl.constexpr,
    parents: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    begin: tl.tensor,
    draft: tl.tensor,
    position: tl.tensor,
    key: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the sums of the terms of drafts and of all drafts on the way to them.

    Args:
        POSITIONS: as for ``write_rows``.
        parents: as for ``parent_of``.
        positions: as for ``write_rows``.
        tokens: as for ``write_rows``.
        begin: the request's first draft row.
        draft: int64 ``[TILE]``, numbers among the request's drafts; of what is below 0 the sum is
            0.
        position: int64 ``[TILE]``, the positions that they stand for.
        key: int64 ``[3]``.

    Returns:
        Two sums of terms: of the positions that the model computes the rows for, and of the
        positions that the rows' places in the sequence ask for.
    """
    fed = position * 0
    right = position * 0
    while tl.max(draft, axis=0) >= 0:
        here = draft >= 0
        token = tl.load(tokens + begin + draft, mask=here, other=0).to(tl.int64) & PLAIN
        each = term(token, position, key)
        right += tl.where(here, each, 0)
        if POSITIONS:
            each = term(token, computed_for(positions, begin + draft, position, here), key)
        fed += tl.where(here, each, 0)
        draft = parent_of(parents, draft)
        position -= 1
    return fed, right


@triton.jit(
    do_not_specialize=["num_requests", "num_rows", "own_stride", "num_lines", "journal_size"]
)
def write_rows(
    lines: tl.tensor,
    starts: tl.tensor,
    first_position: tl.tensor,
    positions: tl.tensor,
    parents: tl.tensor,
    tokens: tl.tensor,
    drafts: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    key: tl.tensor,
    words: tl.tensor,
    owners: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    journal: tl.tensor,
    counters: tl.tensor,
    fingerprints: tl.tensor,
    num_requests: tl.int64,
    num_rows: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    journal_size: tl.int64,
    DRAFTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    TREES: tl.constexpr,
    FILLS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Record the rows of one request: ``Passes.write``, but for the states. Grid: (requests,).

    Writes ``words`` and ``owners`` where slots lead, the request's line of ``own`` and ``facts``, a
    journal entry per row, and the step's ``counters`` and ``fingerprints``; see the module.

    Args:
        lines: int ``[num_requests]``.
        starts: int ``[num_requests + 1]``.
        first_position: int ``[num_requests]``.
        positions: int ``[num_rows]``; unread unless ``POSITIONS``.
        parents: int ``[num_rows]``, the drafts that drafts follow; unread unless ``TREES``.
        tokens: int ``[num_rows]``.
        drafts: int ``[num_requests]``; unread unless ``DRAFTS``.
        slots: int64 ``[GROUPS, NUM_TENSOR_FIELDS]``, as ``plan.Addresses`` makes it.
        groups: int64 ``[GROUPS, FIELDS]``.
        key: int64 ``[3]``.
        words: int64 ``[num_words]``.
        owners: int64 ``[num_states]``.
        own: int64 ``[num_lines, own_stride]``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        journal: int64 ``[journal_size, PLACES + GROUPS]``.
        counters: int64 ``[NUM_COUNTERS]``.
        fingerprints: int64 ``[FINGERPRINTS, GROUPS]``.
        num_requests: requests, padding included.
        num_rows: rows for which ``tokens`` and all ``slots`` have room.
        own_stride: columns of ``own``.
        num_lines: lines.
        journal_size: entries.
        DRAFTS: some request has drafts.
        POSITIONS: rows are noted as computed for ``positions``.
        TREES: drafts are trees; ``DRAFTS``, too.
        FILLS: ``first_position`` is that of the books, and is filled from ``positions`` at first.
        GROUPS: number of groups.
        TILE: rows at a time.
    """
    index = tl.program_id(0)
    now = tl.load(counters + STEP) + 1
    journalled = tl.load(counters + JOURNALLED)
    rows = tl.load(starts + num_requests).to(tl.int64)
    rows = tl.minimum(tl.maximum(rows, 0), num_rows)
    if FILLS:
        fill_first(index, starts, first_position, positions, num_rows)
    line, start, first, count, admitted, skipped, refused = rows_of(
        index, lines, starts, first_position, facts, num_lines, own_stride, num_rows
    )
    count = tl.where(admitted, count, 0)
    digests = own + line * own_stride
    fact = facts + line
    known = tl.load(fact + KNOWN * num_lines)
    serial = tl.load(fact + SERIAL * num_lines)
    taken = count * 0
    if DRAFTS:
        taken = tl.load(drafts + index).to(tl.int64)
        taken = tl.minimum(tl.maximum(taken, 0), count)
    settled = count - taken
    fed = tl.load(digests + first)
    truth = fed
    now_prints = fingerprints + now % FINGERPRINTS * GROUPS
    for at in range(0, count + skipped, TILE):
        within = at + tl.arange(0, TILE).to(tl.int64)
        live = within < count
        position = first + within
        row = start + within
        chained = live
        if TREES:
            draft = tl.where(live, within - settled, -1)
            follows = parents + start + settled
            chained = within < settled
            position = tl.where(chained, position, first + settled + depth_of(follows, draft))
        token = tl.load(tokens + row, mask=live, other=0).to(tl.int64) & PLAIN
        theirs = own_term(digests, position, live)
        told = chained & (position < known)
        each = term(token, position, key)
        each = tl.where(told & (token_of(theirs, key) >= EMBEDDED), theirs, each)
        each = tl.where(live, each, 0)
        right = tl.where(told, theirs, each)
        given = position
        if POSITIONS:
            given = computed_for(positions, row, position, live)
            each = tl.where(given == position, each, term(token, given, key))
        if TREES:
            fed_way, right_way = terms_along(
                POSITIONS, follows, positions, tokens, start + settled, draft, position, key
            )
            sums = tl.where(chained, each, 0)
            right = tl.where(chained, right, 0)
            chain = fed + tl.cumsum(sums, axis=0) + fed_way
            fed += tl.sum(sums, axis=0)
            own_chain = truth + tl.cumsum(right, axis=0) + right_way
        else:
            chain = fed + tl.cumsum(each, axis=0)
            fed += tl.sum(each, axis=0)
            own_chain = truth + tl.cumsum(right, axis=0)
        tl.store(digests + first + within + 1, own_chain, mask=live)
        truth += tl.sum(right, axis=0)
        written = tl.sum(tl.where(live, chain, 0), axis=0)
        entry = (journalled + row) % journal_size * (PLACES + GROUPS)
        kept = (within < count + skipped) & (row >= rows - journal_size)
        tl.store(journal + entry + ENTRY_STEP, tl.where(live, now, -1), mask=kept)
        tl.store(journal + entry + ENTRY_SERIAL, tl.where(live, serial, -1), mask=kept)
        tl.store(journal + entry + ENTRY_POSITION, tl.where(live, given, -1), mask=kept)
        tl.store(journal + entry + TERMS, each, mask=kept)
        for back in tl.static_range(1, 3):
            ahead = within - back
            told_to = known
            if TREES:
                draft = parent_of(follows, draft)
                of_settled = position - first - back  # a settled row's number within the request
                ahead = tl.where(draft >= 0, settled + draft, tl.where(chained, ahead, of_settled))
                told_to = tl.where(draft >= 0, 0, known)
            before = term_before(
                POSITIONS, positions, tokens, start, ahead, position - back, live, told_to,
                digests, key,
            )  # fmt: skip
            tl.store(journal + entry + TERMS + back, before, mask=kept)
        for number in tl.static_range(GROUPS):
            group = groups + number * FIELDS
            address = tl.load(slots + number * NUM_TENSOR_FIELDS + AT_ADDRESS)
            place = tl.full([TILE], -1, dtype=tl.int64)
            if address != 0:
                place = place_of(address, row, within, count, live, group)
                there = place >= 0
                tl.store(words + place, as_word(chain + tl.load(group + SALT)), mask=there)
                if tl.load(group + IS_STATE) != 0:
                    state = (place - tl.load(group + BASE)) // tl.load(group + STRIDE)
                    state += tl.load(group + OWNERS)
                    tl.store(owners + state, serial + place * 0, mask=there)
                places = tl.sum(tl.where(live, place * FACTOR, 0), axis=0)
                tl.atomic_add(now_prints + number, written + places)
            tl.store(journal + entry + PLACES + number, place, mask=kept)
    if refused:
        tl.atomic_add(counters + REFUSED, 1)
    if count > 0:
        settled += first
        # A request that goes back begins anew: other blocks may hold its rows now.
        back = first < tl.load(fact + DURABLE * num_lines)
        back = back & (tl.load(fact + TOLD * num_lines) != IMPORTED)
        told = tl.minimum(tl.load(fact + TELLING * num_lines), first)
        told = tl.where(back, -1, told)
        tl.store(fact + TOLD * num_lines, told)
        tl.store(fact + TELLING * num_lines, told)
        told = tl.minimum(tl.load(fact + TELLING_STALE * num_lines), first)
        told = tl.where(back, -1, told)
        tl.store(fact + TOLD_STALE * num_lines, told)
        tl.store(fact + TELLING_STALE * num_lines, told)
        known = tl.maximum(known, settled)
        if TREES:  # the drafts' digests have taken the place of own ones
            known = tl.where(taken > 0, settled, known)
        tl.store(fact + KNOWN * num_lines, known)
        tl.store(fact + DURABLE * num_lines, settled)
        tl.store(fact + KEPT * num_lines, tl.where(taken > 0, -1, 0).to(tl.int64))
        if taken > 0:
            tl.atomic_add(counters + OPENING, 1)
    tl.debug_barrier()
    ended = tl.atomic_add(counters + ENDED, 1)
    if ended == num_requests - 1:
        tl.store(counters + ENDED, 0)
        tl.store(counters + JOURNALLED, journalled + rows)
        next_prints = fingerprints + (now + 1) % FINGERPRINTS * GROUPS
        for number in tl.static_range(GROUPS):
            until_now = tl.atomic_add(now_prints + number, 0)
            tl.store(next_prints + number, until_now * STEP_FACTOR)
        left = tl.load(counters + UNRESOLVED) + tl.load(counters + OPEN)
        tl.store(counters + UNRESOLVED, left)
        tl.store(counters + OPEN, tl.atomic_add(counters + OPENING, 0))
        tl.store(counters + OPENING, 0)
        tl.store(counters + STEP, now)
