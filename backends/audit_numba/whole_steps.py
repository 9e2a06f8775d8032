"""The usual step, compiled: examined, written and compared in one call, and resolved in another.

A call costs more than what it does here: after a forward nothing of it is in the core's caches.
Arguments are those of ``write_rows``, ``compare_rows`` and ``requests.well_formed``.
"""

from __future__ import annotations

from typing import Final

from ...audit import books as book
from .compare_rows import compare_rows
from .requests import fill_first, well_formed
from .words import compiled
from .write_rows import resolve_rows, write_rows

ROWS_CHECKED: Final = book.ROWS_CHECKED
#: What ``write_and_compare`` returns if a row is not right, and if nothing was done.
WRONG, MALFORMED = -1, -2


@compiled
def write_and_compare(
    lines, starts, first, fills, positions, tokens, drafts, slots, tables, groups, key, words,
    owners, own, facts, journal, counters, fingerprints, seen, num_rows,
):  # fmt: skip
    """Write and compare the rows of a step without states, if it is well-formed.

    ``fills``: ``first`` is found in ``positions``.

    Returns:
        The rows that were compared, and counted; ``WRONG``; or ``MALFORMED``.
    """
    if fills:
        fill_first(starts, positions, first[: len(lines)], num_rows)
    nothing = lines[:0]
    if not well_formed(
        lines, starts, first, drafts, nothing, 0, facts, own.shape[1], num_rows, False, seen
    ):
        return MALFORMED
    write_rows(
        lines, starts, first, positions, tokens, drafts, slots, groups, key, words, owners, own,
        facts, journal, counters, fingerprints, num_rows,
    )  # fmt: skip
    compared = compare_rows(
        lines, starts, first, drafts, tables, groups, words, own, facts, num_rows
    )
    if compared < 0:
        return WRONG
    counters[ROWS_CHECKED] += compared
    return compared


@compiled
def resolve_well_formed(
    lines, starts, first, tokens, drafts, accepted, besides, sampled, slots, groups, key, words,
    own, facts, counters, seen, num_rows,
):  # fmt: skip
    """Resolve a step, if its outcome is possible; tells whether it is."""
    if not well_formed(
        lines, starts, first, drafts, accepted, besides, facts, own.shape[1], num_rows, True, seen
    ):
        return False
    resolve_rows(
        lines, starts, first, tokens, drafts, accepted, besides, sampled, slots, groups, key,
        words, own, facts, counters, num_rows,
    )  # fmt: skip
    return True
