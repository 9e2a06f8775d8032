"""Where a batch of sequences keeps its rows: a run of blocks per sequence, used in turn."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.define(eq=False)
class Region:
    """Where layers of one kind keep their rows: per sequence a run of slots, used in turn.

    The row of position p lies in slot ``p % num_rows`` of its sequence's run, so a row is
    overwritten only by one that comes ``num_rows`` positions later.

    Attributes:
        window: tokens that a query sees, itself included; None is all of them.
        num_rows: slots per sequence, whole blocks.
        oldest: the first position whose row is still there.
    """

    window: int | None
    num_rows: int
    oldest: int = 0

    @property
    def group(self) -> str:
        """The layers' group: one slot mapping serves them all."""
        return "full" if self.window is None else f"sliding_{self.window}"

    def first_seen(self, length: int) -> int:
        """The first position that a token at position ``length`` sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def oldest_after(self, length: int, count: int, written: int) -> int:
        """``oldest`` once ``written`` of ``count`` rows from position ``length`` on are in."""
        if not written:
            return self.oldest
        # Of more rows than there are slots the first never had one: see ``slots``.
        last = count if count > self.num_rows else written
        return max(self.oldest, length + last - self.num_rows)

    def slots(self, batch: int, length: int, count: int) -> Tensor:
        """Slots of ``count`` rows from position ``length`` on, int64 ``[batch * count]``.

        A row whose slot a later row of the same forward takes has none: -1.
        """
        position = torch.arange(length, length + count)
        slot = position % self.num_rows + torch.arange(batch).unsqueeze(1) * self.num_rows
        return slot.masked_fill(position < length + count - self.num_rows, -1).flatten()

    def runs(self, cache: Tensor) -> Tensor:
        """The cache by sequence: a view ``[batch, num_kv_heads, num_rows, head_size]``."""
        return cache.view(-1, self.num_rows, *cache.shape[2:]).transpose(1, 2)

    def rows(self, cache: Tensor, first: int, last: int) -> list[Tensor]:
        """Stored rows of positions ``[first, last)``, in order, as one or two views.

        Args:
            cache: ``[batch * num_rows / block_size, block_size, num_kv_heads, head_size]``.
            first: no older than ``oldest``.
            last: one past the last.

        Returns:
            Views ``[batch, num_kv_heads, n, head_size]``, empty ones left out.
        """
        runs, start = self.runs(cache), first % self.num_rows
        until_end = min(last - first, self.num_rows - start)
        parts = (runs[:, :, start : start + until_end], runs[:, :, : last - first - until_end])
        return [part for part in parts if part.shape[2]]


@attrs.frozen(eq=False)
class Shape:
    """What the user chose.

    Attributes:
        windows: per layer the tokens that a query sees, itself included; None is all.
        max_tokens: tokens per sequence.
        block_size: slots per block.
        max_drafts: rows per sequence that can be taken back at any time.
    """

    windows: tuple[int | None, ...]
    max_tokens: int
    block_size: int
    max_drafts: int

    def region(self, window: int | None) -> Region:
        """An empty region for layers with this window."""
        rows = self.max_tokens + self.max_drafts
        if window is not None:
            rows = min(rows, window - 1 + self.max_drafts)
        return Region(window, -(-rows // self.block_size) * self.block_size)
