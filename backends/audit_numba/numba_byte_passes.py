"""The passes of a scrub on a CPU, compiled; what is wrong, the passes in torch report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...audit import books as book
from ...audit.byte_books import ByteBooks, Watched
from ...audit.byte_passes import TorchBytePasses
from ...audit.digest import RESERVED, Key
from ...audit.groups import WORD_BYTES, Place
from ...audit.rows import fill_first
from ...audit.step import Step
from ...cache_planes import Plane
from .byte_rows import add_checksums, due_rows, due_states, slots_left
from .step_arrays import Ints, StepReader, ints


@attrs.frozen(eq=False)
class PlaneArrays:
    """A plane, with the attributes that ``add_checksums`` takes.

    ``cells`` is all of its storage.
    """

    cells: NDArray[numpy.signedinteger]
    origin: int
    strides: tuple[int, int]
    block_size: int
    offsets: Ints
    keys: Ints

    @classmethod
    def of(cls, plane: Plane, part: int, key: Key) -> PlaneArrays:
        """Describe a plane that is part number ``part`` of its layer.

        ``cells`` shares its memory.
        """
        cells, offsets, by_slot = plane.cells, plane.offsets, 0
        if offsets is None:
            by_slot = cells.stride(1)
            offsets = torch.zeros((), dtype=torch.int64, device="cpu")
            for size, stride in zip(cells.shape[2:], cells.stride()[2:], strict=True):
                offsets = offsets.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
            offsets = offsets.unsqueeze(0)
        offsets = offsets.reshape(len(offsets), -1).contiguous()
        words = torch.arange(-(-plane.row_bytes // WORD_BYTES), device="cpu")
        begin = int(cells.storage_offset())
        everything = cells.as_strided(
            (cells.untyped_storage().nbytes() // cells.itemsize,), (1,), 0
        )
        return cls(
            everything.numpy(), begin, (cells.stride(0), by_slot), plane.block_size,
            offsets.numpy(), key.permute(words * RESERVED + part).numpy(),
        )  # fmt: skip


class NumbaBytePasses(TorchBytePasses):
    """The passes of a scrub over one ledger's books; compiled when they are made.

    Args:
        books: on a CPU.
        groups: int64 ``[num_groups, FIELDS]``, as ``kvtxn.audit.group_lines`` makes it.
        read: finds the arrays of a step.
    """

    def __init__(self, books: ByteBooks, groups: Ints, read: StepReader) -> None:
        super().__init__(books)
        own = books.books
        self._groups: Final = groups
        self._read: Final = read
        self._key: Final = own.key.constants(torch.device("cpu")).numpy()
        self._words: Final = own.words.numpy()
        self._facts: Final = own.facts.numpy()
        self._counters: Final = own.counters.numpy()
        self._columns: Final = own.own.shape[1]
        self._seals: Final = books.seals.numpy()
        self._compared: Final = books.compared.numpy()
        self._layers: Final[Mapping[Place, Sequence[tuple[Ints, Sequence[PlaneArrays]]]]] = {
            place: [self._layer(layer) for layer in layers]
            for place, layers in books.layers.items()
        }
        self._compile()

    def _compile(self) -> None:
        """Compile every function, by calling it for a step without requests; nothing changes."""
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        for place in self._layers:
            self.sums(place, none)
        row, places = none.new_zeros(1), self.books.books.layout.places
        states = {name for name, place in places.items() if place.group.is_state}
        step = Step(
            none, row, none, row,
            slots=dict.fromkeys(places, row - 1),
            tables={name: row.int()[None] for name in places if name not in states},
            sources=dict.fromkeys(states, row - 1),
        )  # fmt: skip
        self._due(step)
        self.seal(step, none)

    def _layer(self, layer: Watched) -> tuple[Ints, Sequence[PlaneArrays]]:
        """Return the stored checksums of a layer, which share its memory, and its planes."""
        key = self.books.books.key
        return layer.sums.numpy(), [PlaneArrays.of(p, number, key) for number, p in layer.planes]

    def _summed(self, planes: Sequence[PlaneArrays], slots: Ints) -> Ints:
        """Return the checksums of slots of one layer, int64 ``[n]``, as their bytes are now."""
        sums = numpy.zeros(len(slots), numpy.int64)
        for each in planes:
            add_checksums(
                each.cells, each.origin, each.strides, each.block_size, each.offsets, each.keys,
                self._key, slots, sums,
            )  # fmt: skip
        return sums

    def sums(self, place: Place, slots: Tensor) -> Tensor:
        """Return the checksums of slots, int64 ``[num_layers, n]``, as their bytes are now."""
        given = ints(slots)
        found = [self._summed(planes, given) for _, planes in self._layers[place]]
        return torch.from_numpy(numpy.stack(found))

    def compare(self, step: Step) -> None:
        """Of the sealed slots that a step reads, compare the bytes of those whose turn it is.

        Where all are right they are counted; else the passes in torch do it again, and report. See
        ``BytePasses.compare``.
        """
        fill_first(self.books.books, step)
        due = self._due(step)
        for place, slots in due:
            for stored, planes in self._layers[place]:
                if (stored[slots] != self._summed(planes, slots)).any():
                    super().compare(step)
                    return
        self._compared[0] += sum(len(slots) for _, slots in due)

    def _due(self, step: Step) -> list[tuple[Place, Ints]]:
        """List the sealed slots that a step reads and whose turn it is, by the group that wrote.

        Groups without watched layers or without such slots are left out.
        """
        places, read = self.books.books.layout.places, self._read.read(step)
        turn, every = int(self._counters[book.STEP]), self.books.every
        found = []
        for place in places.values():
            source, group = places[place.written], self._groups[place.index]
            read_at = read.sources if place.group.is_state else read.tables
            table = read_at[place.index]
            if source not in self._layers or not len(table):
                continue
            rest = (
                group, self._words, self._facts, self._columns, read.num_rows, self._seals, turn,
                every,
            )  # fmt: skip
            if place.group.is_state:
                listed = due_states(read.requests, table, *rest)
            else:
                how = read.table_lines, read.block_maps[place.index]
                listed = due_rows(read.requests, table, *how, *rest)
            if len(listed):
                found.append((source, listed))
        return found

    def seal(self, step: Step, accepted: Tensor, besides: int = 0) -> None:
        """Seal the slots that a step leaves, and store their checksums.

        Where dead slots are filled, in poisoned groups, the passes in torch do all. See
        ``BytePasses.seal``.
        """
        if self.books.poisoned:
            super().seal(step, accepted, besides)
            return
        read, counts = self._read.read(step), ints(accepted)
        turn, every = int(self._counters[book.STEP]), self.books.every
        for place, layers in self._layers.items():
            written = read.slots[place.index]
            if not len(written):
                continue
            slots = slots_left(
                read.requests, counts, besides, written, self._groups[place.index],
                self._words, self._facts, self._columns, read.num_rows, self._seals, turn, every,
            )  # fmt: skip
            for stored, planes in layers if len(slots) else ():
                stored[slots] = self._summed(planes, slots)
