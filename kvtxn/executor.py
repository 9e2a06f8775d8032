"""What an executor is: the one interface between the transaction and the bytes.

The window decides *what* has to happen and in which order; an executor makes
it happen. It never validates user input (the window has), never changes a
state label, and never waits for the device.

The contract, which ``kvtxn.testing.ExecutorConformance`` tests:

- ``stage`` writes the settled rows under ``deferred`` and all rows under
  ``undo`` and ``direct``; padding (slot -1) is never written, by anything.
- ``commit`` writes exactly the kept draft rows (``deferred``) or restores
  exactly the rejected ones (``undo``), in every layer, then counts. In a tree
  window it also writes the kept rows to their new places, under every policy.
- ``restore`` puts every draft row back (``undo``).
- Layers whose ``kind.overwrites`` (rings, states) may have one slot for several rows of a
  request. Of the rows that a call writes, the last one with a slot is written to it, and the
  others nowhere: executors that move rows in parallel leave those out. What a call *puts
  back* has distinct slots, except that under ``undo`` saved copies of one slot are equal.
- What a window staged is let go when it ends, so that its memory is the caller's again; only
  what belongs to a ``Standing`` may stay.
- Arguments of ``attend`` have any strides, and their sizes no bound.
- Where ``txn.in_range`` is given and False on the device, nothing is written.
- A method that raises may be followed by any other; the window then repairs
  with the reference in ``kvtxn.rows``. An executor whose ``atomic`` capability
  is set promises that a raise means that nothing was written.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from .config import TxnConfig
from .layers import LayerRef
from .layout import RowLayout
from .rows import LayerRows, latest


@attrs.frozen(kw_only=True)
class Capabilities:
    """What an executor can do; the kit fails one that can do what it denies.

    Attributes:
        policies: policies it can carry out.
        attention: ``attend`` works, so ``deferred`` windows can read their own writes.
        atomic: a raising method has written nothing (one launch for all layers, which counts
            too: nothing that could fail comes after the write).
        checks_range: checks on the device that slots lie inside their caches before any
            write; else the window does, with a few small operations.
        no_host_sync: nothing waits for the device from begin to the end of commit.
        capturable: ``commit`` may be captured in a CUDA graph.
        takes_ids: ``commit`` takes ``SampledIds`` as well as counts and masks.
        kinds: names of the ``kvtxn.layers.Kind`` of layers it can hold.
        trees: commits along a path of a draft tree, and attends under its mask; see ``Txn``.
    """

    policies: frozenset[str] = frozenset({"deferred", "undo", "direct"})
    attention: bool = False
    atomic: bool = False
    checks_range: bool = False
    no_host_sync: bool = True
    capturable: bool = False
    takes_ids: bool = False
    kinds: frozenset[str] = frozenset({"paged"})
    trees: bool = False


@attrs.define(eq=False, on_setattr=attrs.setters.frozen)  # frozen, and cheaper to make
class StagedLayer:
    """One layer's rows in the cache's own format.

    Attributes:
        ref: the layer.
        rows: ``[num_rows, *row_shape]`` per plane, any strides, in the plane's dtype;
            the caller's own tensors where they had it already.
    """

    ref: LayerRef
    rows: tuple[Tensor, ...]


@attrs.frozen(eq=False)
class SampledIds:
    """What a sampler returned, in place of counts: ``window.commit(SampledIds(ids))``.

    Attributes:
        ids: int ``[num_requests, num_columns]``: each request's accepted drafts, one token of the
            target's own, then placeholders. Any number of columns.
        placeholder: the id that stands for nothing.
        vocab_size: ids at or above it count as nothing, too.
    """

    ids: Tensor
    placeholder: int = -1
    vocab_size: int | None = None

    def counts(self) -> Tensor:
        """int64 ``[num_requests]``: drafts accepted, not clamped; no wait for the device."""
        real = self.ids != self.placeholder
        if self.vocab_size is not None:
            real &= self.ids < self.vocab_size
        return real.sum(1) - 1


def as_counts(accepted: Tensor | SampledIds) -> Tensor:
    """Counts or a mask, whatever ``accepted`` is."""
    return accepted.counts() if isinstance(accepted, SampledIds) else accepted


@attrs.define(eq=False)
class Standing:
    """What windows over the same captured rows have in common: shape and places, validated once.

    Attributes:
        layout: the rows.
        slots: int64 ``[num_rows]`` by group, on the device, read where the caller keeps them.
        staged: the rows, by layer name, where the captured forward leaves them.
        recurs: False where the slots had to be copied, so that this is for one window only.
        kept: what executors keep for such windows, by keys that name the executor.
    """

    layout: RowLayout
    slots: dict[str, Tensor]
    staged: dict[str, StagedLayer]
    recurs: bool
    kept: dict[object, Any] = attrs.Factory(dict)


@attrs.define(eq=False)
class Txn:
    """A window as its executor sees it.

    In a window with ``layout.tree``, ``accepted`` is a path, and rows move: place ``t`` gets the
    row ``sources(accepted)[t]``. They come from ``staged`` under every policy, so that no write
    can destroy a row that is still to be moved; attention reads them there, too.

    Attributes:
        policy: ``"deferred"``, ``"undo"`` or ``"direct"``.
        layers: every layer of the manager.
        layout: which row is whose.
        slots: int64 ``[num_rows]`` by group; the window's own copies.
        staged: the layers staged so far, by name, in staging order.
        saved: under ``undo``, the rows the caches held before, by layer name.
        in_range: bool scalar on the device, False where a slot lies outside its cache
            and nothing may be written; None where the host checked.
        pattern: an object that this window shares with others whose staged rows have the same
            strides, layer by layer; None where that is not known.
        standing: what this window shares with others over the same captured rows, addresses
            included; None for other windows.
        counters: int64 ``[num_counts, 4]`` on the device; see ``count``.
    """

    policy: str
    layers: tuple[LayerRef, ...]
    layout: RowLayout
    counters: Tensor
    slots: dict[str, Tensor] = attrs.Factory(dict)
    staged: dict[str, StagedLayer] = attrs.Factory(dict)
    saved: dict[str, tuple[Tensor, ...]] = attrs.Factory(dict)
    in_range: Tensor | None = None
    pattern: object | None = None
    standing: Standing | None = None

    def permit(self, mask: Tensor) -> Tensor:
        """``mask``, or nothing at all where a slot is out of range."""
        return mask if self.in_range is None else mask & self.in_range

    @property
    def holds_rows(self) -> bool:
        """Whether ``staged`` has the rows: where they wait for commit, and where they may move."""
        return self.policy == "deferred" or self.layout.tree is not None

    def kept(self, accepted: Tensor) -> Tensor:
        """The draft places that a commit fills, bool ``[num_rows]``."""
        return self.permit(self.layout.kept(accepted))

    def sources(self, accepted: Tensor) -> Tensor | None:
        """By place, the row that a commit puts there, or -1; None where no row moves."""
        return self.layout.sources(accepted)

    def count(self, kept: Tensor, *, aborted: bool = False) -> None:
        """Add this window to the counters: drafts staged, committed, rejected, and refusals.

        One line per group, and before them one for the window itself, where a
        row counts if any group has a slot for it; with one group they are one line. Where rows
        may share a slot, the group's own line counts slots, since so much is written. A commit
        that the device refused, for a slot outside its cache, counts 1 in every line.
        """
        groups = {ref.group: ref.kind.overwrites for ref in self.layers}
        nowhere = torch.zeros_like(self.layout.is_draft)
        real = [
            (self.slots[group] >= 0) & self.layout.is_draft if group in self.slots else nowhere
            for group in groups
        ]
        staged = torch.stack(real)
        written = staged & kept
        for line, (group, overwrites) in enumerate(groups.items()):
            if overwrites and group in self.slots:
                written[line] = latest(self.slots[group], real[line] & kept)
                staged[line] = latest(self.slots[group], real[line])
        if self.counters.shape[0] > len(groups):
            window = torch.stack(real).any(0).unsqueeze(0)
            staged, written = torch.cat([window, staged]), torch.cat([window & kept, written])
        committed, totals = written.sum(1), staged.sum(1)
        refused = torch.zeros_like(totals)
        if self.in_range is not None and not aborted:
            refused += ~self.in_range
        self.counters += torch.stack([totals, committed, totals - committed, refused], dim=1)


class Executor(abc.ABC):
    """Moves the bytes of one manager's windows; one window at a time.

    Args:
        layers: every layer of the manager, in its order.
        config: the manager's settings; ``max_rows`` sizes fixed buffers.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        self.layers = tuple(layers)
        self.config = config

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Why this executor cannot run on ``device``, in a sentence; None if it can."""

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """The window's own int64 copy of a group's slots; may be a fixed buffer."""
        return slots.to(torch.int64, copy=True)

    @abc.abstractmethod
    def save(self, txn: Txn, group: str) -> LayerRows:
        """Under ``undo``: the present rows of ``txn.slots[group]`` in each layer of the group.

        Only draft rows are ever put back; what is returned for the others is never read.
        """

    @abc.abstractmethod
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Write one layer's settled rows (``deferred``) or all its rows (else)."""

    def stage_all(self, txn: Txn, layers: Sequence[StagedLayer]) -> None:
        """``stage`` for several layers, of all groups."""
        for layer in layers:
            self.stage(txn, layer)

    @abc.abstractmethod
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Make the accepted draft rows durable in all layers, then ``count``.

        Args:
            txn: the window; every layer is staged (or, under ``undo``, written by the caller).
            accepted: int ``[num_requests]``, possibly out of range, or bool ``[num_rows]``. An
                executor that declares ``takes_ids`` is handed ``SampledIds``, too; one that
                declares ``trees``, for those, int ``[num_requests, columns]``, possibly no path.
        """

    @abc.abstractmethod
    def restore(self, txn: Txn) -> None:
        """Under ``undo``: put every draft row of ``txn.saved`` back."""

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """Attention of the window's rows over the cache and the window itself.

        Args:
            txn: the window.
            layer: the layer, staged.
            query: ``[num_rows, num_q_heads, head_size]``.
            attention: the rest of the call.

        Returns:
            ``[num_rows, num_q_heads, value_head_size]`` in the query's dtype.
        """
        raise NotImplementedError(f"the {self.name} executor has no attention")


@attrs.frozen(eq=False, kw_only=True)
class AttentionArgs:
    """Arguments of ``Window.attend``; see there.

    With ``ring_size`` position p lies at place ``p % ring_size`` of its request's blocks, and
    ``sliding_window`` is set and hides every position that has been evicted.
    """

    block_table: Tensor
    seq_lens: Tensor
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    ring_size: int | None = None
