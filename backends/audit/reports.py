"""Writing one violation from a kernel; this code runs only where a wrong row was found."""

from __future__ import annotations

import triton
import triton.language as tl

from ...audit import books as book
from ...audit.violation import FIELD, FIELDS, FOUND_NUMBER, KIND_NUMBER, NOBODY

NUM_FIELDS = tl.constexpr(len(FIELDS))
#: Where the scalar arguments of ``record_violation`` stand in a record.
(AT_KIND, AT_STEP, AT_SERIAL, AT_GROUP, AT_POSITION, AT_PLACE, AT_SLOT, AT_FOUND) = (
    tl.constexpr(FIELD[name])
    for name in ("kind", "step", "serial", "group", "position", "place", "slot", "found")
)
WANTED = tl.constexpr(FIELD["wanted_0"])
WRITER = tl.constexpr(FIELD["writer_step"])
LAYER = tl.constexpr(FIELD["layer"])
NO_ONE = tl.constexpr(NOBODY)
FOUND = tl.constexpr(book.FOUND)
LIMIT = tl.constexpr(book.LIMIT)
JOURNALLED = tl.constexpr(book.JOURNALLED)
BY_KIND = tl.constexpr(book.BY_KIND)
PLACES = tl.constexpr(book.JOURNAL_PLACES)
SERIAL = tl.constexpr(book.SERIAL)

STATE = tl.constexpr(KIND_NUMBER["state"])
IS_UNWRITTEN = tl.constexpr(FOUND_NUMBER["unwritten"])
IS_REJECTED = tl.constexpr(FOUND_NUMBER["rejected"])
IS_FOREIGN = tl.constexpr(FOUND_NUMBER["foreign"])
IS_DRAFT = tl.constexpr(FOUND_NUMBER["draft"])
IS_OWNER = tl.constexpr(FOUND_NUMBER["owner"])
#: The number of the kind, too.
IS_STALE = tl.constexpr(FOUND_NUMBER["stale"])
IS_COUNT = tl.constexpr(FOUND_NUMBER["count"])


@triton.jit
def last_entry(
    place: tl.tensor,
    journal: tl.tensor,
    size: tl.tensor,
    counters: tl.tensor,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the number of the journal's newest entry that names a place; -1 if none does."""
    written = tl.load(counters + JOURNALLED)
    newest = size
    for start in range(0, size, TILE):
        entry = start + tl.arange(0, TILE).to(tl.int64)
        inside = entry < size
        here = entry < 0
        for group in tl.static_range(GROUPS):
            column = journal + entry * (PLACES + GROUPS) + PLACES + group
            here = here | (tl.load(column, mask=inside, other=-1) == place)
        age = ((written - 1 - entry) % size + size) % size
        newest = tl.minimum(newest, tl.min(tl.where(here & inside, age, size), axis=0))
    found = ((written - 1 - newest) % size + size) % size
    return tl.where((newest < size) & (place >= 0), found, -1)


@triton.jit
def record_violation(
    kind: tl.tensor,
    step: tl.tensor,
    line: tl.tensor,
    group: tl.tensor,
    position: tl.tensor,
    place: tl.tensor,
    slot: tl.tensor,
    code: tl.tensor,
    layer: tl.tensor,
    own: tl.tensor,
    own_stride: tl.tensor,
    facts: tl.tensor,
    num_lines: tl.tensor,
    journal: tl.tensor,
    journal_size: tl.tensor,
    found: tl.tensor,
    capacity: tl.tensor,
    counters: tl.tensor,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Add one violation to ``found``, and count its kind; the scalars are columns, see ``FIELDS``.

    The last three tokens' terms come from ``own``, and the writer from the journal: none if the row
    was never written, or the journal has forgotten it. The tensors are those of ``compare_rows``.

    Several programs may do this at one time: each takes a number of its own. A violation whose
    number is not below the limit is counted and not kept, so no entry is written twice before the
    host has read it.
    """
    number = tl.atomic_add(counters + FOUND, 1)
    tl.atomic_add(counters + BY_KIND + kind, 1)
    if number < tl.load(counters + LIMIT):
        record = found + (number % capacity) * NUM_FIELDS
        tl.store(record + AT_KIND, kind)
        tl.store(record + AT_STEP, step)
        tl.store(record + AT_SERIAL, tl.load(facts + SERIAL * num_lines + line))
        tl.store(record + AT_GROUP, group)
        tl.store(record + AT_POSITION, position)
        tl.store(record + AT_PLACE, place)
        tl.store(record + AT_SLOT, slot)
        tl.store(record + AT_FOUND, code)
        for back in tl.static_range(3):
            at = own + line * own_stride + tl.maximum(position - back, 0)
            tl.store(record + WANTED + back, tl.load(at + 1) - tl.load(at))
        for field in tl.static_range(WRITER, LAYER):
            tl.store(record + field, NO_ONE)
        tl.store(record + LAYER, layer)
        if (place >= 0) & (code != IS_UNWRITTEN):
            entry = last_entry(place, journal, journal_size, counters, GROUPS, TILE)
            if entry >= 0:
                for field in tl.static_range(PLACES):
                    value = tl.load(journal + entry * (PLACES + GROUPS) + field)
                    tl.store(record + WRITER + field, value)
