"""The kernel that begins requests.

Memory contract of ``begin_requests``:

- One program per request, and no two of one line: each writes its line of ``own`` and its column of
  ``facts``, and nobody else does in this launch.
- ``packed`` is read. Its fields come from the host, which has checked them: lines are below
  ``num_lines``, tokens at most ``own_stride - 1``.
- Every address is computed in int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import beginning
from ...audit import books as book
from .words import term

LINE = tl.constexpr(beginning.LINE)
ADMITTED_AS = tl.constexpr(beginning.SERIAL)
BEGIN = tl.constexpr(beginning.BEGIN)
COUNT = tl.constexpr(beginning.COUNT)
SEED = tl.constexpr(beginning.SEED)
AGAIN = tl.constexpr(beginning.AGAIN)
NUM_FIELDS = tl.constexpr(beginning.NUM_FIELDS)
SERIAL = tl.constexpr(book.SERIAL)
KNOWN = tl.constexpr(book.KNOWN)
DURABLE = tl.constexpr(book.DURABLE)
OUTSIDE = tl.constexpr(book.OUTSIDE)
KEPT = tl.constexpr(book.KEPT)
KEPT_BEFORE = tl.constexpr(book.KEPT_BEFORE)


@triton.jit(do_not_specialize=["num_tokens", "own_stride", "num_lines"])
def begin_requests(
    packed: tl.tensor,
    key: tl.tensor,
    own: tl.tensor,
    facts: tl.tensor,
    num_tokens: tl.int64,
    own_stride: tl.int64,
    num_lines: tl.int64,
    TILE: tl.constexpr,
) -> None:
    """Put a request's digests and facts in place. Grid: (requests,).

    Args:
        packed: int64, as ``kvtxn.audit.beginning.Beginning.packed``.
        key: int64 ``[3]``.
        own: int64 ``[num_lines, own_stride]``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        num_tokens: tokens of all requests.
        own_stride: columns of ``own``.
        num_lines: lines.
        TILE: tokens at a time.
    """
    fields = packed + num_tokens + tl.program_id(0).to(tl.int64) * NUM_FIELDS
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
    tl.store(fact + KEPT_BEFORE * num_lines, count * 0 - 1)
    tl.store(fact + KEPT * num_lines, count * 0 - 1)
    tl.store(fact + OUTSIDE * num_lines, count * 0)
