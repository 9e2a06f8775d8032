"""The Triton executor: whatever a window does to the caches is one launch for all layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .. import attention as reference
from ..config import TxnConfig
from ..executor import AttentionArgs, Capabilities, Executor, StagedLayer, Txn
from ..layers import LayerRef
from ..rows import LayerRows
from . import triton_kernels as kernels
from .attention_launch import AttentionLauncher
from .pointer_table import AddressBook, Plan, RowsAt, build_plan
from .tiling import tile_for

_Key = tuple[object, ...]


class TritonExecutor(Executor):
    """Byte moves and attention in Triton, on CUDA devices.

    Slots live in one fixed buffer and undo's rows in another, so that nothing is allocated in a
    window and a captured commit finds them again.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        attention=True, atomic=True, checks_range=True, capturable=True
    )

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        super().__init__(layers, config)
        device = self.layers[0].device
        self._device = device
        self._groups = tuple(dict.fromkeys(ref.group for ref in self.layers))
        self._number = {group: i for i, group in enumerate(self._groups)}
        self._members = {
            group: tuple(ref for ref in self.layers if ref.group == group) for group in self._groups
        }
        limits = [min(ref.num_slots for ref in self._members[group]) for group in self._groups]
        self._limits = torch.tensor(limits, dtype=torch.int64, device=device)
        shape = (len(self._groups), config.max_rows)
        self._slots = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views: dict[tuple[str, int], Tensor] = {}
        self._book = AddressBook(sum(len(ref.planes) for ref in self.layers), device)
        self._plans: dict[_Key, Plan] = {}
        self._arena: dict[str, tuple[Tensor, ...]] = {}
        self._saved_views: dict[tuple[str, int], LayerRows] = {}
        self.attention = AttentionLauncher(device)
        #: [programs done, launches done, launches refused for a slot out of range]
        self.verdict = torch.zeros(3, dtype=torch.int64, device=device)
        self._programs = 1
        if device.type == "cuda":
            self._programs = 16 * torch.cuda.get_device_properties(device).multi_processor_count

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """It needs a GPU that Triton compiles for."""
        if device.type != "cuda":
            return "Triton compiles for GPUs only"
        if torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 or newer"
        return None

    # -- the protocol -------------------------------------------------------------

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """The window's copy of a mapping, in the fixed buffer."""
        key = (group, slots.numel())
        view = self._slot_views.get(key)
        if view is None:
            view = self._slots[self._number[group], : slots.numel()]
            self._slot_views[key] = view
        return view.copy_(slots)

    def save(self, txn: Txn, group: str) -> LayerRows:
        """The draft rows of the group as they are, into fixed buffers.

        Settled rows and padding are never put back, so they are not read either.
        """
        rows = self._saved_rows(group, txn.layout.num_rows)
        self._move(txn, self._members[group], rows, kernels.DRAFT, to_cache=False)
        return rows

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Settled rows under ``deferred``, else all rows."""
        select = kernels.SETTLED if txn.policy == "deferred" else kernels.ALL
        self._move(txn, (layer.ref,), {layer.ref.name: layer.rows}, select)

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Write the kept rows or put the rejected ones back, and count, in one launch."""
        if txn.policy == "deferred":
            rows = {name: layer.rows for name, layer in txn.staged.items()}
            self._move(txn, self.layers, rows, kernels.KEPT, accepted)
        elif txn.policy == "undo":
            self._move(txn, self.layers, txn.saved, kernels.REJECTED, accepted)
        else:
            self._move(txn, (), {}, kernels.KEPT, accepted)

    def restore(self, txn: Txn) -> None:
        """Put back what was there before every draft row whose group was saved."""
        saved = tuple(ref for ref in self.layers if ref.name in txn.saved)
        if saved:
            self._move(txn, saved, txn.saved, kernels.DRAFT)

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """The paged prefix in splits, then the window kernel, which merges: two launches.

        Rows behind an offset table, which no GPU engine has, go through the reference.
        """
        deferred = txn.policy == "deferred"
        fresh = layer.rows if deferred else None
        if layer.ref.planes[0].offsets is not None:
            return reference.attend(txn.layout, layer.ref.planes, fresh, query, attention)
        if query.shape[0] == 0:
            return query.new_empty(0, query.shape[1], layer.ref.planes[1].row_shape[1])
        query = query if query.stride(-1) == 1 else query.contiguous()
        launch = self.attention
        prefix = launch.prefix(txn.layout, layer.ref, query, attention, fresh=deferred)
        return launch.merge(txn.layout, layer.ref, query, fresh, prefix, attention)

    # -- fixed buffers ------------------------------------------------------------

    def _saved_rows(self, group: str, num_rows: int) -> LayerRows:
        views = self._saved_views.get((group, num_rows))
        if views is None:
            made = {ref.name: self._arena_of(ref) for ref in self._members[group]}
            views = {name: tuple(part[:num_rows] for part in parts) for name, parts in made.items()}
            self._saved_views[group, num_rows] = views
        return views

    def _arena_of(self, ref: LayerRef) -> tuple[Tensor, ...]:
        """Room for ``max_rows`` rows of a layer, each row on 16 bytes."""
        if ref.name not in self._arena:
            self._arena[ref.name] = tuple(
                _room(self.config.max_rows, plane.row_shape, plane.cells) for plane in ref.planes
            )
        return self._arena[ref.name]

    def _known_slots(self, txn: Txn) -> int:
        """Bits of the groups that have slots; slots that came another way are copied in."""
        known = 0
        for group, slots in txn.slots.items():
            number = self._number[group]
            if slots.data_ptr() != self._places[number]:
                self.own_slots(group, slots)
            known |= 1 << number
        return known

    # -- launching ----------------------------------------------------------------

    def _plan(
        self, refs: Iterable[LayerRef], parts: Sequence[Tensor], addresses: list[int]
    ) -> Plan:
        """The plan for these layers and rows; built at the first window that looks like this."""
        together = 0
        for address in addresses:
            together |= address
        aligned = [True] * len(parts) if together % 16 == 0 else [a % 16 == 0 for a in addresses]
        planes = [plane for ref in refs for plane in ref.planes]
        key = (id(planes[0]), len(planes), *[part.stride() for part in parts], *aligned)
        plan = self._plans.get(key)
        if plan is None:
            rows = [RowsAt(p.stride(), a) for p, a in zip(parts, aligned, strict=True)]
            groups = [self._number[ref.group] for ref in refs for _ in ref.planes]
            plan = self._plans[key] = build_plan(planes, rows, groups)
        return plan

    def _move(
        self,
        txn: Txn,
        refs: tuple[LayerRef, ...],
        rows: LayerRows,
        select: int,
        accepted: Tensor | None = None,
        *,
        to_cache: bool = True,
    ) -> None:
        """One launch of ``move_rows`` over the planes of ``refs``; with ``accepted`` it counts."""
        num_rows = txn.layout.num_rows
        if num_rows == 0:
            return
        parts = [part for ref in refs for part in rows[ref.name]]
        addresses = [part.data_ptr() for part in parts]
        plan = self._plan(refs, parts, addresses) if parts else None
        direct = 0 < len(parts) <= 2
        table = self._limits if direct or not parts else self._book.write(addresses)
        first, second = (addresses[0], addresses[-1]) if direct else (0, 0)
        accept, counts = kernels.NOTHING, txn.layout.position
        if accepted is not None:
            mask = accepted.dtype is torch.bool
            accept = kernels.MASK if mask else kernels.COUNTS
            counts = accepted.contiguous()
            counts = counts.view(torch.uint8) if mask else counts
        self._launch(
            txn, plan, table, (first, second), counts, select, accept, to_cache, direct, num_rows
        )

    def _launch(
        self,
        txn: Txn,
        plan: Plan | None,
        table: Tensor,
        direct: tuple[int, int],
        counts: Tensor,
        select: int,
        accept: int,
        to_cache: bool,
        is_direct: bool,
        num_rows: int,
    ) -> None:
        count = accept != kernels.NOTHING
        num_planes = plan.num_planes if plan is not None else 0
        tile = tile_for(plan, num_rows, self._programs)
        kernels.move_rows[(tile.programs, num_planes + count)](
            plan.table if plan is not None else self._limits,
            table,
            *direct,
            self._slots,
            self._limits,
            txn.layout.request,
            txn.layout.position,
            counts,
            txn.counters,
            self.verdict,
            num_rows,
            num_planes,
            self._slots.shape[1],
            self._known_slots(txn),
            SELECT=select,
            ACCEPT=accept,
            TO_CACHE=to_cache,
            COUNT=count,
            DIRECT=is_direct,
            GROUPS=len(self._groups),
            WIDE=plan is not None and plan.wide,
            NARROW=plan.narrow if plan is not None else 1,
            UNITS=plan.row_units if plan is not None else 0,
            RUN=plan.run_units if plan is not None else 0,
            BLOCK=plan.block_size if plan is not None else 0,
            ROWS=tile.rows,
            COLS=tile.cols,
            CHUNK=tile.chunk,
            num_warps=tile.warps,
        )


def _room(max_rows: int, row_shape: tuple[int, ...], like: Tensor) -> Tensor:
    """``[max_rows, *row_shape]`` words whose rows start on 16 bytes."""
    elements = math.prod(row_shape)
    per_word = 16 // like.dtype.itemsize
    padded = -(-elements // per_word) * per_word
    flat = torch.empty(max_rows, padded, dtype=like.dtype, device=like.device)
    return flat[:, :elements].unflatten(1, row_shape)
