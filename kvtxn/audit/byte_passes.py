"""``BytePasses``: the interface of a scrub's device code, and its specification in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..formats import words
from ..row_io import read
from . import books as book
from . import nan_origins as origin
from .byte_books import ByteBooks, Watched
from .checksum import checksum, has_nan
from .digest import REJECTED
from .groups import Place
from .rows import (
    Batch,
    blocks_read,
    fill_first,
    first_visible,
    ragged,
    slots_at,
    word_at,
    words_read,
)
from .step import Step
from .violation import FOUND_NUMBER, KIND_NUMBER
from .violation_record import record_violation

_CHANGED: Final = KIND_NUMBER["changed"]
_BYTES: Final = FOUND_NUMBER["bytes"]
_NAN: Final = FOUND_NUMBER["nan"]


class BytePasses(ABC):
    """The passes over caches that a step of a scrub makes; they promise what ``Passes`` promises.

    Args:
        books: the books that the passes read and write.
    """

    def __init__(self, books: ByteBooks) -> None:
        self.books: Final = books

    @abstractmethod
    def compare(self, step: Step) -> None:
        """Compare the sealed slots whose turn it is among those that a step will read.

        It is a slot's turn if it and the number of the last step add up to a multiple of
        ``every``. A slot whose bytes changed is reported once, and is not sealed any more.
        """

    @abstractmethod
    def seal(self, step: Step, accepted: Tensor, besides: int = 0) -> None:
        """Take the checksums of what a step leaves, and fill with NaN what is dead.

        Every row that stays is sealed; of the states that stay those whose turn comes before the
        next step, since states are large and most are written over by that step.

        Dead are the rows of rejected drafts; of the states after a request's last settled row and
        its drafts, all but the last kept one; and of a ``Window``, what the next step does not
        read.

        Args:
            step: the step.
            accepted: int ``[num_requests]``, drafts accepted; clamped to the number of drafts.
            besides: tokens that ``accepted`` counts beside drafts.
        """

    @abstractmethod
    def trace(self, step: Step, outputs: Tensor, rows: Tensor) -> None:
        """Report the requests that have a NaN in an output, each of them once.

        The report names the first slot of the request's block tables that holds a rejected row,
        if there is one in a poisoned group, since such rows are what ``seal`` fills with NaN. A
        request that was told of a wrong row already gets no report: that row may be the cause.

        Args:
            step: the step.
            outputs: float ``[n, ...]``.
            rows: int ``[n]``, the row of the step that each output belongs to; -1: to none.
        """

    # Calls that no usual step makes, in torch on every device.

    def locate(self, step: Step, outputs: Tensor, rows: Tensor, *, clear: bool) -> None:
        """Report the requests that have a NaN in an output, each once, with the NaN's origin.

        The slot of the origin is not sealed any more. If none is found, the report names no slot.

        Args:
            step: as in ``trace``.
            outputs: as in ``trace``.
            rows: as in ``trace``.
            clear: fill with zeros the rows with a NaN, of the requests that are reported now.
        """
        books = self.books.books
        batch = Batch.of(books, step, released=True)
        bad = rows[outputs.flatten(1).isnan().any(1) & (rows >= 0)]
        mine = (batch.starts <= bad[:, None]) & (bad[:, None] < batch.starts + batch.counts)
        origins = {}
        for index in mine.any(0).nonzero().flatten().tolist():
            line = batch.lines[index]
            serial = int(books.facts[book.SERIAL][line]) + 1
            if int(self.books.nans[line]) != serial:
                self.books.nans[line] = serial
                origins[index] = origin.find(self.books, step, batch, index)
        for index, found in origins.items():
            line, last = batch.lines[index], int(batch.first[index] + batch.counts[index]) - 1
            if found is None:
                record_violation(books, _CHANGED, line, None, last, -1, _NAN)
                continue
            place, where = found.place, found.where
            record_violation(books, _CHANGED, line, place, found.position, where, _NAN, found.layer)
            self.books.seals[where] = 0
        for index in origins if clear else ():
            origin.clear(self.books, step, batch, index)

    def report(
        self, kind: int, place: Place, lines: Tensor, position: Tensor, where: Tensor, wrong: Tensor
    ) -> None:
        """Report sealed slots that are wrong in a layer, and take their seals.

        A slot is reported once, with the first of its layers that is wrong; without a seal not
        again.

        Args:
            kind: the violation's kind, by number.
            place: the group of the slots.
            lines: int64 ``[n]``, the line of each reader.
            position: int64 ``[n]``, the position that each reader has there.
            where: int64 ``[n]``, the index of each slot's word.
            wrong: bool ``[num_layers, n]``.
        """
        for row in wrong.any(0).nonzero().flatten().tolist():
            at = int(where[row])
            if int(self.books.seals[at]) == 0:
                continue  # another reader has reported it
            layer = self.books.layers[place][int(wrong[:, row].nonzero()[0])].number
            books = self.books.books
            record_violation(books, kind, lines[row], place, int(position[row]), at, _BYTES, layer)
            self.books.seals[at] = 0

    def take(self, place: Place, slots: Tensor) -> None:
        """Take the checksums of slots, in every watched layer of the group, and seal the slots."""
        if len(slots):
            for layer, sums in zip(self.books.layers[place], self.sums(place, slots), strict=True):
                layer.sums[slots] = sums
            where = word_at(place, slots)
            self.books.seals[where] = self.books.books.words[where]

    def sums(self, place: Place, slots: Tensor) -> Tensor:
        """Return the checksums of slots, int64 ``[num_layers, n]``, as their bytes are now."""
        key, none = self.books.books.key, slots * 0
        if not len(slots):
            return none.expand(len(self.books.layers[place]), 0)
        return torch.stack(
            [
                sum((checksum(key, read(p, slots), n) for n, p in layer.planes), none)
                for layer in self.books.layers[place]
            ]
        )


class TorchBytePasses(BytePasses):
    """The passes, one torch operation after another; they wait for the device."""

    def compare(self, step: Step) -> None:
        """Compare a sample of the sealed slots that a step reads; see ``BytePasses.compare``."""
        books = self.books.books
        fill_first(books, step)
        batch = Batch.of(books, step)
        for name in step.tables:
            place = books.layout.places[name]
            source = books.layout.places[place.written]
            low = first_visible(place, batch.first, batch.first + batch.counts)
            owner, within = ragged((batch.first - low).clamp(min=0) * batch.live)
            position = low[owner] + within
            where = words_read(step, place, owner, position)
            self._compare(source, batch.lines[owner], position, where)
        for name, blocks in step.sources.items():
            place, block = books.layout.places[name], blocks[: len(batch.lines)].long()
            reads = batch.live & (batch.first > 0) & (block >= 0) & (block < place.num_slots)
            where = word_at(place, block[reads])
            self._compare(place, batch.lines[reads], batch.first[reads] - 1, where)

    def _compare(self, place: Place, lines: Tensor, position: Tensor, where: Tensor) -> None:
        """Compare the sealed slots whose turn it is: count them, and report those that changed.

        A group without watched layers is left out.

        Args:
            place: the group of the slots.
            lines: int64 ``[n]``, the line of each reader.
            position: int64 ``[n]``, the position that each reader has there.
            where: int64 ``[n]``, the index of each slot's word; below 0 for no slot.
        """
        if place not in self.books.layers:
            return
        seal = self.books.seals[where.clamp(min=0)]
        due = (where >= 0) & (seal != 0) & (seal == self.books.books.words[where.clamp(min=0)])
        due &= self._is_turn(slots_at(place, where))
        where = where[due]
        self.books.compared.add_(len(where))
        if len(where):
            slots = slots_at(place, where)
            stored = torch.stack([layer.sums[slots] for layer in self.books.layers[place]])
            wrong = stored != self.sums(place, slots)
            self.report(_CHANGED, place, lines[due], position[due], where, wrong)

    def _is_turn(self, slots: Tensor) -> Tensor:
        """Return, bool ``[n]``, whether it is a slot's turn to be compared; see ``compare``."""
        step = self.books.books.counters[book.STEP]
        return (slots + step) % self.books.every == 0

    def seal(self, step: Step, accepted: Tensor, besides: int = 0) -> None:
        """Checksum what a step leaves, and fill dead rows with NaN; see ``BytePasses.seal``."""
        batch = Batch.of(self.books.books, step, released=True)
        kept = (accepted.long() - besides).clamp(min=0).minimum(batch.drafts)
        settled = batch.counts - batch.drafts
        owner, within = ragged(batch.counts)
        row = batch.starts[owner] + within
        for place, layers in self.books.layers.items():
            if place.group.name not in step.slots:
                continue
            slots = step.slots[place.group.name].long()
            slot = slots[row]
            inside = (slot >= 0) & (slot < place.num_slots)
            if place.group.is_state:
                last = batch.starts + settled + kept - 1
                last_slot = slots[last.clamp(min=0)]
                alive = within + 1 == (settled + kept)[owner]
                dead = (within + 1 >= settled[owner]) & ~alive & (slot != last_slot[owner])
                alive = (alive | (within + 1 < settled[owner])) & self._is_turn(slot)
                self._clear_windows(place, layers, slots, batch, settled, kept)
            else:
                alive = within < (settled + kept)[owner]
                dead = ~alive
                if place.group.ring is not None:  # of rows that share a slot, the last one stands
                    inside &= within + place.group.ring >= batch.counts[owner]
            self.take(place, slot[inside & alive])
            if place.group.name in self.books.poisoned:
                self._fill(layers, slot[inside & dead])

    def _fill(self, layers: Sequence[Watched], slots: Tensor) -> None:
        """Set all bits of rows, a NaN in every format that has one; leave other formats alone."""
        for layer in layers:
            for _, plane in layer.planes:
                if has_nan(plane) and len(slots):
                    plane.cells[plane.index(slots)] = -1

    def _clear_windows(
        self,
        place: Place,
        layers: Sequence[Watched],
        slots: Tensor,
        batch: Batch,
        settled: Tensor,
        kept: Tensor,
    ) -> None:
        """Fill with NaN a convolution's inputs that the next step does not read.

        Only floats in poisoned groups are filled.
        """
        block = slots[(batch.starts + settled - 1).clamp(min=0)]
        used = batch.live & (settled > 0) & (block >= 0) & (block < place.num_slots)
        for layer in layers:
            window = layer.window
            if window is None or place.group.name not in self.books.poisoned:
                continue
            state = layer.ref.states[window.state]
            if not state.dtype.is_floating_point:
                continue
            inputs = words(state).movedim(window.dim, 1)
            at = torch.arange(inputs.shape[1], device=state.device)
            begin = kept[used][:, None]
            dead = (at < begin) | (at >= begin + window.length)
            request, place_in_window = dead.nonzero(as_tuple=True)
            inputs[block[used][request], place_in_window] = -1

    def trace(self, step: Step, outputs: Tensor, rows: Tensor) -> None:
        """Report each request with a NaN in an output, once; see ``BytePasses.trace``."""
        books = self.books.books
        batch = Batch.of(books, step)
        bad = outputs.flatten(1).isnan().any(1) & (rows >= 0)
        for row in rows[bad].tolist():
            mine = batch.live & (batch.starts <= row) & (row < batch.starts + batch.counts)
            for index in mine.nonzero().flatten().tolist():
                line = batch.lines[index]
                serial = int(books.facts[book.SERIAL][line]) + 1
                if int(self.books.nans[line]) == serial:
                    continue
                self.books.nans[line] = serial
                position = int(batch.first[index]) + row - int(batch.starts[index])
                self._report_nan(step, index, line, position)

    def _report_nan(self, step: Step, index: int, line: Tensor, position: int) -> None:
        """Report a request's NaN, with the first rejected row that its tables lead to, if any.

        A request that was told of a wrong row already gets no report.
        """
        books = self.books.books
        if int(books.facts[book.TELLING][line]) >= 0:
            return  # the request was told already of a wrong row, which may have been the cause
        found: tuple[Place, int] | None = None
        for name in books.layout.places:
            place = books.layout.places[name]
            if name not in step.tables or place.written not in self.books.poisoned:
                continue
            table = blocks_read(step, name, index)
            inside = (table >= 0) & (table < place.group.num_blocks)
            slots = table[:, None] * place.group.block_size
            slots = slots + torch.arange(place.group.block_size, device=table.device)
            where = word_at(place, slots)[inside].flatten()
            content = books.words[where]
            dead = (content == REJECTED).nonzero().flatten()
            if len(dead) and found is None:
                found = place, int(where[dead[0]])
        group, at = (None, -1) if found is None else found
        record_violation(books, _CHANGED, line, group, position, at, _NAN)
