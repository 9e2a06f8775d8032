"""Rows of blocks that leave the engine, compared with the tokens that they are stored under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy
import torch

from ....audit import Ledger, RowGroup, Stretch
from ....audit.step import padded_columns
from ....host_values import to_device
from ..step import Arrival
from .block_identities import Span

#: Requests whose rows are compared at a time: their block tables take memory.
_AT_ONCE: Final = 64

#: The ledger's request for tokens that no request has: of a fault, or of the scheduler's half.
_NOBODYS: Final = "the tokens of a store"


def compare(ledger: Ledger, groups: Mapping[str, RowGroup], spans: Sequence[Span]) -> None:
    """Compare the rows of blocks that leave with their requests' tokens, as kind "exported".

    Args:
        ledger: the worker's ledger, which knows the requests.
        groups: the groups of the blocks, by name.
        spans: the blocks.
    """
    for group in dict.fromkeys(span.group for span in spans):
        own = [span for span in spans if span.group == group]
        for at in range(0, len(own), _AT_ONCE):
            ledger.inspect(_stretch(ledger, groups[group], own[at : at + _AT_ONCE]))


def compare_with(
    ledger: Ledger, groups: Mapping[str, RowGroup], span: Span, other: Arrival
) -> None:
    """Compare the rows of blocks with ``other``, which is admitted to the ledger meanwhile."""
    embedded = {at: what for at, what in other.embedded.items() if at < len(other.tokens)}
    ledger.admit(_NOBODYS, other.tokens, extras=other.extras, embedded=embedded)
    compare(ledger, groups, [attrs.evolve(span, request=_NOBODYS)])
    ledger.release(_NOBODYS)


def _stretch(ledger: Ledger, group: RowGroup, spans: Sequence[Span]) -> Stretch:
    """Return the rows of blocks of a group that leave, each block as a stretch of its own.

    After a violation the ledger does not compare a request again before the stretch's end. In a
    longer stretch, a wrong block would hide the wrong blocks after it.
    """
    size = group.block_size
    rows, ends = [], [span.begin + len(span.blocks) for span in spans]
    for number, (span, end) in enumerate(zip(spans, ends, strict=True)):
        line = ledger.line(span.request)
        rows += [(line, at * size, at * size + size, number) for at in range(span.begin, end)]
    tables = numpy.zeros((len(spans), max(ends)), dtype=numpy.int64)
    for table, span, end in zip(tables, spans, ends, strict=True):
        table[span.begin : end] = span.blocks
    columns = padded_columns(rows)
    both = torch.cat([columns.flatten(), torch.from_numpy(tables).flatten()])
    both = to_device(both, ledger.device, torch.int64)  # one copy for all
    line, first, end, of = both[: columns.numel()].view(columns.shape)
    read = {group.name: both[columns.numel() :].view(tables.shape)}
    return Stretch(line, first, end, read, "exported", of)
