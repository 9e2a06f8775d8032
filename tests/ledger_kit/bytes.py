"""A small engine with caches, for scrubs: each forward writes its rows' bytes and reads other rows.

Nothing is computed: rows and states are noise, other noise each time that a row is computed again,
and a request's output is the sum of all that its last row reads, so that a NaN comes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from kvtxn.audit import Ledger, Scrub
from kvtxn.audit.groups import Group, RowGroup, StateGroup
from kvtxn.audit.rows import Batch, first_visible
from kvtxn.audit.step import Step
from kvtxn.formats import words
from kvtxn.layers import LayerRef

from .blocks import Request
from .engine import SmallEngine


class Payload(list[Any]):
    """Digests of stored rows, one tensor per ledger, with the stored bytes and their checksums."""

    rows: dict[str, list[Tensor]]
    sums: Tensor


class ByteEngine(SmallEngine):
    """An engine with caches, one ledger and one scrub.

    Args:
        groups: as for ``SmallEngine``; groups of one pool have caches of their own.
        ledger: the ledger.
        every: as for ``Scrub``.
        poison: as for ``Scrub``.
        dtype: the dtype of the caches.
        **named: the other arguments of ``SmallEngine``.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        ledger: Ledger,
        *,
        every: int = 1,
        poison: bool = True,
        dtype: torch.dtype = torch.float16,
        **named: Any,
    ) -> None:
        super().__init__(groups, [ledger], **named)
        self.noise = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        self.layers: dict[str, list[LayerRef]] = {}
        written: list[Group] = [*self.row_groups, *self.state_groups]
        for group in written:
            self.layers[group.name] = [self.layer(group, number, dtype) for number in range(2)]
        refs = [ref for layers in self.layers.values() for ref in layers]
        self.scrub = Scrub(ledger, refs, every=every, poison=poison)
        self.now: Step | None = None

    def layer(self, group: Group, number: int, dtype: torch.dtype) -> LayerRef:
        """Make layer ``number`` of a group, of one state or one KV head, with caches of noise."""
        name = f"{group.name} {number}"
        if isinstance(group, StateGroup):
            state = self.some((group.num_blocks, 2, 3), dtype)
            return LayerRef.recurrent(name, state, group=group.name)
        shape = (group.num_blocks, group.block_size, 1, 3 + number)
        key, value = self.some(shape, dtype), self.some(shape, dtype)
        return LayerRef(name, key, value, group=group.name)

    def some(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return noise, on the engine's device."""
        noise = torch.randn(*shape, generator=self.noise) * 9
        return noise.abs().to(dtype).to(self.device)

    # -- a step --------------------------------------------------------------------------------

    def tell(self, call: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call a method of the ledger, and what an engine calls of the scrub before or after it.

        After a ``check`` the forward writes the step's rows.
        """
        if call == "write":
            self.now = arguments[0]
            self.scrub.compare(self.now)
        told = super().tell(call, *arguments, **named)
        if call == "check":
            self.forward(arguments[0])
        elif call == "resolve":
            assert self.now is not None
            self.scrub.seal(self.now, arguments[0])
            self.harm(self.now)
        elif call == "export":
            told = self.stored_rows(Payload(told), *arguments[1:])
        elif call == "export_state":
            _, group, block, length = arguments
            told = self.stored_rows(Payload(told), group, [block], length - 1, length)
        return told

    def forward(self, step: Step) -> None:
        """Write the rows and states of a step, and look for a NaN in what its requests read."""
        outputs = self.read_states(step)
        for name, slots in step.slots.items():
            self.write_rows(name, slots[slots >= 0])
        for name, table in step.tables.items():
            outputs = outputs + self.read_rows(step, name, table)
        rows = step.starts[1:] - 1
        self.scrub.trace(step, outputs[:, None], rows)

    def write_rows(self, name: str, slots: Tensor) -> None:
        """Write noise to the slots of a group."""
        for ref in self.layers[name]:
            for plane in ref.planes:
                fresh = self.some((len(slots), *plane.row_shape), plane.format.dtype)
                plane.cells[plane.index(slots)] = words(fresh)

    def read_states(self, step: Step) -> Tensor:
        """Return for each request the sum of the states that it goes on from."""
        total = torch.zeros(len(step.lines), device=self.device)
        for name, blocks in step.sources.items():
            for ref in self.layers[name]:
                for state in ref.states:
                    sums = state[blocks.clamp(min=0)].float().flatten(1).sum(1)
                    total += torch.where(blocks >= 0, sums, 0.0)
        return total

    def read_rows(self, step: Step, name: str, table: Tensor) -> Tensor:
        """Return the sum of all numbers that each request's last row reads, ``[num_requests]``."""
        place = self.ledgers[0].books.layout.places[name]
        batch = Batch.of(self.ledgers[0].books, step)
        end = batch.first + batch.counts
        low = first_visible(place, end - 1, end)
        total = torch.zeros(len(step.lines), device=self.device)
        for index in range(len(step.lines)):
            position = torch.arange(int(low[index]), self.reads_until(int(end[index])))
            at = position if place.group.ring is None else position % place.group.ring
            at = at[at // place.group.block_size < table.shape[1]].to(self.device)
            block = table[index, at // place.group.block_size].long()
            at, block = at[block >= 0], block[block >= 0]
            slots = block * place.group.block_size + at % place.group.block_size
            for ref in self.layers[place.written]:
                for cache in (ref.key_cache, ref.value_cache):
                    assert cache is not None
                    rows = cache.flatten(0, 1)[slots]
                    total[index] += rows.float().sum()
        return total

    def reads_until(self, end: int) -> int:
        """Return the position after the last that a request's last row reads."""
        return end

    def harm(self, step: Step) -> None:
        """Do nothing; a mutant changes bytes here, after a step."""

    # -- rows that leave and come --------------------------------------------------------------

    def stored_rows(
        self, told: Payload, name: str, table: list[int], first: int, end: int
    ) -> Payload:
        """Add the bytes and checksums of rows to what a connector stores, in place; return it."""
        slots = self.slots_of(name, table, first, end)
        told.rows = {
            ref.name: [plane.cells[plane.index(slots)].clone() for plane in ref.planes]
            for ref in self.layers[name]
        }
        told.sums = self.scrub.export(name, table, first, end)
        return told

    def slots_of(self, name: str, table: list[int], first: int, end: int) -> Tensor:
        """Return the slots of positions; of a state, its block."""
        group = self.groups[name]
        if isinstance(group, StateGroup):
            return torch.tensor(table, device=self.device)
        size = group.block_size
        slots = [table[p // size] * size + p % size for p in range(first, end)]
        return torch.tensor(slots, device=self.device)

    def put(self, name: str, slots: Tensor, payload: Payload) -> None:
        """Write stored bytes into the caches."""
        for ref in self.layers[name]:
            for plane, rows in zip(ref.planes, payload.rows[ref.name], strict=True):
                plane.cells[plane.index(slots)] = rows

    def bring(
        self, request: Request, group: RowGroup, table: list[int], first: int, end: int,
        payload: Any,
    ) -> None:  # fmt: skip
        """Load stored rows, and compare their checksums."""
        self.put(group.name, self.slots_of(group.name, table, first, end), payload)
        super().bring(request, group, table, first, end, payload)
        self.scrub.import_rows(request.name, group.name, table, first, end, payload.sums)

    def bring_state(
        self, request: Request, group: StateGroup, block: int, end: int, stored: Any
    ) -> None:
        """Load a stored state, and compare its checksum."""
        payload = stored[group.name]
        self.put(group.name, torch.tensor([block], device=self.device), payload)
        super().bring_state(request, group, block, end, stored)
        name = group.name
        self.scrub.import_rows(request.name, name, [block], end - 1, end, payload.sums)


class ByteMutant(ByteEngine):
    """An engine whose kernels, memory or connector change bytes.

    Attributes:
        found: the values of ``Violation.found`` that the fault causes.
        kinds: the kinds of violations that the fault causes.
        needs: as for ``Mutant``.
        harmed: the group, slot and layer of each fault; None where it is not one slot's.
    """

    found: ClassVar[str] = "bytes"
    kinds: ClassVar[frozenset[str]] = frozenset({"changed"})
    needs: ClassVar[str] = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.harmed: list[tuple[str, int, str] | None] = []

    def change(self, name: str, slot: int) -> None:
        """Flip a bit in a random plane of a slot."""
        ref = self.random.choice(self.layers[name])
        plane = self.random.choice(ref.planes)
        index = plane.index(torch.tensor([slot], device=self.device))
        bits = plane.cells[index]
        flat = bits.flatten()
        flat[self.random.randrange(len(flat))] ^= 1 << self.random.randrange(8)
        plane.cells[index] = flat.view(bits.shape)
        self.harmed.append((name, slot, ref.name))

    def kept_slots(self, request: Request, group: Group) -> list[int]:
        """Return the slots whose rows or states a request's next step will find."""
        if isinstance(group, StateGroup):
            return [request.states[group.name][request.column]] if request.computed else []
        assert isinstance(group, RowGroup)
        low = max(0, request.computed - (group.window or request.computed) + 1)
        table, size = request.tables[group.name], group.block_size
        positions = range(max(low, request.computed - (group.ring or 1 << 30) + 16),
                          request.computed)  # fmt: skip
        at = [p if group.ring is None else p % group.ring for p in positions]
        with suppress(IndexError):
            return [table[p // size] * size + p % size for p in at]
        return []


class FlipsABit(ByteMutant):
    """A bit of a row or state changes in memory."""

    def harm(self, step: Step) -> None:
        """Flip a bit of a row that a running request will read."""
        request = self.random.choice(self.running) if self.running else None
        if request is None or request.computed < 4 or self.random.random() < 0.6:
            return
        group = self.groups[self.random.choice(sorted(self.layers))]
        slots = self.kept_slots(request, group)
        if slots:
            self.change(group.name, self.random.choice(slots))


class WritesAStrayRow(ByteMutant):
    """A kernel writes one row too many, over a row of any request."""

    def write_rows(self, name: str, slots: Tensor) -> None:
        """Write one slot more, of a request that has been computed."""
        super().write_rows(name, slots)
        others = [r for r in self.running if r.computed > 4]
        if others and self.random.random() < 0.1:
            kept = self.kept_slots(self.random.choice(others), self.groups[name])
            kept = [slot for slot in kept if slot not in slots.tolist()]
            if kept:
                self.change(name, self.random.choice(kept))


class BringsOtherBytes(ByteMutant):
    """A connector brings rows of the right tokens with a bit that has changed."""

    kinds = frozenset({"imported"})
    needs = "whole"

    def put(self, name: str, slots: Tensor, payload: Payload) -> None:
        """Change one row after it was loaded."""
        super().put(name, slots, payload)
        if self.random.random() < 0.5:
            self.change(name, int(slots[self.random.randrange(len(slots))]))


class ReadsARowTooMany(ByteMutant):
    """Attention reads the row behind a request's last one, though its tables are right."""

    found = "nan"

    def reads_until(self, end: int) -> int:
        """Read one row more, some of the time."""
        if self.random.random() < 0.7:
            return end
        self.harmed.append(None)
        return end + 1


BYTE_MUTANTS: Final = (FlipsABit, WritesAStrayRow, BringsOtherBytes, ReadsARowTooMany)
