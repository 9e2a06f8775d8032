"""What a commit's graph reads, and how a window's rows get there.

A graph bakes addresses in, so all that changes from window to window has to lie in fixed
places. ``ByTable`` is for the Triton executor, whose launches read the rows' addresses from a
table: rows stay where they are. ``ByCopy`` is for any other capture-safe executor: rows are
copied into buffers of ``max_rows`` rows first.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from ..executor import Executor, SampledIds, StagedLayer, Txn, as_counts
from ..layout import RowLayout
from .jobs import Job
from .triton_executor import TritonExecutor


class Recipe(abc.ABC):
    """One executor's commit, made fit to be captured.

    Attributes:
        reads_by_address: the acceptance is read by address alone, so a graph serves acceptances
            of any length at one place; otherwise it knows the length that it was captured with.
    """

    reads_by_address: ClassVar[bool]

    @abc.abstractmethod
    def key(self, txn: Txn, bucket: int) -> Hashable:
        """What of the window a graph of ``bucket`` rows would bake in."""

    @abc.abstractmethod
    def load(self, txn: Txn) -> None:
        """Put the window where its graph reads it; ``key`` was called before."""

    @abc.abstractmethod
    def run(self, layout: RowLayout, counters: Tensor, accepted: Tensor | SampledIds) -> None:
        """The commit of the window that ``key`` was asked about, to be captured.

        Args:
            layout: over fixed buffers, ``bucket`` rows; every position is -1 for now.
            counters: see ``Txn``.
            accepted: at a fixed address.
        """

    @abc.abstractmethod
    def held(self) -> object:
        """What has to live as long as the graph."""


class ByTable(Recipe):
    """The Triton executor's launch; rows are found through a table of addresses."""

    reads_by_address: ClassVar[bool] = True

    def __init__(self, inner: TritonExecutor) -> None:
        self._inner = inner
        self._job: Job | None = None
        self._known = 0

    def key(self, txn: Txn, bucket: int) -> Hashable:
        """The plan, the direction, the groups; this also sends the addresses off."""
        self._known = self._inner.known_slots(txn)
        self._job = self._inner.prepare(txn)
        return self._job.plan, self._job.select, self._known, self._job.table.data_ptr()

    def load(self, txn: Txn) -> None:
        """Nothing is left to do."""

    def run(self, layout: RowLayout, counters: Tensor, accepted: Tensor | SampledIds) -> None:
        """One launch."""
        assert self._job is not None
        self._inner.launch(self._job, self._known, layout, counters, accepted)

    def held(self) -> object:
        """The tables that the launch reads."""
        return self._job


class ByCopy(Recipe):
    """Any executor's commit, over copies of the window's rows, slots and verdict."""

    reads_by_address: ClassVar[bool] = False

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._device = inner.layers[0].device
        rows = inner.config.max_rows
        self._rows = {
            ref.name: tuple(
                torch.zeros(rows, *plane.row_shape, dtype=plane.format.dtype, device=self._device)
                for plane in ref.planes
            )
            for ref in inner.layers
        }
        groups = dict.fromkeys(ref.group for ref in inner.layers)
        self._slots = {
            group: torch.full((rows,), -1, dtype=torch.int64, device=self._device)
            for group in groups
        }
        self._filled = dict.fromkeys(groups, 0)
        self._in_range = torch.ones((), dtype=torch.bool, device=self._device)
        self._now: tuple[str, tuple[str, ...], bool, int] = ("", (), False, 0)

    def key(self, txn: Txn, bucket: int) -> Hashable:
        """The policy, the groups, and whether there is a verdict to obey."""
        self._now = (txn.policy, tuple(txn.slots), txn.in_range is not None, bucket)
        return self._now

    def load(self, txn: Txn) -> None:
        """One copy per kind of number; what follows the window's slots is -1."""
        rows, saved = txn.layout.num_rows, txn.policy == "undo"
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for name, room in self._rows.items():
            if txn.policy == "direct":
                break
            parts = txn.saved[name] if saved else txn.staged[name].rows
            sources += (part.view(to.dtype) for part, to in zip(parts, room, strict=True))
            targets += (to[:rows] for to in room)
        for group, slots in txn.slots.items():
            if self._filled[group] > rows:
                self._slots[group][rows : self._filled[group]].fill_(-1)
            self._filled[group] = rows
            sources.append(slots)
            targets.append(self._slots[group][:rows])
        torch._foreach_copy_(targets, sources)
        if txn.in_range is not None:
            self._in_range.copy_(txn.in_range)

    def run(self, layout: RowLayout, counters: Tensor, accepted: Tensor | SampledIds) -> None:
        """The inner executor's commit."""
        policy, groups, checked, bucket = self._now
        txn = Txn(policy, self._inner.layers, layout, counters)
        txn.slots = {group: self._slots[group][:bucket] for group in groups}
        rows = {name: tuple(p[:bucket] for p in room) for name, room in self._rows.items()}
        if policy == "undo":
            txn.saved = rows
        elif policy == "deferred":
            txn.staged = {r.name: StagedLayer(r, rows[r.name]) for r in self._inner.layers}
        txn.in_range = self._in_range if checked else None
        commit_by(self._inner, txn, accepted)

    def held(self) -> object:
        """The buffers are the recipe's own, and the recipe is the executor's."""
        return None


def commit_by(executor: Executor, txn: Txn, accepted: Tensor | SampledIds) -> None:
    """The executor's own commit; one that takes no ids is given their counts."""
    ids = executor.capabilities.takes_ids
    executor.commit(txn, accepted if ids else as_counts(accepted))  # type: ignore[arg-type]


def recipe_for(inner: Executor) -> Recipe:
    """The recipe for an executor that declares itself capturable."""
    return ByTable(inner) if isinstance(inner, TritonExecutor) else ByCopy(inner)
