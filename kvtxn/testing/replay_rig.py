"""A manager over replayed layers and paged ones beside them, with the oracle beside it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import Tensor

from ..config import TxnConfig
from ..layers import LayerRef
from ..manager import TransactionManager
from ..recurrent import StateSlots
from ..window import Window
from .batches import Batch, handed_in, make_batch
from .caches import LayerSpec, TestCache, build_cache, noise
from .oracle import Replay
from .replay_states import ReplayedSpec, StateMemory, float32, word_of


@attrs.frozen(eq=False)
class ReplayBatch:
    """The rows of one window: rows of paged layers, and rows that states take in.

    Attributes:
        rows: the rows of the paged layers.
        counts: accepted drafts per request.
        kept: per row, True if the counts keep it.
        states: the slot of each request's state, by group.
        parts: by layer, the tensors to stage.
        crossings: by group, the boundary and the slot beyond of each request; empty without any.
    """

    rows: Batch
    counts: tuple[int, ...]
    kept: list[bool]
    states: Mapping[str, list[int]]
    parts: Mapping[str, tuple[Tensor, ...]]
    crossings: Mapping[str, tuple[list[int], list[int]]] = attrs.Factory(dict)

    def of_request(self, request: int, kept: Sequence[bool]) -> list[int]:
        """List the rows that a request's state takes in: settled rows, and the kept drafts."""
        return [
            row
            for row, (owner, draft) in enumerate(self.rows.owners)
            if owner == request and (draft is None or kept[row])
        ]


class ReplayRig:
    """A manager over replayed layers, and paged ones beside them.

    Args:
        backend: a registered name.
        device: the device of all tensors.
        specs: the replayed layers.
        paged: the paged layers.
        seed: seed of noise, slots and numbers.
        config: further ``TxnConfig`` fields.

    Attributes:
        states: by replayed layer, its memories.
        caches: the paged layers.
        manager: the manager; ``refs`` are its layers.
        truth: the oracle of the paged layers.
        rng: the source of all random numbers.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        specs: Sequence[ReplayedSpec],
        paged: Sequence[LayerSpec] = (LayerSpec(num_blocks=12),),
        seed: int = 0,
        **config: Any,
    ) -> None:
        self.device, self.specs = device, list(specs)
        self.rng = random.Random(seed)
        self.caches: list[TestCache] = [
            build_cache(f"rows.{i}", spec, device, self.rng) for i, spec in enumerate(paged)
        ]
        self.states = {
            f"state.{i}": [
                StateMemory.build(state, spec.num_states, device, self.rng) for state in spec.states
            ]
            for i, spec in enumerate(specs)
        }
        made = [
            LayerRef.recurrent(
                name,
                *(memory.view() for memory in self.states[name]),
                replay=[memory.spec.recurrence(device) for memory in self.states[name]],
                group=spec.group,
            )
            for name, spec in zip(self.states, specs, strict=True)
        ]
        self.refs = [*made, *(cache.ref for cache in self.caches)]
        settings = {"max_rows": 64, "on_error": "raise"} | config
        chosen = TxnConfig(policy="deferred", backend=backend, **settings)  # type: ignore[arg-type]
        self.manager = TransactionManager(self.refs, chosen)
        self.truth = Replay(self.caches)
        self.held: dict[str, set[int]] = {spec.group: set() for spec in specs}

    # -- windows --------------------------------------------------------------------------

    def begin_requests(self, group: str, slots: Sequence[int]) -> None:
        """Fill the states of requests with numbers in every layer of the group, like a prefill."""
        for name, spec in zip(self.states, self.specs, strict=True):
            for memory in self.states[name] if spec.group == group else ():
                for slot in slots:
                    size = math.prod(memory.spec.shape)
                    numbers = [float32(self.rng.gauss(0, 1)) for _ in range(size)]
                    memory.write(slot, [word_of(number, memory.spec.fmt) for number in numbers])
                memory.impose()
        self.held[group] |= set(slots)

    def end_requests(self, group: str, slots: Sequence[int]) -> None:
        """Fill the states of ended requests with noise, NaN included."""
        for name, spec in zip(self.states, self.specs, strict=True):
            for memory in self.states[name] if spec.group == group else ():
                for slot in slots:
                    size = math.prod(memory.spec.shape)
                    memory.write(slot, noise(size, memory.spec.fmt.word, self.rng).tolist())
                memory.impose()
        self.held[group] -= set(slots)

    def batch(
        self,
        shape: tuple[Sequence[int], Sequence[int]],
        counts: Sequence[int] | None = None,
        *,
        padding: float = 0.0,
        slots: Mapping[str, Sequence[int]] | None = None,
    ) -> ReplayBatch:
        """Make rows for a window; rejected rows are full of NaN.

        Args:
            shape: settled and draft rows per request.
            counts: accepted drafts per request; None draws random ones.
            padding: the probability that a request has no state.
            slots: by group, the slots of the states; None begins new requests.
        """
        rows = make_batch(self.caches, shape, self.device, self.rng, padding=padding)
        if counts is None:
            counts = [self.rng.randint(0, drafts) for drafts in rows.draft_len]
        kept = rows.kept(counts)
        given = {group: list(taken) for group, taken in (slots or {}).items()}
        for spec in self.specs:
            if spec.group not in given:
                self.end_requests(spec.group, sorted(self.held[spec.group]))
                chosen = self.rng.sample(range(spec.num_states), len(rows.settled))
                self.begin_requests(spec.group, chosen)
                given[spec.group] = [-1 if self.rng.random() < padding else s for s in chosen]
        real = [keep or not draft for keep, draft in zip(kept, rows.drafts, strict=True)]
        parts = {name: self._parts(name, real) for name in self.states}
        return ReplayBatch(rows, tuple(counts), kept, given, parts)

    def _parts(self, name: str, real: Sequence[bool]) -> tuple[Tensor, ...]:
        """Draw numbers for each part of a layer's rows; NaN in rows that are not real."""
        tensors = []
        for part in self.manager.layers[name].given:
            count = math.prod(part.row_shape)
            if part.part in ("decay", "dt"):
                values = [self.rng.random() for _ in range(len(real) * count)]
            else:
                values = [self.rng.gauss(0, 1) for _ in range(len(real) * count)]
            tensor = torch.tensor(values).view(len(real), *part.row_shape).to(part.format.dtype)
            tensor[[not each for each in real]] = math.nan
            tensors.append(tensor.to(self.device))
        return tuple(tensors)

    def slots(self, batch: ReplayBatch) -> dict[str, Any]:
        """Put the slots of all groups on the device."""
        by_group = {**batch.rows.slots, **batch.states}
        given: dict[str, Any] = {group: self.accepted(slots) for group, slots in by_group.items()}
        for group, (boundary, beyond) in batch.crossings.items():
            given[group] = StateSlots(given[group], self.accepted(boundary), self.accepted(beyond))
        return given

    def open(self, batch: ReplayBatch, forest: Any = None) -> Window:
        """Begin a window for a batch, with all slots given."""
        rows = batch.rows
        return self.manager.window(rows.draft_len, self.slots(batch), rows.settled, tree=forest)

    def stage(self, window: Window, batch: ReplayBatch, order: Sequence[int] | None = None) -> None:
        """Stage layers, all in their order or those named by ``order``."""
        for index in range(len(self.refs)) if order is None else order:
            ref = self.refs[index]
            if ref.replay:
                window.stage(ref, batch.parts[ref.name])
            else:
                window.stage(ref, *handed_in(ref, batch.rows.tensors[ref.name]))  # type: ignore[arg-type]

    def accepted(self, counts: Sequence[int]) -> Tensor:
        """Put counts on the device."""
        return torch.tensor(counts, dtype=torch.int64).to(self.device)

    def run(self, batch: ReplayBatch) -> Window:
        """Run a whole window, and commit it."""
        with self.open(batch) as window:
            self.stage(window, batch)
            window.commit(self.accepted(batch.counts))
        return window

    # -- what must be there -----------------------------------------------------------------

    def expect_rows(self, batch: ReplayBatch, mask: Sequence[bool], order: Sequence[int]) -> None:
        """Expect the masked rows in the paged layers that ``order`` names."""
        for ref in (self.refs[index] for index in order if not self.refs[index].replay):
            slots = batch.rows.slots[ref.group]
            for row, slot, wanted in zip(batch.rows.rows[ref.name], slots, mask, strict=True):
                if wanted:
                    self.truth.write(ref.name, slot, row)

    def expect_staged(self, batch: ReplayBatch, order: Sequence[int] | None = None) -> None:
        """Expect the rows that staging writes: settled rows of paged layers; states unchanged."""
        layers = range(len(self.refs)) if order is None else order
        self.expect_rows(batch, [not draft for draft in batch.rows.drafts], layers)

    def expect_ended(
        self,
        batch: ReplayBatch,
        kept: Sequence[bool] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """Expect the kept and settled rows of an ended window, in slots and in states.

        Args:
            batch: the window.
            kept: per row, True if it is kept; None means the batch's counts.
            order: numbers of the layers that were staged; None means all.
        """
        layers = range(len(self.refs)) if order is None else order
        mask = batch.kept if kept is None else kept
        self.expect_staged(batch, layers)
        self.expect_rows(batch, mask, layers)
        for ref in (self.refs[index] for index in layers if self.refs[index].replay):
            self._expect_states(
                ref,
                batch,
                [batch.of_request(request, mask) for request in range(len(batch.counts))],
            )

    def expect_paths(self, batch: ReplayBatch, rows: Sequence[Sequence[int]]) -> None:
        """Expect states that took in these rows of the window, one list per request."""
        for name in self.states:
            self._expect_states(self.manager.layers[name], batch, rows)

    def _expect_states(
        self, ref: LayerRef, batch: ReplayBatch, rows: Sequence[Sequence[int]]
    ) -> None:
        parts = batch.parts[ref.name]
        starts = [0]
        for recurrence, state in zip(ref.replay, ref.states, strict=True):
            starts.append(starts[-1] + len(recurrence.given(state)))
        for memory, (start, end) in zip(self.states[ref.name], pairwise(starts), strict=True):
            own = memory.parts_of(parts[start:end])
            nowhere = ([0] * len(rows), [-1] * len(rows))
            crossing = zip(*batch.crossings.get(ref.group, nowhere), strict=True)
            for slot, taken, bound in zip(batch.states[ref.group], rows, crossing, strict=True):
                memory.take_in(slot, [[part[row] for part in own] for row in taken], *bound)

    def check(self, when: str = "") -> None:
        """Compare every word of every memory with the oracle's.

        Raises:
            AssertionError: a word differs; the message says where.
        """
        found = self.truth.differences()
        for name, memories in self.states.items():
            for number, memory in enumerate(memories):
                actual = memory.memory.tolist()
                pairs = enumerate(zip(actual, memory.truth, strict=True))
                wrong = {place for place, (now, wanted) in pairs if now != wanted}
                if wrong:
                    slots = [s for s in range(memory.num_states) if wrong & {*memory.places(s)}]
                    inside = {place for slot in slots for place in memory.places(slot)}
                    found.append(
                        f"{name}, state {number} ({memory.spec.family}, {memory.spec.fmt.name}, "
                        f"{memory.spec.layout}): {len(wrong)} words differ, in slots {slots}, "
                        f"{len(wrong - inside)} in gaps or guard pages"
                    )
        if found:
            raise AssertionError(f"{when or 'memories differ'}: " + "; ".join(found))
