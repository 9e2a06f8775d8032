"""A comparison of the rows that a forward's attention reads with those that its requests have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from .books import Books
from .rows import Batch, words_read
from .step import Step
from .violation import FOUND_NUMBER, KIND_NUMBER
from .violation_record import record_violation

_FOREIGN: Final = KIND_NUMBER["foreign"]
_LENGTH: Final = FOUND_NUMBER["length"]


def report_lengths(books: Books, step: Step, lengths: Mapping[str, Tensor] | None) -> None:
    """Report requests whose attention reads more or fewer rows than they have. Waits for a GPU.

    A violation is of kind ``foreign`` and found "length". It names the first position that is read
    too much, or the first one that is left out, and the slot that the table leads to from there.

    Args:
        books: the ledger's books.
        step: the last step, after its ``check``; with tables of the groups.
        lengths: by group of rows, int ``[num_requests]``: the positions that the last query of each
            request reads, from position 0 on; of those a window hides some. None: do nothing.
    """
    if lengths is None:
        return
    batch = Batch.of(books, step)
    number = len(batch.lines)
    ends, last = batch.first + batch.counts, books.own.shape[1] - 2
    for name, given in lengths.items():
        place, read = books.layout.places[name], given[:number].long()
        position = read.minimum(ends).clamp(0, last)
        request = torch.arange(number, device=position.device)
        where = words_read(step, place, request, position)
        for index in (batch.live & (read != ends)).nonzero().flatten().tolist():
            at = int(position[index]), int(where[index])
            record_violation(books, _FOREIGN, batch.lines[index], place, *at, _LENGTH)
