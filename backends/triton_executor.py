"""The Triton executor: whatever a window does to the caches is one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from .. import attention as reference
from ..config import TxnConfig
from ..executor import AttentionArgs, Capabilities, Executor, SampledIds, StagedLayer, Txn
from ..layers import LayerRef
from ..layout import RowLayout, to_device
from ..rows import LayerRows
from . import triton_select as which
from .attention_launch import AttentionLauncher
from .jobs import Job, Launch
from .launches import Given, Launches, acceptance_of
from .pointer_table import AddressBook, Plan, RowsAt, build_plan, most_lines
from .saved_rows import SavedRows

_Strides = list[tuple[int, ...]]


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
        lines = [limits, reuses] if any(reuses) else limits
        self._limits = torch.tensor(lines, dtype=torch.int64, device=device)
        shape = (len(self._groups), config.max_rows)
        self._slots = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views: dict[tuple[str, int], Tensor] = {}
        self._book = AddressBook(most_lines([p for r in self.layers for p in r.planes]), device)
        self._filled = dict.fromkeys(self._groups, 0)
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._latest: dict[str, tuple[_Strides, Plan]] = {}
        self._pattern: tuple[object | None, Plan | None] = (None, None)
        self._saved = SavedRows(self._members, config.max_rows)
        self._waiting: tuple[object, Sequence[int], int, Job | None] = (None, (), 0, None)
        self._names = [ref.name for ref in self.layers]
        self.attention = AttentionLauncher(device)
        self._launches = Launches(self._limits, len(self._groups), overwrites=any(reuses))
        #: Programs that fill the device; 1 where there is none.
        self.programs = self._launches.programs

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
        """One launch, or two where a request's cached rows are shared among programs.

        Rows behind an offset table, which no GPU engine has, go through the reference.
        """
        fresh = layer.rows if txn.holds_rows else None
        if layer.ref.planes[0].offsets is not None:
            return reference.attend(txn.layout, layer.ref.planes, fresh, query, attention)
        if query.shape[0] == 0:
            return query.new_empty(0, query.shape[1], layer.ref.planes[1].row_shape[1])
        query = query if query.stride(-1) == 1 else query.contiguous()
        table, lengths = attention.block_table, attention.seq_lens
        if table.stride(1) != 1 or lengths.stride(0) != 1:
            table, lengths = table.contiguous(), lengths.contiguous()
            attention = attrs.evolve(attention, block_table=table, seq_lens=lengths)
        return self.attention.attend(txn.layout, layer.ref, query, fresh, attention)

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
            slots: int64 ``[num_rows]``, to be read instead of the fixed buffer; for one group.
            count: False where ``accepted`` only says which rows to move.
        """
        if layout.num_rows:
            slots = self._slots if slots is None else slots
            given = acceptance_of(accepted, layout)
            count = count and accepted is not None
            self._launches.make(job, known, layout, counters, given, slots, count=count)

    def arranged(
        self, job: Job, known: int, layout: RowLayout, counters: Tensor, given: Given
    ) -> Launch:
        """What ``launch`` makes, for code that repeats it by itself; ``layout`` has rows.

        With any acceptance in ``given`` it counts.
        """
        count = given[0] != which.NOTHING
        facts = (job, known, layout, counters, given, self._slots)
        return self._launches.arranged(*facts, count=count)

    # -- planning -----------------------------------------------------------------

    def _staged_job(self, txn: Txn) -> Job:
        """Rows that wait, on their way to the places that acceptance says."""
        staged, pattern = txn.staged, txn.pattern
        parts = [part for name in self._names for part in staged[name].rows]
        before, addresses, version, job = self._waiting
        now = [part.data_ptr() for part in parts]
        if (
            job is not None
            and before is pattern is not None
            and now == addresses
            and version == self._book.version
            and not self._book.capturing
        ):
            return job
        job = self.job("all", self.layers, parts, which.KEPT, pattern=pattern)
        if not self._book.capturing:
            self._waiting = (pattern, now, self._book.version, job)
        return job

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
