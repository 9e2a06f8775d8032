"""``Step`` and ``Stretch``: a forward pass, and rows to inspect, as an engine describes them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

import attrs
import torch
from torch import Tensor

#: The kinds of violations that an inspected row can be.
STRETCH_KINDS: Final = ("published", "exported", "imported")


@attrs.frozen(eq=False)
class Step:
    """The rows of one forward pass and the tables it reads through.

    All tensors are on the ledger's device. They are read when ``write``, ``check`` and ``resolve``
    run, so an engine may pass its whole persistent buffers: a request with line -1 is padding,
    and rows from ``starts[num_requests]`` on are ignored. So the launches can be captured in a
    graph. A tensor may be longer than said below; what lies behind is not read.

    A request whose line was not admitted, or whose rows or positions lie outside, is *malformed*:
    on a CPU the step is refused, on a GPU, where a check would wait, the request is left out and
    counted in ``Ledger.refused``. Numbers of drafts that a request cannot have are refused on a
    CPU, too, and taken for the nearest possible number on a GPU.

    Token ids are compared by their low 39 bits. Ids of ``Ledger.admit`` are below 2^39 in any case,
    and no vocabulary comes near that; so only numbers that are no tokens, such as a placeholder of
    -1 in an engine's buffer, are compared as something else than what they are.

    Attributes:
        lines: int ``[num_requests]``, the line of each request, from ``Ledger.line``; -1, or any
            other number below 0: padding.
        starts: int ``[num_requests + 1]``, the first row of each request, then the number of rows.
        first: int ``[num_requests]``, the position of each request's first row; its further rows
            are of the positions that follow. None, if nobody but the device knows it: the position
            that ``positions`` has of each request's first row, for at most ``max_requests`` of the
            ledger.
        tokens: int ``[num_rows]``, the token that each row is computed of.
        drafts: int ``[num_requests]``, the number of each request's last rows that are drafts; None
            means no drafts.
        slots: by group, int ``[num_rows]``: the slot that each row is written to, -1 for no slot;
            a number outside of the group is no slot, either, so that whoever reads the row finds
            it unwritten. For states the block that the state *after* that row is written to, -1 if
            that state is not kept.
        tables: by group of rows, int ``[num_requests, blocks]``: the block table to read through.
            A group that is left out is not read in this step, and not compared.
        table_lines: int ``[num_requests]``, the line of each table that is the request's, for
            tables with a line for each request that there can be: int ``[lines, blocks]``, of at
            least one line. A line that a table does not have leads nowhere, and its request reads
            unwritten rows. None: the table's lines are the step's requests, in their order.
        block_maps: by group of rows, int ``[n]``, if the group's table names numbers of another
            pool: number b stands for block ``block_maps[group][b]`` of this group; one that the map
            does not have leads nowhere. ``slots`` are the group's own, as ever.
        sources: by group of states, int ``[num_requests]``: the block whose state the request
            continues; -1 if it begins with zeros. A request at position 0 has no state to continue,
            so any block that it names is a wrong read. If the engine's kernels ignore the source of
            such a request, give -1 for it.
        told: int ``[num_requests]``, the number of drafts that the engine says were accepted in the
            step before; -1 if it does not say. None means that it never says.
        positions: int ``[num_rows]``, the position that each row is computed for, as the forward
            gets it. Each row is compared with the position it stands for, which is its request's
            first one plus its number within the request: a row computed for another position is
            foreign to every reader. None: rows are taken to be computed for the positions that they
            stand for.
        parents: int ``[num_rows]``, if drafts are trees: for each draft row the draft that it
            follows, an earlier one, by its number among the request's drafts; -1 if it follows the
            last settled row. The drafts lie in the table one after the other, and each is computed
            for the position after the one that it follows. A number that is none of these is taken
            for the nearest; of other rows it is not read. ``resolve`` needs the sampled tokens, by
            which it finds the accepted drafts; then the engine copies their rows to where the
            request's next step reads them: ``Ledger.carry``. None: each row follows the one before.
    """

    lines: Tensor
    starts: Tensor
    first: Tensor | None
    tokens: Tensor = attrs.field(repr=False)
    slots: Mapping[str, Tensor]
    tables: Mapping[str, Tensor] = attrs.field(factory=dict)
    drafts: Tensor | None = None
    sources: Mapping[str, Tensor] = attrs.field(factory=dict)
    told: Tensor | None = None
    positions: Tensor | None = None
    table_lines: Tensor | None = None
    parents: Tensor | None = attrs.field(default=None, repr=False)
    block_maps: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows for which every tensor of rows has room."""
        some = (self.positions, self.parents)
        every = [self.tokens, *self.slots.values(), *(each for each in some if each is not None)]
        return min(map(len, every))

    def is_like(self, other: Step) -> bool:
        """Tell whether two steps have the same requests and tokens; waits for their device."""
        mine, theirs = ((each.lines, each.starts, each.tokens) for each in (self, other))
        return all(
            one is two or torch.equal(one, two) for one, two in zip(mine, theirs, strict=True)
        )


@attrs.frozen(eq=False)
class Stretch:
    """Rows to inspect when a block is published, or when rows leave the engine.

    Attributes:
        lines: int ``[num_requests]``, the line of each request; -1 is padding.
        first: int ``[num_requests]``, the position of each request's first row.
        end: int ``[num_requests]``, the position after each request's last row.
        tables: by group, int ``[num_requests, blocks]``.
        kind: one of ``STRETCH_KINDS``; exported rows must also be durable.
        table_lines: int ``[num_requests]``, as in ``Step``.
        block_maps: by group, int ``[n]``, as in ``Step``.
    """

    lines: Tensor
    first: Tensor
    end: Tensor
    tables: Mapping[str, Tensor]
    kind: str
    table_lines: Tensor | None = None
    block_maps: Mapping[str, Tensor] = attrs.field(factory=dict)


def padded_columns(rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
    """Return what ``Stretch`` wants of each request, with padding to an even number of requests.

    Each column begins at whole 16 bytes then. Triton compiles a kernel once more for tensors that
    do not, and an engine would wait for that in the middle of its work.

    Args:
        rows: of each request its line, first, end, and line of the tables.

    Returns:
        int64 ``[4, n]`` on the host, contiguous.
    """
    padding = [(-1, 0, 0, 0)] * (len(rows) % 2)
    numbers = array("q", chain.from_iterable(zip(*rows, *padding, strict=True)))
    if not numbers:
        return torch.empty((4, 0), dtype=torch.int64, device="cpu")
    return torch.frombuffer(numbers, dtype=torch.int64).view(4, -1)  # quicker than torch.tensor
