"""Uploading the addresses of a window's rows, without waiting for the device."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ..launching.repeated_launch import memoryview_of


class AddressBook:
    """Uploads the addresses of a window's rows into one device table, in stream order.

    The host writes into a ring of pinned pages, and each page is copied asynchronously. A page is
    written again only after its last copy was made; if the host is so far ahead that the copy is
    still pending, a fresh page takes its place, so the host never waits.

    Args:
        size: addresses per window.
        device: where the kernels run.

    Attributes:
        table: int64 ``[size]`` on the device.
        version: counts uploads; ``table`` holds the same addresses while it stays the same.
    """

    _PAGES: Final = 64

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self._cuda = device.type == "cuda"
        self._next = 0
        self.table = torch.zeros(size, dtype=torch.int64, device=device)
        self._pages = [_Page(size, self._cuda) for _ in range(self._PAGES if self._cuda else 1)]
        self._kept: list[_Page] = []
        self._last: tuple[int, ...] | None = None
        self.version = 0

    def write(self, addresses: Sequence[int]) -> Tensor:
        """Return the device table that holds ``addresses`` for launches made from now on.

        A launch that is captured in a graph gets a table of its own.
        """
        wanted = tuple(addresses)
        if self.capturing:
            return self._pinned_for_graph(wanted)
        if wanted != self._last:
            self._page().send(wanted, self.table)
            self._last = wanted
            self.version += 1
        return self.table

    @property
    def capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _page(self) -> _Page:
        """Return the next page that may be written."""
        self._next = (self._next + 1) % len(self._pages)
        page = self._pages[self._next]
        if page.busy():
            page = self._pages[self._next] = _Page(self._size, self._cuda)
        return page

    def _pinned_for_graph(self, addresses: tuple[int, ...]) -> Tensor:
        """Return a table that a captured graph owns: each replay uploads from one pinned page."""
        page = _Page(self._size, pinned=True)
        table = torch.empty_like(self.table)
        page.send(addresses, table)
        self._kept.append(page)
        return table


class _Page:
    """Host memory for one upload."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._cells = memoryview_of(self._host)
        self._sent = torch.cuda.Event() if pinned else None

    def busy(self) -> bool:
        """Return whether the last upload may still be pending."""
        return self._sent is not None and not self._sent.query()

    def send(self, addresses: tuple[int, ...], table: Tensor) -> None:
        """Copy ``addresses`` into the front of ``table`` in stream order."""
        self._cells[: len(addresses)] = array("q", addresses)
        table.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
