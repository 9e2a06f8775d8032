"""Rows of many requests at once, and the way from a position to its word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import torch
from torch import Tensor

from . import books as book
from .books import Books
from .digest import EMBEDDED, MAX_POSITION
from .groups import Place
from .step import Step


def ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """List the rows of requests that have different numbers of them.

    Args:
        counts: int64 ``[num_requests]``, the number of rows of each request.

    Returns:
        int64 ``[counts.sum()]`` twice: the request of each row, and the row's number within it.
    """
    owner = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    within = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return owner, within


@attrs.frozen(eq=False)
class Batch:
    """The requests of a step, without padding and without requests that are malformed.

    A request is malformed if its line is not of an admitted request, if its rows lie outside the
    step's tensors, or if its positions lie outside the ledger. It is treated like padding.

    Attributes:
        lines: int64 ``[num_requests]``; -1 for a request without rows.
        first: int64 ``[num_requests]``, the position of the first row; 0 without rows.
        starts: int64 ``[num_requests]``, the number of the first row in the step.
        counts: int64 ``[num_requests]``, the number of rows; 0 for padding and malformed requests.
        drafts: int64 ``[num_requests]``, the number of drafts, at most the number of rows.
        refused: bool ``[num_requests]``, the malformed requests.
    """

    lines: Tensor
    first: Tensor
    starts: Tensor
    counts: Tensor
    drafts: Tensor
    refused: Tensor

    @classmethod
    def of(cls, books: Books, step: Step, *, released: bool = False) -> Batch:
        """Read the requests of a step.

        Args:
            books: the ledger's books.
            step: a step.
            released: take requests, too, that were released since the step began.
        """
        given, number = step.lines.long(), len(step.lines)
        starts = step.starts[: number + 1].long()
        counts, first = starts[1:] - starts[:-1], first_of(books, step)[:number].long()
        line = given.clamp(0, books.facts.shape[1] - 1)
        fits = (given == line) & ((books.facts[book.SERIAL][line] >= 0) | released)
        # No sum of what the step says: it might be too large for 64 bits.
        fits &= (starts[1:] > starts[:-1]) & (starts[:-1] >= 0) & (starts[1:] <= step.num_rows)
        fits &= (first >= 0) & (first < books.own.shape[1] - counts)
        counts = torch.where(fits, counts, 0)
        drafts = torch.zeros_like(counts)
        if step.drafts is not None:
            drafts = step.drafts[:number].long().clamp(min=0).minimum(counts)
        return cls(
            lines=torch.where(fits, given, -1),
            first=torch.where(fits, first, 0),
            starts=torch.where(fits, starts[:-1], 0),
            counts=counts,
            drafts=drafts,
            refused=(given >= 0) & (starts[1:] != starts[:-1]) & ~fits,
        )

    @property
    def live(self) -> Tensor:
        """Mark the requests that have rows, bool ``[num_requests]``."""
        return self.counts > 0


def first_of(books: Books, step: Step) -> Tensor:
    """Return the position of each request's first row, int ``[num_requests]`` or longer.

    Of a step without ``Step.first`` these are what ``fill_first`` found when it began.
    """
    return books.first[: len(step.lines)] if step.first is None else step.first


def fill_first(books: Books, step: Step) -> None:
    """Fill ``Books.first`` with the position of each request's first row, -1 for a row outside.

    Does nothing for a step that has ``Step.first``.
    """
    if step.first is None and step.positions is not None:
        starts = step.starts[: len(step.lines)].long()
        inside = (starts >= 0) & (starts < step.num_rows)
        found = torch.full_like(starts, -1)
        found[inside] = step.positions[starts[inside]].long()
        books.first[: len(step.lines)] = found


def computed_for(step: Step, row: Tensor, position: Tensor) -> Tensor:
    """Return the position that each row is computed for; -1 for a number that is none.

    Without ``Step.positions`` these are the positions that the rows stand for.

    Args:
        step: the step.
        row: int64 ``[n]``, the numbers of rows in the step.
        position: int64 ``[n]``, the positions that they stand for.
    """
    if step.positions is None:
        return position
    given = step.positions[row].long()
    return torch.where((given >= 0) & (given < MAX_POSITION), given, -1)


def admitted(books: Books, lines: Tensor) -> Tensor:
    """Return lines with -1 in place of a line that no request has, int64 ``[num_requests]``."""
    line = lines.clamp(0, books.facts.shape[1] - 1)
    return torch.where((lines == line) & (books.facts[book.SERIAL][line] >= 0), lines, -1)


def next_token(sampled: Tensor, kept: Tensor) -> Tensor:
    """Return the token after the accepted drafts of each request; -1 if none was sampled."""
    if not sampled.shape[1]:
        return torch.full_like(kept, -1)
    column = kept.clamp(max=sampled.shape[1] - 1)
    token = sampled.long().gather(1, column[:, None])[:, 0]
    real = (kept < sampled.shape[1]) & (token >= 0) & (token < EMBEDDED)
    return torch.where(real, token, -1)


def same_drafts(step: Step, batch: Batch, sampled: Tensor) -> Tensor:
    """Count the leading drafts of each request whose rows are not of another token than sampled.

    Args:
        step: the step.
        batch: its requests.
        sampled: int ``[num_requests, n]``; drafts beyond ``n`` are not compared.

    Returns:
        int64 ``[num_requests]``; the request's number of rows if no draft is of another token.
    """
    width = sampled.shape[1]
    if not width or not len(step.tokens):
        return batch.counts
    column = torch.arange(width, device=sampled.device)
    row = (batch.starts + batch.counts - batch.drafts)[:, None] + column
    fed = step.tokens[row.clamp(max=len(step.tokens) - 1)].long()
    other = (column < batch.drafts[:, None]) & ((fed ^ sampled.long()) & (EMBEDDED - 1) != 0)
    return torch.where(other.any(1), other.long().argmax(1), batch.counts)


def first_visible(place: Place, first: Tensor, end: Tensor) -> Tensor:
    """Return the first position that each request's query at ``first`` reads.

    int64 ``[num_requests]``: 0, or the latest of the first positions that a window, a chunk or a
    ring of the group leaves.

    Args:
        place: the group.
        first: int64 ``[num_requests]``, the position of the query.
        end: int64 ``[num_requests]``, the position after the request's last row; positions of a
            ring that the step itself overwrites are not read from the ring.
    """
    group, low = place.group, torch.zeros_like(first)
    if group.window is not None:
        low = low.maximum(first - group.window + 1)
    if group.chunk is not None:
        low = low.maximum(first // group.chunk * group.chunk)
    if group.ring is not None:
        low = low.maximum(end - group.ring)
    return low


def in_ring(place: Place, position: Tensor) -> Tensor:
    """Return each position's index among the slots of a block table; 0 for a state."""
    if place.group.is_state:
        return torch.zeros_like(position)
    return position if place.group.ring is None else position % place.group.ring


def word_at(place: Place, slot: Tensor) -> Tensor:
    """Return the index in ``Books.words`` of a slot's word."""
    size = place.group.block_size
    return place.base + slot // size * place.stride + slot % size


def set_chosen(known: Tensor, where: Tensor, chosen: Tensor, new: Tensor | int) -> None:
    """Set the chosen ones of some numbers in ``known``, no two of them at one place; never waits.

    It is a sum modulo 2^64: what is not chosen adds nothing, wherever it points.
    """
    more = torch.where(chosen, new - known[where], 0)
    known.index_add_(0, where.flatten(), more.flatten())


def slot_at(place: Place, where: int) -> int:
    """Return the slot whose word has an index in ``Books.words``."""
    within = where - place.base
    return within // place.stride * place.group.block_size + within % place.stride


def slots_at(place: Place, where: Tensor) -> Tensor:
    """Return the slots of words of a group, int64 ``[n]``; 0 where there is no word."""
    within = (where - place.base).clamp(min=0)
    return within // place.stride * place.group.block_size + within % place.stride


class Reads(Protocol):
    """Tables that requests are read through: a step, or a stretch of rows; see ``Step``."""

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """By group, int ``[lines, blocks]``."""

    @property
    def table_lines(self) -> Tensor | None:
        """Int ``[num_requests]``, each request's line of the tables; None: its own number."""

    @property
    def block_maps(self) -> Mapping[str, Tensor]:
        """By group, int ``[n]``, the block that each number in the group's table stands for."""


def words_read(read: Reads, place: Place, request: Tensor, position: Tensor) -> Tensor:
    """Return the index of the word that each request reads for a position; -1 for none.

    Args:
        read: has a table of the group.
        place: the group.
        request: int64 ``[n]``, numbers of requests.
        position: int64 ``[n]``.
    """
    name, lines = place.group.name, read.table_lines
    line = request if lines is None else lines.long()[request]
    return through(place, read.tables[name], line, position, read.block_maps.get(name))


def blocks_read(read: Reads, name: str, request: int) -> Tensor:
    """Return the blocks in a group's table of a request, int64 ``[blocks]``; waits for the device.

    Args:
        read: has a table of the group.
        name: the group's name.
        request: the number of the request.

    Returns:
        Without columns where the table does not have the request's line.
    """
    table, lines = read.tables[name], read.table_lines
    line = request if lines is None else int(lines[request])
    own = table[line] if 0 <= line < len(table) else table.new_empty(0)
    return _mapped(own.long(), read.block_maps.get(name))


def _mapped(block: Tensor, block_map: Tensor | None) -> Tensor:
    """Return the blocks that numbers in a table stand for, int64; -1 for none."""
    if block_map is None:
        return block
    inside = (block >= 0) & (block < len(block_map))
    return torch.where(inside, block_map[torch.where(inside, block, 0)].long(), -1)


def through(
    place: Place,
    table: Tensor,
    line: Tensor,
    position: Tensor,
    block_map: Tensor | None = None,
) -> Tensor:
    """Return the index of the word that a table leads to; -1 if outside.

    Args:
        place: the group.
        table: int ``[lines, blocks]``.
        line: int64 ``[n]``, lines of the table; one that is none leads nowhere.
        position: int64 ``[n]``.
        block_map: int ``[n]``, the block that each number of the table stands for; None: itself.
    """
    at = in_ring(place, position)
    column = at // place.group.block_size
    if not table.numel():
        return torch.full_like(position, -1)
    last_line, last_column = (size - 1 for size in table.shape)
    block = table[line.clamp(0, last_line), column.clamp(max=last_column)].long()
    block = _mapped(block, block_map)
    inside = (line >= 0) & (line <= last_line) & (column <= last_column)
    inside &= (block >= 0) & (block < place.group.num_blocks)
    slot = block * place.group.block_size + at % place.group.block_size
    return torch.where(inside, word_at(place, slot), -1)
