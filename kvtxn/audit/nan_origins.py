"""The row or state that a NaN came from: a search over all that a request's step may have read.

An attention kernel may multiply masked rows by zero, and a NaN comes through that. So the search
takes whole blocks: first the rows that the step reads, then the others of their blocks, and last
those that the step itself wrote, which have a NaN in later layers wherever an earlier layer had
one.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from ..row_io import read
from .byte_books import ByteBooks, Watched
from .checksum import has_nan
from .groups import Place
from .rows import Batch, first_visible, slots_at, word_at, words_read
from .step import Step

_READ, _MASKED, _OWN = range(3)


@attrs.frozen(eq=False)
class Origin:
    """A slot with a NaN.

    Attributes:
        place: the slot's group.
        where: the index of the slot's word.
        position: the position that the request's table has there.
        layer: the number of the first layer with a NaN there.
    """

    place: Place
    where: int
    position: int
    layer: int


@attrs.frozen(eq=False)
class _Slots:
    """Slots of a group that a request leads to: positions, words, and how they are used, 1-D."""

    place: Place
    position: Tensor
    where: Tensor
    use: Tensor


def find(books: ByteBooks, step: Step, batch: Batch, index: int) -> Origin | None:
    """Find the slot that a NaN of a request came from; None if no slot has one.

    Of several, a slot that the step reads comes before others of the same blocks, and these before
    the step's own; then the first position, and the first layer.

    Args:
        books: the scrub's books.
        step: a step whose forward is done.
        batch: its requests.
        index: the number of the request in the step.
    """
    best: tuple[tuple[int, int, int], Origin] | None = None
    for slots in _reach(books, step, batch, index):
        for layer in books.layers[slots.place]:
            for at in _nans(layer, slots_at(slots.place, slots.where)).nonzero().flatten().tolist():
                position = int(slots.position[at])
                order = int(slots.use[at]), position, layer.number
                if best is None or order < best[0]:
                    found = Origin(slots.place, int(slots.where[at]), position, layer.number)
                    best = order, found
    return None if best is None else best[1]


def clear(books: ByteBooks, step: Step, batch: Batch, index: int) -> None:
    """Fill with zeros each row with a NaN that ``find`` looks at; the arguments are the same."""
    for slots in _reach(books, step, batch, index):
        where = slots_at(slots.place, slots.where)
        for layer in books.layers[slots.place]:
            bad = _nans(layer, where)
            for _, plane in layer.planes if bool(bad.any()) else ():
                plane.cells[plane.index(where[bad])] = 0


def _nans(layer: Watched, slots: Tensor) -> Tensor:
    """Mark the slots with a NaN in a layer, bool ``[n]``."""
    found = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
    for _, plane in layer.planes:
        if has_nan(plane) and len(slots):
            rows = read(plane, slots).view(plane.format.dtype)
            found |= rows.flatten(1).float().isnan().any(1)
    return found


def _reach(books: ByteBooks, step: Step, batch: Batch, index: int) -> Iterator[_Slots]:
    """Yield the slots of each watched group that a request's step reads, or could have read.

    Of rows these are whole blocks, the step's own rows included; of states the one that is read.
    """
    here = slice(index, index + 1)
    first, end = batch.first[here], batch.first[here] + batch.counts[here]
    for place in books.layers:
        name, size = place.group.name, place.group.block_size
        if place.group.is_state:
            block = step.sources[name][here].long() if name in step.sources else first - first - 1
            if int(first) > 0 and 0 <= int(block) < place.num_slots:
                yield _Slots(place, first - 1, word_at(place, block), first * 0)
        elif name in step.tables:
            low = int(first_visible(place, first, end))
            high = min(-(-int(end) // size), step.tables[name].shape[1]) * size
            position = torch.arange(low // size * size, high, device=first.device)
            where = words_read(step, place, torch.full_like(position, index), position)
            masked = (position < low) | (position >= end)
            use = torch.where(masked, _MASKED, torch.where(position < first, _READ, _OWN))
            inside = where >= 0
            yield _Slots(place, position[inside], where[inside], use[inside])
