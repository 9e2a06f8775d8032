"""Storage for a batch of sequences: a run of blocks per sequence, used in turn like a ring."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.define(eq=False)
class Region:
    """The storage of layers of one kind: per sequence a run of slots, used in turn.

    The row of position p lies in slot ``p % num_rows`` of its sequence's run, so only the row that
    comes ``num_rows`` positions later overwrites it.

    Attributes:
        window: number of tokens that a query sees, itself included; None means all.
        num_rows: slots per sequence; these fill whole blocks.
        oldest: the first position whose row is still there.
    """

    window: int | None
    num_rows: int
    oldest: int = 0

    @property
    def group(self) -> str:
        """Name of the layers' group, "full" or as "sliding_4096"; they have one slot mapping."""
        return "full" if self.window is None else f"sliding_{self.window}"

    def first_seen(self, length: int) -> int:
        """Return the first position that a token at position ``length`` sees."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def oldest_after(self, length: int, count: int, written: int) -> int:
        """Return the first position whose row is still there after a forward.

        Args:
            length: the position of the forward's first row.
            count: rows of the forward.
            written: the first so many of them that were written, as later ones may wait or fail.
        """
        if not written:
            return self.oldest
        # Of more rows than there are slots, the first ones were never written: see ``slots``.
        last = count if count > self.num_rows else written
        return max(self.oldest, length + last - self.num_rows)

    def slots(self, batch: int, length: int, count: int) -> Tensor:
        """Return the slots of ``count`` rows from position ``length`` on.

        Returns:
            int64 ``[batch * count]``; -1 for a row whose slot a later row of the forward takes.
        """
        position = torch.arange(length, length + count, device="cpu")
        slot = (
            position % self.num_rows
            + torch.arange(batch, device="cpu").unsqueeze(1) * self.num_rows
        )
        return slot.masked_fill(position < length + count - self.num_rows, -1).flatten()

    def new_cache(self, like: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
        """Allocate a cache for rows of this kind, zeroed.

        Args:
            like: ``[batch, num_kv_heads, count, head_size]``, on the cache's device.
            block_size: slots per block.
            dtype: the dtype of the cache.

        Returns:
            ``[batch * num_rows / block_size, block_size, num_kv_heads, head_size]``, a view of
            memory with the heads outermost: the rows of one head and sequence lie side by side, as
            attention wants them.
        """
        batch, heads, _, head_size = like.shape
        blocks = batch * self.num_rows // block_size
        with torch.inference_mode(False):  # the cache outlives the mode that it is made in
            pages = like.new_zeros(heads, blocks, block_size, head_size, dtype=dtype)
        return pages.permute(1, 2, 0, 3)

    def runs(self, cache: Tensor) -> Tensor:
        """View a cache by sequence: ``[batch, num_kv_heads, num_rows, head_size]``."""
        blocks, block_size, heads, head_size = cache.shape
        batch = blocks * block_size // self.num_rows
        pages = cache.permute(2, 0, 1, 3)
        return pages.view(heads, batch, self.num_rows, head_size).transpose(0, 1)

    def rows(self, runs: Tensor, first: int, last: int) -> list[Tensor]:
        """View the stored rows of positions ``[first, last)``, in order, as up to two tensors.

        Args:
            runs: a cache by sequence, see ``runs``.
            first: the first position, no older than ``oldest``.
            last: one past the last position.

        Returns:
            Views ``[batch, num_kv_heads, n, head_size]`` with n > 0.
        """
        start, count = first % self.num_rows, last - first
        if start + count <= self.num_rows:
            return [runs.narrow(2, start, count)] if count else []
        until_end = self.num_rows - start
        return [runs.narrow(2, start, until_end), runs.narrow(2, 0, count - until_end)]


@attrs.frozen(eq=False)
class Shape:
    """The sizes that the user chose, and the windows of the model's layers.

    Attributes:
        windows: per layer the number of tokens that a query sees, itself included; None means all.
        max_tokens: tokens per sequence.
        block_size: slots per block.
        max_drafts: rows per sequence that can be taken back at any time.
    """

    windows: tuple[int | None, ...]
    max_tokens: int
    block_size: int
    max_drafts: int

    def region(self, window: int | None) -> Region:
        """Return an empty region for layers with this window, of whole blocks.

        It has room for all tokens and drafts, or, with a window, for the window and drafts if that
        is less.
        """
        rows = self.max_tokens + self.max_drafts
        if window is not None:
            rows = min(rows, window - 1 + self.max_drafts)
        return Region(window, -(-rows // self.block_size) * self.block_size)
