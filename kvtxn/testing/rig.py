"""A manager over caches full of noise, with the oracle beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from .. import registry
from ..config import TxnConfig
from ..executor import Executor
from ..manager import TransactionManager
from ..recurrent import StateSlots
from ..window import Window
from ..window_transitions import WindowState
from .batches import PADDING, Batch, handed_in, make_batch, random_counts
from .caches import LayerSpec, TestCache, build_cache
from .number_formats import FORMATS
from .oracle import Replay, Row
from .replayed_layers import ReplayedLayer, ReplayedSpec

#: Six layers that differ in layout, format and size.
VARIED: Final = (
    LayerSpec("plain"),
    LayerSpec("packed", value_size=3),
    LayerSpec("hnd", group="sliding", block_size=5, num_blocks=6),
    LayerSpec("gapped", heads=1, size=7),
    LayerSpec("latent", group="sliding", size=9, block_size=5, num_blocks=7),
    LayerSpec("transposed", FORMATS["fp8_e4m3-row"], size=4),
)

#: Three equal layers, for tests in which the layout does not matter.
SIMPLE: Final = (LayerSpec(), LayerSpec(), LayerSpec(fmt=FORMATS["bf16"], heads=1))

Backend = str | type[Executor]

AnySpec = LayerSpec | ReplayedSpec

_serial = itertools.count()


@contextmanager
def registered(backend: Backend) -> Iterator[str]:
    """Yield the name of a backend; a class is registered while the block lasts.

    A class gets a new name each time.
    """
    if isinstance(backend, str):
        yield backend
        return
    named = getattr(backend, "name", backend.__name__)  # register refuses a class without one
    name = f"{named}-under-test-{next(_serial)}"
    registry.register(name, backend)
    try:
        yield name
    finally:
        registry.unregister(name)


class Rig:
    """A manager under test.

    Args:
        backend: a registered name.
        policy: the policy to run.
        device: the device of the caches.
        specs: its layers; those of rows come first, whatever their place here.
        seed: seed of noise, slots and payload.
        config: further ``TxnConfig`` fields.

    Attributes:
        caches: the layers of rows with their memories.
        replayed: the replayed layers, behind the others.
        refs: the ``LayerRef`` objects of all.
        held: by group of replayed layers, the slots of running requests' states.
        manager: the manager.
        truth: the oracle; tests write into it the rows that must be in the caches.
        rng: the source of all random numbers.
    """

    def __init__(
        self,
        backend: str,
        policy: str,
        device: torch.device,
        specs: Sequence[AnySpec] = VARIED,
        seed: int = 0,
        **config: Any,
    ) -> None:
        self.policy = policy
        self.device = device
        self.rng = random.Random(seed)
        of_rows = [spec for spec in specs if isinstance(spec, LayerSpec)]
        of_states = [spec for spec in specs if isinstance(spec, ReplayedSpec)]
        self.caches = [
            build_cache(f"layer.{i}", spec, device, self.rng) for i, spec in enumerate(of_rows)
        ]
        self.replayed = [
            ReplayedLayer.build(f"state.{i}", spec, device, self.rng)
            for i, spec in enumerate(of_states)
        ]
        self.refs = [cache.ref for cache in self.caches]
        self.refs += [layer.ref for layer in self.replayed]
        self.held: dict[str, set[int]] = {spec.group: set() for spec in of_states}
        settings = {"max_rows": 64, "on_error": "raise"} | config
        self.manager = TransactionManager(
            self.refs,
            TxnConfig(policy=policy, backend=backend, **settings),  # type: ignore[arg-type]
        )
        self.truth = Replay(self.caches)
        self._old: list[tuple[str, int, Row]] = []

    def batch(
        self,
        shape: tuple[Sequence[int], Sequence[int]] = ((1, 1), (3, 2)),
        *,
        counts: Sequence[int] | None = None,
        states: Mapping[str, Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> Batch:
        """Make rows for a window; see ``make_batch``.

        Args:
            shape: settled and draft rows per request.
            counts: the drafts that will be accepted, by request. What replayed layers stage for
                other drafts is NaN, so that a state that takes one in shows it. None: no draft of
                theirs is NaN.
            states: by group of replayed layers, the slot of each request's state. In a group that
                is left out all requests end, and new ones begin in random slots, some of them -1.
            kwargs: for ``make_batch``.
        """
        batch = make_batch(self.caches, shape, self.device, self.rng, **kwargs)
        if not self.replayed:
            return batch
        mine = {group: list(slots) for group, slots in (states or {}).items()}
        for group in self.held:
            if group not in mine:
                padding = kwargs.get("padding", PADDING)
                mine[group] = self._new_requests(group, len(batch.settled), padding)
        kept = batch.drafts if counts is None else batch.kept(counts)
        real = [keep or not draft for keep, draft in zip(kept, batch.drafts, strict=True)]
        drawn = {layer.ref.name: layer.draw(real, self.device, self.rng) for layer in self.replayed}
        slots = {g: [line[request] for request, _ in batch.owners] for g, line in mine.items()}
        tensors, slots = {**batch.tensors, **drawn}, {**batch.slots, **slots}
        return attrs.evolve(batch, slots=slots, tensors=tensors, states=mine)

    def _new_requests(self, group: str, count: int, padding: float) -> list[int]:
        """Begin requests in place of all that hold a state; return their slots, some of them -1."""
        self.end_requests(group, sorted(self.held[group]))
        room = min(layer.spec.num_states for layer in self.replayed if layer.spec.group == group)
        chosen = self.rng.sample(range(room), count)
        self.begin_requests(group, chosen)
        return [-1 if self.rng.random() < padding else slot for slot in chosen]

    def begin_requests(self, group: str, slots: Sequence[int]) -> None:
        """Fill the states of requests with numbers in every replayed layer of the group.

        Their slots count as held from now on.
        """
        for layer in self.replayed:
            if layer.spec.group == group:
                layer.begin(slots, self.rng)
        self.held[group] |= set(slots)

    def end_requests(self, group: str, slots: Sequence[int]) -> None:
        """Fill the states of ended requests with noise; their slots are free again."""
        for layer in self.replayed:
            if layer.spec.group == group:
                layer.end(slots, self.rng)
        self.held[group] -= set(slots)

    def slots(self, batch: Batch) -> dict[str, Any]:
        """Return a batch's slots by group, as device tensors; for states one slot per request.

        Where requests may cross a boundary, a ``StateSlots``.
        """
        given: dict[str, Any] = {}
        for group, slots in batch.slots.items():
            if group in batch.states:
                slots = batch.states[group]
            elif self.manager.kinds[group].per_request:
                owners = [request for request, _ in batch.owners]
                requests = range(len(batch.settled))
                slots = [slots[owners.index(r)] if r in owners else -1 for r in requests]
            given[group] = self.accepted(slots)
        for group, (boundary, beyond) in batch.crossings.items():
            given[group] = StateSlots(given[group], self.accepted(boundary), self.accepted(beyond))
        return given

    def open(
        self, batch: Batch, forest: Sequence[int] | Sequence[Sequence[int]] | None = None
    ) -> Window:
        """Begin a window for a batch, all slots given; with ``forest``, one with draft trees."""
        window = self.manager.window(batch.draft_len, self.slots(batch), batch.settled, tree=forest)
        self.forget()
        return window

    def forget(self) -> None:
        """Forget the rows that the last window overwrote, before another one begins.

        They are what ``expect_aborted`` and ``expect_committed`` put back in the oracle.
        """
        self._old.clear()

    def stage(self, window: Window, batch: Batch, order: Sequence[int] | None = None) -> None:
        """Stage layers: all in their order, or the layers with the numbers in ``order``."""
        for index in range(len(self.refs)) if order is None else order:
            ref = self.refs[index]
            window.stage(ref, *handed_in(ref, batch.tensors[ref.name]))  # type: ignore[arg-type]

    def hand_in(
        self, window: Window, batch: Batch, index: int, slots: Tensor | list[int] | None
    ) -> None:
        """Stage one layer, with slots if given."""
        ref = self.refs[index]
        key, *value = handed_in(ref, batch.tensors[ref.name])
        window.stage(ref, key, value[0] if value else None, slots)

    def accepted(self, counts: Sequence[int]) -> Tensor:
        """Return counts as a tensor on the device."""
        return torch.tensor(counts, dtype=torch.int64).to(self.device)

    def attend(self, window: Window, batch: Batch, index: int = 0, length: int = 7) -> None:
        """Attend to a layer where only a failure matters: zeros, over a table of zeros.

        Args:
            window: a window over ``batch``, in which the layer is staged.
            batch: its rows.
            index: number of the layer.
            length: tokens of each request, at least as many as its rows.
        """
        ref, requests = self.refs[index], len(batch.settled)
        heads, size = ref.planes[0].row_shape
        query = torch.zeros(batch.num_rows, heads, size, device=self.device)
        table = torch.zeros(requests, 3, dtype=torch.int64, device=self.device)
        window.attend(ref, query, table, self.accepted([length] * requests))

    def run(self, batch: Batch, counts: Sequence[int]) -> Window:
        """Run a whole window and commit it, without a comparison; return the ended window."""
        with self.open(batch) as window:
            self.stage(window, batch)
            window.commit(self.accepted(counts))
        return window

    def commit(
        self,
        batch: Batch,
        counts: Sequence[int] | None = None,
        when: str = "",
        *,
        given: Any = None,
        kept: Sequence[bool] | None = None,
        order: Sequence[int] | None = None,
        check_staged: bool = False,
    ) -> None:
        """Run a whole window, commit it, and compare the caches with its kept rows.

        Raises an AssertionError if they differ, or if the window does not end in COMMITTED.

        Args:
            batch: the rows.
            counts: accepted drafts per request; None draws them.
            when: for the message.
            given: what the commit is given; None: the counts, on the device.
            kept: the rows that a mask keeps, in place of those of ``counts``.
            order: see ``stage``.
            check_staged: compare before the commit, too.
        """
        counts = random_counts(batch, self.rng) if counts is None else counts
        with self.open(batch) as window:
            self.stage(window, batch, order)
            if check_staged:
                self.expect_staged(batch)
                self.check("staged")
            window.commit(self.accepted(counts) if given is None else given)
        assert window.state is WindowState.COMMITTED
        self.expect_committed(batch, batch.kept(counts) if kept is None else kept)
        self.check(f"{when} after commit of {list(counts if kept is None else kept)}")

    def abort(
        self,
        batch: Batch,
        layers: Sequence[int] | None = None,
        when: str = "aborted",
        forest: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Stage layers, all of them or these, abort the window, and compare the caches.

        Raises:
            AssertionError: they differ, or the window does not end in ABORTED.
        """
        with self.open(batch, forest) as window:
            self.stage(window, batch, layers)
            window.abort()
        assert window.state is WindowState.ABORTED
        self.expect_aborted(batch, layers)
        self.check(when)

    # -- what must be in the caches afterwards --------------------------------------

    def write(
        self, batch: Batch, mask: Sequence[bool], layers: Sequence[int] | None = None
    ) -> None:
        """Write the masked rows of some layers in the oracle; None means all layers of rows."""
        for cache in self._of_rows(layers):
            slots = batch.slots[cache.spec.group]
            for row, slot, wanted in zip(batch.rows[cache.name], slots, mask, strict=True):
                if wanted:
                    self.truth.write(cache.name, slot, row)

    def _of_rows(self, layers: Sequence[int] | None) -> list[TestCache]:
        """Return the layers of rows among those with these numbers; None means all."""
        every = range(len(self.caches))
        return [
            self.caches[index] for index in (every if layers is None else layers) if index in every
        ]

    def expect_settled(self, batch: Batch, layers: Sequence[int] | None = None) -> None:
        """Write the settled rows into the oracle; in states only under ``direct``."""
        direct = self.policy == "direct"
        early = [
            index
            for index, cache in enumerate(self.caches)
            if (layers is None or index in layers) and (direct or cache.spec.kind != "recurrent")
        ]
        self.write(batch, [not draft for draft in batch.drafts], early)

    def expect_staged(self, batch: Batch, layers: Sequence[int] | None = None) -> None:
        """Write into the oracle what staging writes: settled rows, and drafts unless these wait.

        What drafts overwrite is remembered, for ``expect_aborted`` and ``expect_committed``.
        """
        self.expect_settled(batch, layers)
        if self.policy == "deferred":
            return
        for cache in self._of_rows(layers):
            for slot, draft in zip(batch.slots[cache.spec.group], batch.drafts, strict=True):
                if draft and slot != -1:
                    self._old.append((cache.name, slot, self.truth.read(cache.name, slot)))
        self.write(batch, batch.drafts, layers)

    def expect_written(self, batch: Batch) -> None:
        """Write into the oracle every row of a step without a window.

        In states only under ``direct``.
        """
        direct = self.policy == "direct"
        whole = [i for i, c in enumerate(self.caches) if direct or c.spec.kind != "recurrent"]
        self.write(batch, [True] * batch.num_rows, whole)

    def expect_aborted(self, batch: Batch, layers: Sequence[int] | None = None) -> None:
        """Put back, in the oracle, what drafts overwrote, and write the settled rows.

        Every state stays as it was before. Under ``direct`` all rows stay as they were written.
        """
        for layer, slot, row in self._old if self.policy != "direct" else ():
            self.truth.write(layer, slot, row)
        self._old.clear()
        self.expect_settled(batch, layers)

    def expect_committed(
        self, batch: Batch, kept: Sequence[bool], layers: Sequence[int] | None = None
    ) -> None:
        """Write into the oracle the rows that a commit leaves: settled and kept ones.

        Under ``direct`` all. What rejected drafts overwrote is put back. States take their settled
        and kept rows in, once for each call.
        """
        for layer, slot, row in self._old:
            self.truth.write(layer, slot, row)
        self._old.clear()
        self.write(batch, [not draft for draft in batch.drafts], layers)
        direct = self.policy == "direct"
        self.write(batch, [direct or keep for keep in kept], layers)
        self.expect_taken_in(batch, batch.taken_in(kept), layers)

    def expect_taken_in(
        self, batch: Batch, rows: Sequence[Sequence[int]], layers: Sequence[int] | None = None
    ) -> None:
        """Expect states of replayed layers that took in these rows, a list of them per request.

        Each call takes them in once more. ``layers``: numbers of layers; None is all.
        """
        for index, layer in enumerate(self.replayed, start=len(self.caches)):
            if layers is None or index in layers:
                group = layer.spec.group
                where, bounds = batch.states[group], batch.crossings.get(group)
                layer.take_in(where, batch.tensors[layer.ref.name], rows, bounds)

    def check(self, when: str = "") -> None:
        """Compare every word of every memory with the oracle.

        Raises:
            AssertionError: a word differs; the message names the policy and says where.
        """
        found = self.truth.differences()
        found += [difference for layer in self.replayed for difference in layer.differences()]
        if found:
            where = f"under {self.policy!r}, {when or 'caches differ'}: "
            raise AssertionError(where + "; ".join(found))

    def check_rows(
        self, added: Sequence[int], before: Sequence[int] = (0, 0, 0)
    ) -> tuple[int, ...]:
        """Compare the manager's counts with draft rows staged, committed and rejected.

        Args:
            added: rows of the last windows, as ``Batch.count`` has them.
            before: rows of the windows before them.

        Returns:
            Their sum.

        Raises:
            AssertionError: the counts differ; the message says who counts.
        """
        counted = self.rows()
        expected = tuple(a + b for a, b in zip(before, added, strict=True))
        if counted != expected:
            raise AssertionError(
                f"under {self.policy!r} the manager counted (staged, committed, rejected) = "
                f"{counted}, expected {expected}; commit ends with one call of "
                "txn.count(kept), and no other method of an executor calls txn.count"
            )
        return expected

    def states_in(self, name: str, slot: int) -> Row:
        """Return the expected words of a layer's states in a slot.

        Of a layer of rows those of its row.
        """
        memories = {layer.ref.name: layer.memories for layer in self.replayed}.get(name)
        if memories is None:
            return self.truth.read(name, slot)
        return [memory.read(slot) for memory in memories]

    def truth_now(self) -> Replay:
        """Make an oracle from the present caches of rows, to show that they do not change."""
        return Replay(self.caches)

    def rows(self) -> tuple[int, int, int]:
        """Return draft rows staged, committed and rejected so far, as the manager counts them."""
        flat = self.manager.snapshot()
        names = ("staged", "committed", "rejected")
        staged, committed, rejected = (int(flat[f"kvtxn_rows_{name}_total"]) for name in names)
        return staged, committed, rejected
