"""The kernels that put in place what a step changes, numbers of the host, and sampled tokens.

Memory contract of ``change_books``:

- One program per request that begins, and no two of one line: each writes its line of ``own`` and
  its column of ``facts``. One program per block that is handed out writes the block's ``words`` and
  ``seals``; two of one block write the same. The last program writes ``SERIAL`` of lines that
  nobody has, of which none is a line that begins.
- ``packed`` is read, perhaps from memory of the host. Its numbers come from the host, which has
  checked them: lines are below ``num_lines``, tokens at most ``own_stride - 1``, words inside
  ``words``.
- Every address is computed in int64.

``put_numbers`` reads ``numbers``, perhaps from memory of the host, and writes ``target``.
``count_tokens`` reads ``ids`` and ``left_out``, and writes ``counts`` and ``kept``; each request's
by a program of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit import digest, new_requests, violation
from .words import term

LINE = tl.constexpr(new_requests.LINE)
ADMITTED_AS = tl.constexpr(new_requests.SERIAL)
BEGIN = tl.constexpr(new_requests.BEGIN)
COUNT = tl.constexpr(new_requests.COUNT)
SEED = tl.constexpr(new_requests.SEED)
AGAIN = tl.constexpr(new_requests.AGAIN)
NUM_FIELDS = tl.constexpr(new_requests.NUM_FIELDS)
SERIAL = tl.constexpr(book.SERIAL)
KNOWN = tl.constexpr(book.KNOWN)
DURABLE = tl.constexpr(book.DURABLE)
OUTSIDE = tl.constexpr(book.OUTSIDE)
TOLD = tl.constexpr(book.TOLD)
TELLING = tl.constexpr(book.TELLING)
TOLD_STALE = tl.constexpr(book.TOLD_STALE)
TELLING_STALE = tl.constexpr(book.TELLING_STALE)
KEPT = tl.constexpr(book.KEPT)
UNWRITTEN = tl.constexpr(digest.UNWRITTEN)
NOBODY = tl.constexpr(violation.NOBODY)


@triton.jit
def begin_request(
    packed: tl.tensor,
    fields: tl.tensor,
    key: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    own_stride: tl.tensor,
    num_lines: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Put the digests and facts of one request in place, as ``Passes.change`` says.

    The line of ``own`` gets the seed and the digest after each token; of the facts, ``KNOWN``
    becomes the number of tokens, and ``DURABLE`` no more than that. ``fields`` points to its packed
    fields.
    """
    line = tl.load(fields + LINE)
    count = tl.load(fields + COUNT)
    tokens = packed + tl.load(fields + BEGIN)
    digests = own + line * own_stride
    digest = tl.load(fields + SEED)
    tl.store(digests, digest)
    for at in range(0, count, TILE):
        position = at + tl.arange(0, TILE).to(tl.int64)
        live = position < count
        token = tl.load(tokens + position, mask=live, other=0)
        each = tl.where(live, term(token, position, key), 0)
        tl.store(digests + position + 1, digest + tl.cumsum(each, axis=0), mask=live)
        digest += tl.sum(each, axis=0)
    fact = facts + line
    durable = count
    if tl.load(fields + AGAIN) != 0:
        durable = tl.minimum(tl.load(fact + DURABLE * num_lines), count)
    tl.store(fact + SERIAL * num_lines, tl.load(fields + ADMITTED_AS))
    tl.store(fact + KNOWN * num_lines, count)
    tl.store(fact + DURABLE * num_lines, durable)
    tl.store(fact + KEPT * num_lines, count * 0 - 1)
    tl.store(fact + OUTSIDE * num_lines, count * 0)
    tl.store(fact + TOLD * num_lines, count * 0 - 1)
    tl.store(fact + TELLING * num_lines, count * 0 - 1)
    tl.store(fact + TOLD_STALE * num_lines, count * 0 - 1)
    tl.store(fact + TELLING_STALE * num_lines, count * 0 - 1)


@triton.jit
def hand_out(words: tl.tensor, first: tl.tensor, count: tl.tensor, TILE: tl.constexpr) -> None:
    """Set ``count`` words of a block to ``UNWRITTEN``, from ``first`` on."""
    for at in range(0, count, TILE):
        word = at + tl.arange(0, TILE).to(tl.int64)
        tl.store(words + first + word, word * 0 + UNWRITTEN, mask=word < count)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_requests", "num_blocks", "num_released", "own_stride", "num_lines",
    ]
)  # fmt: skip
def change_books(
    packed: tl.tensor,
    key: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    words: tl.tensor,
    seals: tl.tensor,
    num_tokens: tl.int64,
    num_requests: tl.int64,
    num_blocks: tl.int64,
    num_released: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    SEALS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Put in place what a step changes: ``Passes.change``. Grid: (requests + blocks + 1,).

    In one launch, so in any order: each request that begins gets its digests and facts, each block
    that is handed out becomes unwritten and unsealed, and released lines become nobody's.

    Args:
        packed: int64, one after the other: the tokens of the requests that begin, and
            ``NUM_FIELDS`` fields of each, as in ``kvtxn.audit.new_requests``; of each block that is
            handed out the first word and the number of words; the lines that were released.
        key: int64 ``[3]``.
        own: int64 ``[num_lines, own_stride]``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        words: int64 ``[num_words]``.
        seals: int64 ``[num_words]``; untouched unless ``SEALS``.
        num_tokens: tokens of all requests that begin.
        num_requests: requests that begin.
        num_blocks: blocks that are handed out.
        num_released: lines that were released.
        own_stride: columns of ``own``.
        num_lines: lines.
        SEALS: a scrub has ``seals``.
        TILE: tokens, words or lines at a time.
    """
    index = tl.program_id(0).to(tl.int64)
    requests = packed + num_tokens
    blocks = requests + num_requests * NUM_FIELDS
    if index < num_requests:
        fields = requests + index * NUM_FIELDS
        begin_request(packed, fields, key, own, facts, own_stride, num_lines, TILE)
    elif index < num_requests + num_blocks:
        block = blocks + 2 * (index - num_requests)
        first, count = tl.load(block), tl.load(block + 1)
        hand_out(words, first, count, TILE)
        if SEALS:
            hand_out(seals, first, count, TILE)
    else:
        lines = blocks + 2 * num_blocks
        for at in range(0, num_released, TILE):
            released = at + tl.arange(0, TILE).to(tl.int64)
            line = tl.load(lines + released, mask=released < num_released, other=0)
            where = facts + SERIAL * num_lines + line
            tl.store(where, line * 0 + NOBODY, mask=released < num_released)


@triton.jit(do_not_specialize=["count"])
def put_numbers(numbers: tl.tensor, target: tl.tensor, count: tl.int64, TILE: tl.constexpr) -> None:
    """Copy numbers. Grid: (-(-count // TILE),).

    Args:
        numbers: int64 ``[count]``.
        target: int ``[count]``.
        count: numbers.
        TILE: numbers of a program.
    """
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(target + at, tl.load(numbers + at, mask=at < count, other=0), mask=at < count)


@triton.jit(do_not_specialize=["width", "end"])
def count_tokens(
    ids: tl.tensor,
    left_out: tl.tensor,
    counts: tl.tensor,
    kept: tl.tensor,
    width: tl.int64,
    end: tl.int64,
    TILE: tl.constexpr,
) -> None:
    """Count the tokens of one request into ``counts``, and copy them into ``kept``, -1 for others.

    An id below 0 or from ``end`` on is no token, nor is any of a request with ``left_out`` set.
    Grid: (requests,).

    Args:
        ids: int ``[num_requests, width]``.
        left_out: bool or int ``[num_requests]``.
        counts: int64 ``[num_requests]``.
        kept: int64 ``[num_requests, width]``.
        width: ids of a request.
        end: the size of the vocabulary.
        TILE: ids at a time.
    """
    index = tl.program_id(0).to(tl.int64)
    counted = tl.load(left_out + index).to(tl.int32) == 0
    count = index * 0
    for at in range(0, width, TILE):
        column = at + tl.arange(0, TILE).to(tl.int64)
        inside = column < width
        token = tl.load(ids + index * width + column, mask=inside, other=-1).to(tl.int64)
        real = (token >= 0) & (token < end) & counted
        tl.store(kept + index * width + column, tl.where(real, token, -1), mask=inside)
        count += tl.sum(real.to(tl.int64), axis=0)
    tl.store(counts + index, count)
