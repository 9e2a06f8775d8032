"""Planning launches of ``move_rows``: looked up if an earlier window looked the same.

Only strides and alignment decide which plane table serves a window; they recur, and so do often
the addresses of its rows. So the common case compares, and builds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final

import torch
from torch import Tensor

from ...layers import LayerRef
from ..launching.repeated_launch import memoryview_of
from .launch import MovePlan
from .plane_table import PlaneTable, RowsAt, build_plane_table, most_lines
from .selection import Select

_Strides = list[tuple[int, ...]]


class MovePlanner:
    """Plans the launches of one executor.

    Args:
        layers: the executor's layers whose rows are moved.
        number: the number of each group.
        device: where the caches are.
    """

    def __init__(
        self, layers: Sequence[LayerRef], number: dict[str, int], device: torch.device
    ) -> None:
        self._layers = tuple(layers)
        self._number = number
        lines = most_lines([plane for ref in layers for plane in ref.planes])
        self._book = AddressBook(max(1, lines), device)
        self._tables: dict[tuple[object, ...], PlaneTable] = {}
        self._latest: dict[str, tuple[_Strides, PlaneTable]] = {}
        self._pattern: tuple[object | None, PlaneTable | None] = (None, None)
        self._commit: tuple[object, Sequence[int], int, MovePlan | None] = (None, (), 0, None)

    def plan(
        self,
        scope: str,
        refs: tuple[LayerRef, ...],
        parts: Sequence[Tensor],
        select: int,
        known: int,
        *,
        to_cache: bool = True,
        direct: bool = False,
        pattern: object | None = None,
    ) -> MovePlan:
        """Plan a launch over the planes of ``refs``; upload the addresses of ``parts`` if need be.

        The upload goes into the table that all plans share, so the plan's launch has to be made
        before the next plan; while a graph is captured each plan gets a table of its own. A plan
        that is ``direct`` uploads nothing.

        Args:
            scope: a name of the layers in ``refs``; equal names mean equal layers.
            refs: the layers.
            parts: ``[num_rows, *row_shape]`` per plane of each layer: the staged rows.
            select: the rows to move, a number of ``Select``.
            known: bit g is set if group g has slots.
            to_cache: True writes the caches, False ``parts``.
            direct: pass one or two addresses as the kernel's arguments instead of uploading them.
            pattern: ``Txn.pattern``, if ``parts`` are all of a window's rows.
        """
        addresses = list(map(Tensor.data_ptr, parts))
        planes = self._table(scope, refs, parts, addresses, pattern)
        lines = planes.spread(addresses)
        if direct and len(lines) <= 2:
            first_and_second = (lines[0], lines[-1])
            return MovePlan(planes, self._book.table, select, known, to_cache, first_and_second)
        return MovePlan(planes, self._book.write(lines), select, known, to_cache)

    def commit(self, parts: Sequence[Tensor], known: int, pattern: object | None) -> MovePlan:
        """Plan the commit of all staged rows, reusing the last plan if it fits this window.

        It fits if ``pattern`` is the same object, not None, and all rows lie where they lay.
        Arguments are those of ``plan``, with the rows of every layer.
        """
        before, addresses, version, plan = self._commit
        now = list(map(Tensor.data_ptr, parts))
        if (
            plan is not None
            and before is pattern is not None
            and now == addresses
            and plan.known == known
            and version == self._book.version
            and not self._book.capturing
        ):
            return plan
        plan = self.plan("all", self._layers, parts, Select.KEPT, known, pattern=pattern)
        if not self._book.capturing:
            self._commit = (pattern, now, self._book.version, plan)
        return plan

    def _table(
        self,
        scope: str,
        refs: tuple[LayerRef, ...],
        parts: Sequence[Tensor],
        addresses: list[int],
        pattern: object | None,
    ) -> PlaneTable:
        """Return the plane table for these layers and rows.

        Build it if strides or alignment are new.
        """
        aligned = reduce(or_, addresses, 0) % 16 == 0
        if aligned and pattern is not None and pattern is self._pattern[0]:
            assert self._pattern[1] is not None
            return self._pattern[1]
        strides = [part.stride() for part in parts]
        if aligned and scope in self._latest:
            latest, table = self._latest[scope]
            if latest == strides:
                if pattern is not None:
                    self._pattern = (pattern, table)
                return table
        each = [aligned or address % 16 == 0 for address in addresses]
        key = (scope, *strides, *each)
        found = self._tables.get(key)
        if found is None:
            planes = [plane for ref in refs for plane in ref.planes]
            rows = [RowsAt(*pair) for pair in zip(strides, each, strict=True)]
            groups = [self._number[ref.group] for ref in refs for _ in ref.planes]
            found = self._tables[key] = build_plane_table(planes, rows, groups)
        if aligned:
            self._latest[scope] = (strides, found)
            if pattern is not None:
                self._pattern = (pattern, found)
        return found


# -- addresses, uploaded without waiting for the device ---------------------------------------


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
        """Upload ``addresses`` in stream order, unless they are there.

        Return the table that has them. A launch that is captured in a graph gets a table of its
        own.
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
        """True while the current stream is being captured in a graph."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def _page(self) -> _Page:
        """Return the next page of the ring.

        If its copy is pending, a new page takes its place there.
        """
        self._next = (self._next + 1) % len(self._pages)
        page = self._pages[self._next]
        if page.busy():
            page = self._pages[self._next] = _Page(self._size, self._cuda)
        return page

    def _pinned_for_graph(self, addresses: tuple[int, ...]) -> Tensor:
        """Return a table of its own, with these addresses, for a graph that is being captured.

        Each replay uploads them anew from one pinned page, which is kept for good.
        """
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
        """Tell whether the last upload may still be pending; False without a GPU."""
        return self._sent is not None and not self._sent.query()

    def send(self, addresses: tuple[int, ...], table: Tensor) -> None:
        """Copy ``addresses`` through this page into the front of ``table``, in stream order."""
        self._cells[: len(addresses)] = array("q", addresses)
        table.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
