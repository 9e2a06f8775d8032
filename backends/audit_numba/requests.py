"""The requests of a step, compiled: which of them have rows, and whether they are well-formed."""

from __future__ import annotations

from typing import Final

from ...audit import books as book
from .machine_code import cached, compiled

SERIAL: Final = book.SERIAL


@compiled
def rows_of(index, requests, facts, columns, num_rows, released):
    """Return a request's rows, as ``kvtxn.audit.rows.Batch`` reads them.

    Args:
        index: the request's number in the step.
        requests: lines, starts, first positions and drafts, see ``StepArrays``.
        facts: int64 ``[NUM_FACTS, num_lines]``.
        columns: columns of the requests' own digests.
        num_rows: rows for which the step's tensors have room.
        released: take a request, too, that was released since the step began.

    Returns:
        Its line, the number of its first row, that row's position, its number of rows and of drafts
        among them, and whether it is malformed. Without rows: -1, 0, 0, 0, 0.
    """
    lines, starts, first, drafts = requests
    line, start, end, position = lines[index], starts[index], starts[index + 1], first[index]
    count = end - start  # no sum of what the step says: it might be too large for 64 bits
    fits = 0 <= line < facts.shape[1] and 0 <= start < end <= num_rows
    fits = fits and 0 <= position < columns - count
    fits = fits and (released or facts[SERIAL, line] >= 0)
    if not fits:
        return -1, 0, 0, 0, 0, line >= 0 and count != 0
    taken = 0
    if len(drafts):
        taken = min(max(drafts[index], 0), count)
    return line, start, position, count, taken, False


@cached
def fill_first(starts, positions, first, num_rows):
    """Write the positions of the requests' first rows into ``first``; -1 for no such row.

    One number for each element of ``first``.
    """
    for index in range(len(first)):
        start = starts[index]
        first[index] = positions[start] if 0 <= start < num_rows else -1


@cached
def well_formed(requests, accepted, besides, facts, columns, num_rows, released, seen):
    """Tell whether no request is malformed and no two have one line.

    ``accepted``, int64 ``[num_requests]``, are accepted drafts, and ``besides`` other tokens, that
    have to be possible; it is empty if they are not known yet. ``seen``, bool ``[num_lines]``, is
    all False, and is left so.
    """
    right, (lines, _, _, drafts) = True, requests
    for index in range(len(lines)):
        line, _, _, count, taken, refused = rows_of(
            index, requests, facts, columns, num_rows, released
        )
        if refused:
            right = False
        if count:
            if seen[line] or (len(drafts) and drafts[index] != taken):
                right = False
            if len(accepted) and not -1 <= accepted[index] - besides <= taken:
                right = False
            seen[line] = True
    for index in range(len(lines)):
        if 0 <= lines[index] < len(seen):
            seen[lines[index]] = False
    return right
