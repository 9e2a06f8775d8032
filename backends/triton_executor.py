"""The Triton executor: whatever a window does to the caches is one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from .. import attention as reference
from ..config import TxnConfig
from ..executor import AttentionArgs, Capabilities, Executor, SampledIds, StagedLayer, Txn
from ..layers import LayerRef
from ..layout import RowLayout, to_device
from ..rows import LayerRows
from . import triton_kernels as kernels
from . import triton_select as which
from .attention_launch import AttentionLauncher
from .jobs import Job, Launch
from .pointer_table import AddressBook, Plan, RowsAt, build_plan, most_lines
from .saved_rows import SavedRows
from .tiling import tile_for

_Strides = list[tuple[int, ...]]

#: A vocabulary that no id is beyond.
_NO_LIMIT: Final = 2**63 - 1


class TritonExecutor(Executor):
    """Byte moves and attention in Triton, on CUDA devices.

    Slots live in one fixed buffer and undo's rows in another, so that nothing is allocated in a
    window and a captured commit finds them again.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        attention=True,
        atomic=True,
        checks_range=True,
        capturable=True,
        takes_ids=True,
        trees=True,
        kinds=frozenset({"paged", "ring", "recurrent"}),
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
        reuses = [self._members[group][0].kind.reuse for group in self._groups]
        self._overwrites = any(reuses)
        lines = [limits, reuses] if self._overwrites else limits
        self._limits = torch.tensor(lines, dtype=torch.int64, device=device)
        shape = (len(self._groups), config.max_rows)
        self._slots = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views: dict[tuple[str, int], Tensor] = {}
        self._book = AddressBook(most_lines([p for r in self.layers for p in r.planes]), device)
        self._shapes: WeakKeyDictionary[RowLayout, tuple[int, int]] = WeakKeyDictionary()
        self._filled = dict.fromkeys(self._groups, 0)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._latest: dict[str, tuple[_Strides, Plan]] = {}
        self._pattern: tuple[object | None, Plan | None] = (None, None)
        self._saved = SavedRows(self._members, config.max_rows)
        self.attention = AttentionLauncher(device)
        #: Programs that fill the device; 1 where there is none.
        self.programs = 1
        if device.type == "cuda":
            self.programs = 10 * torch.cuda.get_device_properties(device).multi_processor_count

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
        """The window's copy of a mapping, in the fixed buffer; what follows it there is -1."""
        count = slots.shape[0]
        key = (group, count)
        view = self._slot_views.get(key)
        if view is None:
            view = self._slot_views[key] = self._slots[self._number[group], :count]
        if self._filled[group] > count:
            self._slots[self._number[group], count : self._filled[group]].fill_(-1)
        self._filled[group] = count
        return view.copy_(slots)

    def save(self, txn: Txn, group: str) -> LayerRows:
        """The draft rows of the group as they are, into fixed buffers.

        Settled rows and padding are never put back, so they are not read either.
        """
        rows = self._saved.of(group, txn.layout.num_rows)
        members = self._members[group]
        parts = [part for ref in members for part in rows[ref.name]]
        self._move(txn, self.job(f"save:{group}", members, parts, which.DRAFT, to_cache=False))
        return rows

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Settled rows under ``deferred``, else all rows."""
        select = which.SETTLED if txn.policy == "deferred" else which.ALL
        scope = f"layer:{layer.ref.name}"
        self._move(txn, self.job(scope, (layer.ref,), layer.rows, select, direct=True))

    def stage_all(self, txn: Txn, layers: Sequence[StagedLayer]) -> None:
        """The same in one launch."""
        select = which.SETTLED if txn.policy == "deferred" else which.ALL
        refs = tuple(layer.ref for layer in layers)
        scope = "all" if refs == self.layers else ",".join(ref.name for ref in refs)
        self._move(txn, self.job(scope, refs, [p for each in layers for p in each.rows], select))

    def commit(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Write the kept rows or put the rejected ones back, and count, in one launch.

        Along the path of a tree rows move under every policy: under ``undo`` a launch puts back
        what the places held, and the one that writes and counts follows it.
        """
        if isinstance(accepted, Tensor) and accepted.ndim == 2:
            known = self.known_slots(txn)
            if txn.policy == "undo":
                parts = [part for ref in self.layers for part in txn.saved[ref.name]]
                job = self.job("all", self.layers, parts, which.REJECTED)
                self.launch(job, known, txn.layout, txn.counters, accepted, count=False)
            self.launch(self._staged_job(txn), known, txn.layout, txn.counters, accepted)
            return
        standing = txn.standing
        slots = None if standing is None or len(self._groups) > 1 else txn.slots[self._groups[0]]
        known = 1 if slots is not None else self.known_slots(txn)
        self.launch(self.prepare(txn), known, txn.layout, txn.counters, accepted, slots=slots)

    def restore(self, txn: Txn) -> None:
        """Put back what was there before every draft row whose group was saved."""
        saved = tuple(ref for ref in self.layers if ref.name in txn.saved)
        if saved:
            parts = [part for ref in saved for part in txn.saved[ref.name]]
            scope = "saved:" + ",".join(dict.fromkeys(ref.group for ref in saved))
            self._move(txn, self.job(scope, saved, parts, which.DRAFT))

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """The paged prefix in splits, then the window kernel, which merges: two launches.

        Rows behind an offset table, which no GPU engine has, go through the reference.
        """
        fresh = layer.rows if txn.holds_rows else None
        if layer.ref.planes[0].offsets is not None:
            return reference.attend(txn.layout, layer.ref.planes, fresh, query, attention)
        if query.shape[0] == 0:
            return query.new_empty(0, query.shape[1], layer.ref.planes[1].row_shape[1])
        query = query if query.stride(-1) == 1 else query.contiguous()
        launch = self.attention
        held = fresh is not None
        prefix = launch.prefix(txn.layout, layer.ref, query, attention, fresh=held)
        return launch.merge(txn.layout, layer.ref, query, fresh, prefix, attention)

    # -- for executors that wrap this one ---------------------------------------------

    def prepare(self, txn: Txn) -> Job:
        """The host's part of a commit: what to launch; addresses are on their way."""
        if txn.standing is not None:
            job = txn.standing.kept.get(self)
            if job is None:
                parts = [part for ref in self.layers for part in txn.staged[ref.name].rows]
                job = self.job("all", self.layers, parts, which.KEPT)
                assert job.plan is not None
                addresses = job.plan.spread([part.data_ptr() for part in parts])
                table = to_device(addresses, self._device, torch.int64)
                job = txn.standing.kept[self] = attrs.evolve(job, table=table)
            return job
        if txn.policy == "deferred":
            return self._staged_job(txn)
        if txn.policy == "undo":
            parts = [part for ref in self.layers for part in txn.saved[ref.name]]
            return self.job("all", self.layers, parts, which.REJECTED)
        return Job(None, self._limits, which.KEPT)

    def use_slots(self, slots: Tensor) -> None:
        """Read slots from a caller's fixed buffer from now on.

        For code that captures launches and fills the buffer itself.

        Args:
            slots: int64 ``[num_groups, n]``, groups in the order of the layers, or ``[n]`` where
                there is one group; the last dimension contiguous.
        """
        self._slots = slots.view(1, -1) if slots.ndim == 1 else slots
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views.clear()

    def known_slots(self, txn: Txn) -> int:
        """Bits of the groups that have slots; slots that came another way are copied in."""
        known = 0
        for group, slots in txn.slots.items():
            number = self._number[group]
            if slots.data_ptr() != self._places[number]:
                self.own_slots(group, slots)
            known |= 1 << number
        return known

    def launch(
        self,
        job: Job,
        known: int,
        layout: RowLayout,
        counters: Tensor,
        accepted: Tensor | SampledIds | None,
        *,
        accept: int | None = None,
        slots: Tensor | None = None,
        count: bool = True,
    ) -> None:
        """The device's part: one launch; with ``accepted`` it counts.

        Args:
            job: what to move.
            known: bits of the groups that have slots.
            layout: the rows; only ``num_rows``, ``request`` and ``position`` are read.
            counters: int64 ``[lines, 4]``.
            accepted: counts, mask, ids or, for ``layout.tree``, paths.
            accept: what ``accepted`` is, as ``triton_select`` numbers it; None: what its
                type says.
            slots: int64 ``[num_rows]``, to be read instead of the fixed buffer; for one group.
            count: False where ``accepted`` only says which rows to move.
        """
        if layout.num_rows:
            facts = (job, known, layout, counters, accepted)
            self.arranged(*facts, accept=accept, slots=slots, count=count).run()

    def arranged(
        self,
        job: Job,
        known: int,
        layout: RowLayout,
        counters: Tensor,
        accepted: Tensor | SampledIds | None,
        *,
        accept: int | None = None,
        slots: Tensor | None = None,
        count: bool = True,
    ) -> Launch:
        """What ``launch`` does with rows, not done yet; its arguments are the same."""
        num_rows = layout.num_rows
        kind, counts, columns, placeholder, vocabulary = which.NOTHING, layout.position, 0, 0, 0
        if isinstance(accepted, SampledIds):
            kind, counts, columns = which.IDS, accepted.ids.contiguous(), accepted.ids.shape[1]
            placeholder = accepted.placeholder
            vocabulary = _NO_LIMIT if accepted.vocab_size is None else accepted.vocab_size
        elif accepted is not None and accepted.ndim == 2:
            kind, counts, columns = which.PATH, accepted.contiguous(), accepted.shape[1]
            assert layout.tree is not None  # a path is committed to a tree window only
            placeholder, vocabulary = layout.tree.table.data_ptr(), layout.tree.depth
        elif accepted is not None:
            mask = accepted.dtype is torch.bool
            kind = accept or (which.MASK if mask else which.COUNTS)
            counts = (accepted.view(torch.uint8) if mask else accepted).contiguous()
        slots = self._slots if slots is None else slots
        count = count and accepted is not None
        plan = job.plan
        num_planes = 0 if plan is None else plan.num_planes
        tile = tile_for(plan, num_rows, self.programs)
        first, second = job.direct or (0, 0)
        uniform = self._uniform(layout)
        arguments = (
            self._limits if plan is None else plan.table,
            job.table,
            first,
            second,
            slots,
            self._limits,
            layout.request,
            layout.position,
            counts,
            counters,
            num_rows,
            num_planes,
            slots.stride(0),
            known,
            columns,
            placeholder,
            vocabulary,
            max(1, sum(uniform)),
            uniform[1],
        )
        constants = {
            "SELECT": job.select,
            "ACCEPT": kind,
            "TO_CACHE": job.to_cache,
            "COUNT": count,
            "UNIFORM": uniform != (0, 0),
            "DIRECT": job.direct is not None,
            "GROUPS": len(self._groups),
            "OVERWRITES": self._overwrites,
            "WIDE": plan is not None and plan.wide,
            "NARROW": 1 if plan is None else plan.narrow,
            "UNITS": 0 if plan is None else plan.row_units,
            "RUN": 0 if plan is None else plan.run_units,
            "BLOCK": 0 if plan is None else plan.block_size,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "CHUNK": tile.chunk,
            "ONCE": tile.once,
        }
        grid = (tile.programs, num_planes + count, 1)
        return Launch(kernels.move_rows, grid, arguments, constants, tile.warps)

    def _uniform(self, layout: RowLayout) -> tuple[int, int]:
        """Draft and settled rows of every request, where all are alike; else zeros."""
        found = self._shapes.get(layout)
        if found is None:
            alike = len({*zip(layout.draft_len, layout.settled, strict=True)}) == 1
            found = (layout.draft_len[0], layout.settled[0]) if alike else (0, 0)
            self._shapes[layout] = found
        return found

    # -- planning -----------------------------------------------------------------

    def _staged_job(self, txn: Txn) -> Job:
        """Rows that wait, on their way to the places that acceptance says."""
        parts = [part for ref in self.layers for part in txn.staged[ref.name].rows]
        return self.job("all", self.layers, parts, which.KEPT, pattern=txn.pattern)

    def _move(self, txn: Txn, job: Job) -> None:
        self.launch(job, self.known_slots(txn), txn.layout, txn.counters, None)

    def job(
        self,
        scope: str,
        refs: tuple[LayerRef, ...],
        parts: Sequence[Tensor],
        select: int,
        *,
        to_cache: bool = True,
        direct: bool = False,
        pattern: object | None = None,
    ) -> Job:
        """Plan a launch over the planes of ``refs``; ``scope`` names them.

        ``pattern`` is ``Txn.pattern`` where ``parts`` are all of a window's rows.
        """
        addresses = list(map(Tensor.data_ptr, parts))
        plan = self._plan(scope, refs, parts, addresses, pattern)
        addresses = plan.spread(addresses)
        if direct and len(addresses) <= 2:
            return Job(plan, self._limits, select, to_cache, (addresses[0], addresses[-1]))
        return Job(plan, self._book.write(addresses), select, to_cache)

    def _plan(
        self,
        scope: str,
        refs: tuple[LayerRef, ...],
        parts: Sequence[Tensor],
        addresses: list[int],
        pattern: object | None,
    ) -> Plan:
        """The plan for these layers and rows; built at the first window that looks like this."""
        aligned = reduce(or_, addresses, 0) % 16 == 0
        if aligned and pattern is not None and pattern is self._pattern[0]:
            assert self._pattern[1] is not None
            return self._pattern[1]
        strides = [part.stride() for part in parts]
        if aligned and scope in self._latest:
            latest, plan = self._latest[scope]
            if latest == strides:
                if pattern is not None:
                    self._pattern = (pattern, plan)
                return plan
        each = [aligned or address % 16 == 0 for address in addresses]
        key = (scope, *strides, *each)
        found = self._plans.get(key)
        if found is None:
            planes = [plane for ref in refs for plane in ref.planes]
            rows = [RowsAt(*pair) for pair in zip(strides, each, strict=True)]
            groups = [self._number[ref.group] for ref in refs for _ in ref.planes]
            found = self._plans[key] = build_plan(planes, rows, groups)
        if aligned:
            self._latest[scope] = (strides, found)
            if pattern is not None:
                self._pattern = (pattern, found)
        return found
