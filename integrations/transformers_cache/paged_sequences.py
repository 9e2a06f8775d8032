"""``PagedSequences``: sequences of equal length in paged caches, one transaction per forward.

A model library's cache class can be built on it; it knows no model library itself. A forward hands
in its rows layer by layer (``take``) and gets the rows that it may see, its own included. Its rows
wait in a window until ``crop`` says how many of them stay, or until the next forward begins; unless
the past is recorded they are committed with the last layer. A forward that fails on the way leaves
every byte as it was, since none of its rows counts as settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from ...config import TxnConfig
from ...errors import (
    AcceptanceError,
    CapacityError,
    IncompleteWindowError,
    LayerError,
    WindowStateError,
)
from ...layers import LayerRef
from ...manager import TransactionManager
from ...window import Window
from ...window_transitions import WindowState
from .ring_storage import Region, Shape


class PagedSequences:
    """The rows of a batch of sequences, all of one length.

    The caches and the manager are made when the first forward's last layer comes in, since only
    then the shapes of all layers are known.

    Args:
        shape: layers and sizes.
        config: the manager's; ``max_rows`` is replaced by the number of rows that the caches hold.

    Attributes:
        manager: None until the first forward is complete.
        length: rows per sequence in the caches.
        recording: a complete forward waits for ``crop`` instead of being committed.
    """

    def __init__(self, shape: Shape, config: TxnConfig) -> None:
        self.shape = shape
        self.config = config
        self.manager: TransactionManager | None = None
        self.length = 0
        self.recording = False
        self.batch = 0
        self.regions = {window: shape.region(window) for window in shape.windows}
        self.capacity = shape.region(None).num_rows
        self._refs: list[LayerRef] = []
        self._runs: list[tuple[Tensor, Tensor]] = []
        self._first: dict[int, tuple[Tensor, Tensor]] = {}
        self._window: Window | None = None
        self._count = 0

    # -- what it is ---------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Rows per sequence of a complete forward that waits for ``crop``; 0 without one."""
        return 0 if self._window is None or self._window.missing else self._count

    @property
    def seq_length(self) -> int:
        """Tokens per sequence, committed and pending; those of a broken forward do not count."""
        return self.length + self.pending

    def region(self, layer: int) -> Region:
        """Return the region in which this layer keeps its rows."""
        return self.regions[self.shape.windows[layer]]

    # -- a forward ----------------------------------------------------------------

    def take(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take one layer's rows of a forward, and return those that the forward's tokens may see.

        Rows of a layer that the forward has already begin a new forward: the last one's waiting
        rows are committed, or dropped if layers are missing. The last layer's rows commit the
        forward, unless ``recording``.

        Args:
            layer: the layer's number.
            key: ``[batch, num_kv_heads, count, head_size]``.
            value: ``[batch, num_kv_heads, count, value_head_size]``.

        Returns:
            Keys and values that the forward's tokens may see, the new ones last,
            ``[batch, num_kv_heads, seen + count, head_size]`` each.

        Raises:
            CapacityError: the sequences would grow too long; nothing has changed.
            IncompleteWindowError: the first forward ever left layers out.
            LayerError: the rows do not fit the layer; the forward is dropped.
        """
        if self.manager is None:
            return self._take_first(layer, key, value)
        name = self._refs[layer].name
        if self._window is None or name not in self._window.missing:
            self._begin(key.shape[0], key.shape[2])
        window, ref, region = self._window, self._refs[layer], self.region(layer)
        assert window is not None
        seen = region.first_seen(self.length), self.length
        try:
            # Read before staging: under "undo" and "direct" drafts may take the oldest rows' slots.
            keys, values = (
                torch.cat([*region.rows(runs, *seen), part.to(runs.dtype)], dim=2)
                for runs, part in zip(self._runs[layer], (key, value), strict=True)
            )
            window.stage(ref, _as_rows(key), _as_rows(value))
            if not window.missing and not self.recording:
                self.settle()
        except BaseException:
            self.abort()
            raise
        return keys, values

    def _take_first(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take one layer's rows of the first forward, and return copies: it can see no others.

        The last layer's rows make the caches, and all rows are taken then.

        Raises:
            CapacityError: the rows are more than the caches will hold.
            IncompleteWindowError: the layer comes again before all others have come.
        """
        if layer in self._first:
            absent = [i for i in range(len(self.shape.windows)) if i not in self._first]
            raise IncompleteWindowError(
                "update",
                f"the first forward brought no rows of layers {absent}",
                expected=f"{len(self.shape.windows)} layers",
                got=len(self._first),
                hint="if it failed, call reset() and try again; a model that leaves layers out "
                "cannot use this cache",
            )
        if not self._first:
            self._check_room(key.shape[2])
        self._first[layer] = (key, value)
        fresh = torch.cat([key], dim=2), torch.cat([value], dim=2)
        if len(self._first) == len(self.shape.windows):
            rows, self._first = self._first, {}
            self._build([rows[i] for i in range(len(rows))])
            for index, (each_key, each_value) in rows.items():
                self.take(index, each_key, each_value)
        return fresh

    def _build(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Make the manager and zeroed caches of the rows' shapes, K and V in their wider dtype."""
        self.batch = rows[0][0].shape[0]
        self._refs, self._runs = [], []
        for layer, parts in enumerate(rows):
            region = self.region(layer)
            # Under autocast keys come in float32, since they are rotated, and values do not; the
            # wider dtype holds both.
            dtype = torch.promote_types(*(part.dtype for part in parts))
            key_cache, value_cache = (
                region.new_cache(part, self.shape.block_size, dtype) for part in parts
            )
            name = f"model.layers.{layer}"
            self._refs.append(LayerRef(name, key_cache, value_cache, group=region.group))
            self._runs.append((region.runs(key_cache), region.runs(value_cache)))
        config = attrs.evolve(self.config, max_rows=self.batch * self.capacity)
        self.manager = TransactionManager(self._refs, config)

    def _begin(self, batch: int, count: int) -> None:
        """Commit the pending rows of the last forward, then open the window of a new one.

        A last forward that lacks layers is aborted instead.

        Raises:
            CapacityError: the sequences would grow too long, or a sliding window would reach rows
                that are overwritten; nothing has changed.
            LayerError: ``batch`` is not that of the first forward.
        """
        if self._window is not None and self._window.missing:
            self.abort()  # its forward never came to an end
        if batch != self.batch:
            raise LayerError(
                "update",
                "the number of sequences changed",
                expected=self.batch,
                got=batch,
                hint="make a new cache for another batch size",
            )
        self._check_room(count)
        if self._window is not None:
            self.settle()
        self._check_seen("update", self.length, 0, 0)  # a failed forward may have written over rows
        assert self.manager is not None
        slots = {
            region.group: region.slots(batch, self.length, count)
            for region in self.regions.values()
        }
        self._window = self.manager.window([count] * batch, slots, settled=0)
        self._count = count

    def _check_room(self, count: int) -> None:
        """Refuse ``count`` more tokens per sequence than the caches hold.

        Raises:
            CapacityError: they do not fit.
        """
        if self.seq_length + count > self.capacity:
            raise CapacityError(
                "update",
                f"the cache is full: {self.seq_length} tokens are in, and {count} more came",
                expected=f"at most {self.capacity} per sequence",
                got=self.seq_length + count,
                hint="nothing has changed; make the cache with a larger max_tokens (prompt and "
                "new tokens) or max_drafts (candidates per step)",
            )

    # -- its end ------------------------------------------------------------------

    def settle(self, rejected: int = 0) -> None:
        """Commit the pending forward, if any, without its last ``rejected`` rows per sequence.

        Raises:
            CapacityError: the next token would see rows that a ring has overwritten; nothing
                changed.
            KVTxnError: the commit failed; the forward is aborted.
        """
        if not self.pending:
            return
        window, count, kept = self._window, self._count, self._count - rejected
        assert window is not None
        written = count if self._writes_through() else kept
        self._check_seen("crop", self.length + kept, count, written)
        try:
            window.commit([kept] * self.batch)
        except BaseException:
            self.abort()
            raise
        self._close(written)
        self.length += kept

    def abort(self) -> None:
        """Drop the rows of the last forward, unless there are none or these are committed."""
        self._first = {}
        if self._window is None:
            return
        written = self._count if self._writes_through() else 0
        if not self._window.state.is_final:
            self._window.abort()
        self._close(written)

    def _close(self, written: int) -> None:
        """Forget the window, of which ``written`` rows are written; note the oldest rows left."""
        for region in self.regions.values():
            region.oldest = region.oldest_after(self.length, self._count, written)
        self._window, self._count = None, 0

    def _writes_through(self) -> bool:
        """Tell whether the window's rejected rows stay in the caches as garbage, as in stock.

        They do under policy "direct", or after a fallback.
        """
        assert self.manager is not None
        assert self._window is not None
        return self.manager.policy == "direct" or self._window.state is WindowState.DIRECT

    def crop(self, remove: int) -> None:
        """Take back the last ``remove`` rows per sequence, pending ones first; commit the others.

        A last forward that lacks layers is aborted before.

        Raises:
            AcceptanceError: a sequence has fewer rows.
            CapacityError: a sliding window would reach rows that were overwritten.
        """
        if self._window is not None and self._window.missing:
            self.abort()
        if not 0 <= remove <= self.seq_length:
            raise AcceptanceError(
                "crop",
                "the cache cannot lose that many tokens",
                expected=f"0 to {self.seq_length}",
                got=remove,
                hint="remove no more tokens than the cache has",
            )
        deeper = max(0, remove - self.pending)
        if deeper:
            self._check_seen("crop", self.length - deeper, 0, 0)
        self.settle(remove - deeper)
        self.length -= deeper

    def _check_seen(self, operation: str, length: int, count: int, written: int) -> None:
        """Raise CapacityError if the token after ``length`` tokens would see overwritten rows."""
        for region in self.regions.values():
            oldest = region.oldest_after(self.length, count, written)
            if region.first_seen(length) < oldest:
                raise CapacityError(
                    operation,
                    f"a window of {region.window} tokens would reach rows that are overwritten",
                    expected=f"a length of at least {oldest + (region.window or 1) - 1}",
                    got=length,
                    hint="nothing has changed; compute the sequences again after reset(), or make "
                    "the cache with max_drafts of at least the tokens that are removed at once",
                )

    def reset(self) -> None:
        """Forget every token, pending rows included. Caches, manager and counters stay."""
        self.abort()
        self.length = 0
        for region in self.regions.values():
            region.oldest = 0

    # -- copies -------------------------------------------------------------------

    def reorder(self, order: Tensor) -> None:
        """Make sequence i a copy of sequence ``order[i]``; pending rows are committed first."""
        self.settle()
        for each in self._runs:
            for runs in each:
                runs.copy_(runs.index_select(0, order.to(runs.device)))

    def clone(self) -> Self:
        """Return an independent copy, with caches and a manager of its own.

        A last forward that lacks layers is aborted before.

        Raises:
            WindowStateError: rows are pending.
        """
        if self._window is not None and self._window.missing:
            self.abort()
        if self._window is not None:
            raise WindowStateError(
                "copy",
                "the last forward's rows are pending",
                state=self._window.state.name,
                hint="call commit(), abort() or crop() first",
            )
        twin = type(self)(self.shape, self.config)
        twin.recording, twin.length = self.recording, self.length
        if self.manager is None:
            return twin
        twin._build(self._runs)
        for ours, theirs in zip(self._runs, twin._runs, strict=True):
            for runs, copy in zip(ours, theirs, strict=True):
                copy.copy_(runs)
        for window, region in self.regions.items():
            twin.regions[window].oldest = region.oldest
        return twin


def _as_rows(part: Tensor) -> Tensor:
    """Return ``[batch, heads, count, size]`` as window rows ``[batch * count, heads, size]``."""
    return part.detach().transpose(1, 2).flatten(0, 1)
