"""Record a violation in the books, in torch, with the last writer that the journal still has."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from . import books as book
from .books import Books
from .groups import Place
from .rows import slot_at
from .violation import FIELD, FIELDS, FOUND_NUMBER, KIND_NUMBER, NOBODY

#: Kinds of violations that are found before their step is counted.
_BEFORE_THE_STEP: Final = (KIND_NUMBER["state"], KIND_NUMBER["changed"])
_NAN: Final = FOUND_NUMBER["nan"]
_STALE: Final = KIND_NUMBER["stale"]


def record_violation(
    books: Books,
    kind: int,
    line: Tensor,
    place: Place | None,
    position: int,
    where: int,
    found: int,
    layer: int = NOBODY,
) -> None:
    """Count one violation, and keep it with its last writer as long as there is room.

    Args:
        books: the ledger's books.
        kind: a number of ``KINDS``.
        line: int64, the line of the request that read.
        place: the group; None if no group is concerned.
        position: the position that was read.
        where: the index of its word in ``Books.words``; -1 if the table led outside the group.
        found: a number of ``FOUND``.
        layer: the layer's number among the layers of a scrub, or -1; of a stale row its age.
    """
    is_state = place is not None and place.group.is_state
    before = (kind in _BEFORE_THE_STEP and found != _NAN) or (kind == _STALE and is_state)
    number = int(books.counters[book.FOUND])
    books.counters[book.FOUND] += 1
    books.counters[book.BY_KIND + kind] += 1
    if number >= int(books.counters[book.LIMIT]):
        return
    record = torch.full((len(FIELDS),), NOBODY, dtype=torch.int64)
    values = {
        "kind": kind,
        "step": int(books.counters[book.STEP]) + before,
        "serial": int(books.facts[book.SERIAL][line]),
        "group": NOBODY if place is None else place.index,
        "position": position,
        "place": where,
        "slot": NOBODY if place is None or where < 0 else slot_at(place, where),
        "found": found,
        "layer": layer,
    }
    for back in range(3):
        at = max(position - back, 0)
        values[f"wanted_{back}"] = int(books.own[line, at + 1] - books.own[line, at])
    for name, value in values.items():
        record[FIELD[name]] = value
    _trace(books, record)
    books.found[number % books.sizes.capacity] = record.to(books.found.device)


def _trace(books: Books, record: Tensor) -> None:
    """Fill in the last writer of the word that a violation names, if the journal still has it.

    Of no word, and of an unwritten one, nothing is filled in.
    """
    place, found = int(record[FIELD["place"]]), int(record[FIELD["found"]])
    if place < 0 or found == FOUND_NUMBER["unwritten"]:
        return
    journal, size = books.journal, books.sizes.journal
    here = (journal[:, book.JOURNAL_PLACES :] == place).any(1)
    written = int(books.counters[book.JOURNALLED])
    age = (written - 1 - torch.arange(size, device=journal.device)) % size
    age[~here] = size
    newest = int(age.argmin())
    if int(age[newest]) == size:
        return
    entry = journal[newest].cpu()
    record[FIELD["writer_step"]] = entry[book.JOURNAL_STEP]
    record[FIELD["writer_serial"]] = entry[book.JOURNAL_SERIAL]
    record[FIELD["writer_position"]] = entry[book.JOURNAL_POSITION]
    terms = entry[book.JOURNAL_TERMS : book.JOURNAL_TERMS + 3]
    record[FIELD["written_0"] : FIELD["written_0"] + 3] = terms
