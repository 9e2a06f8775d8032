"""A manager over caches full of noise, with the oracle beside it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from .. import registry
from ..config import TxnConfig
from ..executor import Executor
from ..manager import TransactionManager
from ..window import Window
from .batches import Batch, handed_in, make_batch
from .caches import LayerSpec, build_cache
from .number_formats import FORMATS
from .oracle import Replay, Row

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

_serial = itertools.count()


@contextmanager
def registered(backend: Backend) -> Iterator[str]:
    """Yield the name of a backend; a class is registered while the block lasts."""
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
        specs: its layers.
        seed: seed of noise, slots and payload.
        config: further ``TxnConfig`` fields.

    Attributes:
        caches: the layers with their memories.
        refs: their ``LayerRef`` objects.
        manager: the manager.
        truth: the oracle; tests write into it the rows that must be in the caches.
        rng: the source of all random numbers.
    """

    def __init__(
        self,
        backend: str,
        policy: str,
        device: torch.device,
        specs: Sequence[LayerSpec] = VARIED,
        seed: int = 0,
        **config: Any,
    ) -> None:
        self.policy = policy
        self.device = device
        self.rng = random.Random(seed)
        self.caches = [
            build_cache(f"layer.{i}", spec, device, self.rng) for i, spec in enumerate(specs)
        ]
        self.refs = [cache.ref for cache in self.caches]
        settings = {"max_rows": 64, "on_error": "raise"} | config
        self.manager = TransactionManager(
            self.refs,
            TxnConfig(policy=policy, backend=backend, **settings),  # type: ignore[arg-type]
        )
        self.truth = Replay(self.caches)
        self._old: list[tuple[str, int, Row]] = []

    def batch(
        self, shape: tuple[Sequence[int], Sequence[int]] = ((1, 1), (3, 2)), **kwargs: Any
    ) -> Batch:
        """Make rows for a window; see ``make_batch``."""
        return make_batch(self.caches, shape, self.device, self.rng, **kwargs)

    def slots(self, batch: Batch) -> dict[str, Tensor]:
        """Return a batch's slots by group, as device tensors; for states one slot per request."""
        given = {}
        for group, slots in batch.slots.items():
            if self.manager.kinds[group].per_request:
                owners = [request for request, _ in batch.owners]
                requests = range(len(batch.settled))
                slots = [slots[owners.index(r)] if r in owners else -1 for r in requests]
            given[group] = torch.tensor(slots, dtype=torch.int64).to(self.device)
        return given

    def open(
        self, batch: Batch, forest: Sequence[int] | Sequence[Sequence[int]] | None = None
    ) -> Window:
        """Begin a window for a batch, all slots given; with ``forest``, one with draft trees."""
        window = self.manager.window(batch.draft_len, self.slots(batch), batch.settled, tree=forest)
        self.forget()
        return window

    def forget(self) -> None:
        """Forget the rows that the last window overwrote, before another one begins."""
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

    def run(self, batch: Batch, counts: Sequence[int]) -> Window:
        """Run a whole window and commit it."""
        with self.open(batch) as window:
            self.stage(window, batch)
            window.commit(self.accepted(counts))
        return window

    # -- what must be in the caches afterwards --------------------------------------

    def write(
        self, batch: Batch, mask: Sequence[bool], layers: Sequence[int] | None = None
    ) -> None:
        """Write the masked rows of some layers in the oracle; None means all layers."""
        for index in range(len(self.caches)) if layers is None else layers:
            cache = self.caches[index]
            slots = batch.slots[cache.spec.group]
            for row, slot, wanted in zip(batch.rows[cache.name], slots, mask, strict=True):
                if wanted:
                    self.truth.write(cache.name, slot, row)

    def expect_settled(self, batch: Batch, layers: Sequence[int] | None = None) -> None:
        """Expect the settled rows in paged caches and rings; no state changes before a commit."""
        direct = self.policy == "direct"
        early = [
            index
            for index in (range(len(self.caches)) if layers is None else layers)
            if direct or self.caches[index].spec.kind != "recurrent"
        ]
        self.write(batch, [not draft for draft in batch.drafts], early)

    def expect_staged(self, batch: Batch, layers: Sequence[int] | None = None) -> None:
        """Expect the rows that staging writes: settled rows, and drafts unless drafts wait."""
        self.expect_settled(batch, layers)
        if self.policy == "deferred":
            return
        for index in range(len(self.caches)) if layers is None else layers:
            cache = self.caches[index]
            for slot, draft in zip(batch.slots[cache.spec.group], batch.drafts, strict=True):
                if draft and slot != -1:
                    self._old.append((cache.name, slot, self.truth.read(cache.name, slot)))
        self.write(batch, batch.drafts, layers)

    def expect_committed(self, batch: Batch, kept: Sequence[bool]) -> None:
        """Expect the rows that a commit leaves: kept rows; under ``direct`` all rows."""
        for layer, slot, row in self._old:
            self.truth.write(layer, slot, row)
        self._old.clear()
        self.write(batch, [not draft for draft in batch.drafts])
        direct = self.policy == "direct"
        self.write(batch, [direct or keep for keep in kept])

    def check(self, when: str = "") -> None:
        """Compare every word of every memory with the oracle.

        Raises:
            AssertionError: a word differs; the message names the policy and says where.
        """
        found = self.truth.differences()
        if found:
            where = f"under {self.policy!r}, {when or 'caches differ'}: "
            raise AssertionError(where + "; ".join(found))

    def check_rows(self, expected: Sequence[int]) -> None:
        """Compare the manager's counts with draft rows staged, committed and rejected.

        Raises:
            AssertionError: the counts differ; the message says who counts.
        """
        counted = self.rows()
        if counted != tuple(expected):
            raise AssertionError(
                f"under {self.policy!r} the manager counted (staged, committed, rejected) = "
                f"{counted}, expected {tuple(expected)}; commit ends with one call of "
                "txn.count(kept), and no other method of an executor calls txn.count"
            )

    def truth_now(self) -> Replay:
        """Make an oracle from the present caches, to show that they do not change."""
        return Replay(self.caches)

    def rows(self) -> tuple[int, int, int]:
        """Return draft rows staged, committed and rejected so far, as the manager counts them."""
        flat = self.manager.snapshot()
        names = ("staged", "committed", "rejected")
        staged, committed, rejected = (int(flat[f"kvtxn_rows_{name}_total"]) for name in names)
        return staged, committed, rejected
