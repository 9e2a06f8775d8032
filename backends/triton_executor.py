"""The Triton executor: each operation of a window is one launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import attention as reference
from .. import state_replay
from ..accepted_forms import as_counts
from ..captured_launches import CapturedPlaces
from ..config import TxnConfig
from ..executor import (
    AttentionArgs,
    Capabilities,
    Executor,
    SampledIds,
    StagedLayer,
    Txn,
)
from ..layers import LayerRef
from ..layout import RowLayout
from ..row_io import LayerRows
from .attention.launch import AttentionLauncher
from .graphs.static_window import StaticLaunches
from .launching.kernel_call import KernelCall
from .move_rows.acceptance import AcceptanceArg, acceptance_arg
from .move_rows.launch import MovePlan
from .move_rows.launcher import MoveLauncher
from .move_rows.planner import MovePlanner
from .move_rows.selection import Accept, Select
from .move_rows.undo_buffers import UndoBuffers


class TritonExecutor(Executor):
    """Byte moves and attention in Triton, on CUDA devices.

    Slots are kept in one fixed buffer and undo's rows in another, so that a window allocates
    nothing and a captured commit finds them again.

    Code that captures launches in graphs of its own uses these ways in beside the protocol:
    ``use_slots`` (the slots are read where that code keeps them), ``plan_commit`` or ``plan_move``
    (what a launch moves), and ``kernel_call`` (the launch itself, as data).

    Attributes:
        programs: programs that fill the device; 1 if it is no GPU.
        attention: launches the attention kernels.
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(
        attention=True,
        atomic=True,
        checks_range=True,
        capturable=True,
        takes_ids=True,
        trees=True,
        kinds=frozenset({"paged", "ring", "recurrent", "replayed"}),
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
        self._names = [ref.name for ref in self.moved]
        #: By layer, the tensors whose version counter shows the window that this executor wrote.
        self._versioned = {
            ref.name: tuple(p.cells for p in ref.planes if not p.cells.is_inference())
            for ref in self.moved
        }
        limits = [min(ref.num_slots for ref in self._members[group]) for group in self._groups]
        reuses = [self._members[group][0].kind.reuse for group in self._groups]
        self._limits, reuse = torch.tensor([limits, reuses], dtype=torch.int64, device=device)
        shape = (len(self._groups), config.max_rows)
        self._slots = torch.full(shape, -1, dtype=torch.int64, device=device)
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views: dict[tuple[str, int], Tensor] = {}
        self._filled = dict.fromkeys(self._groups, 0)
        self._count_only: dict[int, MovePlan] = {}
        self._saved = UndoBuffers(self._members, config.max_rows)
        self._planner = MovePlanner(self.moved, self._number, device)
        self._launcher = MoveLauncher(self._limits, reuse, overwrites=any(reuses))
        self.programs = self._launcher.programs
        self.attention = AttentionLauncher(device)

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return the reason why Triton cannot compile for this device; None if it can.

        It needs CUDA with compute capability 8.0 or newer; on ROCm any GPU is taken.
        """
        if device.type != "cuda":
            return "Triton compiles for GPUs only"
        if torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0 or newer"
        return None

    # -- the protocol -------------------------------------------------------------

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """Copy a mapping into the fixed buffer; the rest of the group's line becomes -1.

        Returns:
            The part of the buffer that has it, int64 ``[num_rows]``; the group's next mapping
            replaces it.
        """
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
        """Copy the draft rows that the group's caches hold now into fixed buffers.

        Return the buffers. Settled rows and padding are never put back, so they are not copied
        either.
        """
        rows = self._saved.of(group, txn.layout.num_rows)
        members = self._members[group]
        parts = [part for ref in members for part in rows[ref.name]]
        facts = (f"save:{group}", members, parts, Select.DRAFT, self._own_all_slots(txn))
        self._move(txn, self._planner.plan(*facts, to_cache=False))
        return rows

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Write one layer's settled rows (``deferred``) or all its rows (else), in one launch.

        Where rows wait or move, the version counters of the layer's caches go up, so that the
        window sees that staged rows which are views of a cache were overwritten.
        """
        select = Select.SETTLED if txn.waits else Select.ALL
        facts = (f"layer:{layer.ref.name}", (layer.ref,), layer.rows, select)
        self._move(txn, self._planner.plan(*facts, self._own_all_slots(txn), direct=True))
        if txn.holds_rows:  # a row that waits may lie in the cache: the window refuses its commit
            increment_version(self._versioned[layer.ref.name])

    def commit(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Write the kept rows or put the rejected ones back, and count, in one launch.

        Under ``direct`` it only counts; a window without rows launches nothing. In a tree kept rows
        are written under every policy: under ``undo`` one launch puts back what their places held,
        and a second one writes and counts.
        """
        if txn.layout.tree is not None:
            self._commit_tree(txn, accepted)
        else:
            self._launch(self.plan_commit(txn), txn, accepted)

    def advance(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Check the slots' range on the device, and let the reference advance the states.

        No engine commits states by this executor.
        """
        txn.check_range()
        state_replay.advance(txn, as_counts(accepted))

    def restore(self, txn: Txn) -> None:
        """Put back the saved bytes under every draft row whose group was saved.

        Nothing if none was.
        """
        saved = tuple(ref for ref in self.layers if ref.name in txn.saved)
        if saved:
            parts = [part for ref in saved for part in txn.saved[ref.name]]
            scope = "saved:" + ",".join(dict.fromkeys(ref.group for ref in saved))
            known = self._own_all_slots(txn)
            self._move(txn, self._planner.plan(scope, saved, parts, Select.DRAFT, known))

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """Attend in one launch, or two if several programs share a request's cached rows.

        Rows behind an offset table, which no GPU engine has, are left to the reference. A query
        without rows gets an empty result, and no launch.
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

    def captured_launches(self, places: CapturedPlaces) -> StaticLaunches:
        """Return launches of each save and commit over the slots in ``places``; launch none.

        A commit writes kept rows under ``deferred``, puts rejected ones back under ``undo``, and
        only counts under ``direct``.
        """
        parts = [part for ref in self.moved for part in places.rows.get(ref.name, ())]

        def plan(select: int, *, to_cache: bool = True) -> MovePlan:
            """Plan a move between the caches and the rows in ``places``."""
            return self.plan_move("captured", self.moved, parts, select, to_cache=to_cache)

        def arrange(plan: MovePlan, layout: RowLayout, acceptance: AcceptanceArg) -> KernelCall:
            """Arrange a launch over the slots in ``places``.

            It counts if there is an acceptance.
            """
            count = acceptance.kind != Accept.NOTHING
            kept = None if count else places.saved_slots
            where = (places.counters, acceptance, places.slots)
            return self._launcher.call(plan, layout, *where, count=count, kept=kept)

        undo = places.policy == "undo"
        save = plan(Select.DRAFT, to_cache=False) if undo else None
        if places.policy == "direct":
            commit = self._plan_count((1 << len(self._groups)) - 1)
        else:
            commit = plan(Select.REJECTED if undo else Select.KEPT)
        return StaticLaunches(self, places, save, commit, arrange, self.programs)

    # -- for code that captures launches ----------------------------------------------

    def use_slots(self, slots: Tensor) -> None:
        """Read slots from a caller's fixed buffer from now on; the caller fills it.

        Args:
            slots: int64 ``[num_groups, n]``, groups in the order of the layers, or ``[n]`` for one
                group; the last dimension contiguous.
        """
        self._slots = slots.view(1, -1) if slots.ndim == 1 else slots
        self._places = [line.data_ptr() for line in self._slots]
        self._slot_views.clear()

    def plan_commit(self, txn: Txn) -> MovePlan:
        """Plan a window's commit; its slots are copied into the fixed buffer if they are not there.

        The plan writes kept rows where rows wait, puts rejected ones back under ``undo``, and else
        only counts. The next plan may upload other addresses into its table: a launch that outlives
        the window needs ``attrs.evolve(plan, addresses=plan.addresses.clone())``.
        """
        known = self._own_all_slots(txn)
        if not self.moved:  # states alone, which ``advance`` has written: the commit only counts
            return self._plan_count(known)
        if txn.waits:
            return self._plan_staged(txn, known)
        if txn.policy == "undo":
            return self._plan_restore(txn, known)
        return self._plan_count(known)

    def plan_move(
        self,
        scope: str,
        refs: Sequence[LayerRef],
        parts: Sequence[Tensor],
        select: int,
        *,
        to_cache: bool = True,
    ) -> MovePlan:
        """Plan a move between caches and rows that stay where they are; all groups have slots.

        Args:
            scope: names ``refs``: the same name, the same layers.
            refs: the layers.
            parts: ``[num_rows, *row_shape]`` per plane of each layer, in the plane's dtype.
            select: which rows to move, a number of ``Select``.
            to_cache: True writes the caches, False ``parts``.

        Returns:
            A plan with a table of addresses of its own.
        """
        known = (1 << len(self._groups)) - 1
        plan = self._planner.plan(scope, tuple(refs), parts, select, known, to_cache=to_cache)
        return attrs.evolve(plan, addresses=plan.addresses.clone())

    def kernel_call(
        self, plan: MovePlan, layout: RowLayout, counters: Tensor, acceptance: AcceptanceArg
    ) -> KernelCall:
        """Arrange one launch over the slots in use; it counts if there is an acceptance.

        Args:
            plan: what to move.
            layout: at least one row; ``num_rows``, ``request``, ``position`` and ``tree`` are read.
            counters: int64 ``[lines, 4]``, see ``Txn.count``.
            acceptance: what was accepted, at the address that the launch reads.
        """
        count = acceptance.kind != Accept.NOTHING
        return self._launcher.call(plan, layout, counters, acceptance, self._slots, count=count)

    # -- inside -------------------------------------------------------------------

    def _own_all_slots(self, txn: Txn) -> int:
        """Copy slots that are not in the fixed buffer into it, for all groups that have any.

        Returns a number in which bit g is set if group g has slots.
        """
        known = 0
        for group, slots in txn.slots.items():
            number = self._number[group]
            if slots.data_ptr() != self._places[number]:
                self.own_slots(group, slots)
            known |= 1 << number
        return known

    def _staged_parts(self, staged: dict[str, StagedLayer]) -> list[Tensor]:
        """List the staged rows of every layer but the replayed ones, plane by plane."""
        return [part for name in self._names for part in staged[name].rows]

    def _plan_staged(self, txn: Txn, known: int) -> MovePlan:
        """Plan to write the kept rows of every layer but the replayed ones."""
        return self._planner.commit(self._staged_parts(txn.staged), known, txn.pattern)

    def _plan_count(self, known: int) -> MovePlan:
        """Plan to count and move nothing."""
        plan = self._count_only.get(known)
        if plan is None:
            plan = self._count_only[known] = MovePlan(None, self._limits, Select.KEPT, known)
        return plan

    def _plan_restore(self, txn: Txn, known: int) -> MovePlan:
        """Plan to put the rejected rows back."""
        parts = [part for ref in self.layers for part in txn.saved[ref.name]]
        return self._planner.plan("all", self.layers, parts, Select.REJECTED, known)

    def _commit_tree(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Write the kept rows of draft trees to their places, and count.

        Under ``undo`` a first launch puts back all saved rows that no kept row fills.
        """
        known = self._own_all_slots(txn)
        if txn.policy == "undo":
            self._launch(self._plan_restore(txn, known), txn, accepted, count=False)
        plan = self._plan_staged(txn, known) if self.moved else self._plan_count(known)
        self._launch(plan, txn, accepted)

    def _move(self, txn: Txn, plan: MovePlan) -> None:
        """Launch a move that needs no acceptance; it counts nothing."""
        self._launch(plan, txn, None, count=False)

    def _launch(
        self,
        plan: MovePlan,
        txn: Txn,
        accepted: Tensor | SampledIds | None,
        *,
        count: bool = True,
    ) -> None:
        """Launch over the rows of a window, if it has any, with the slots in the fixed buffer."""
        layout = txn.layout
        if layout.num_rows:
            acceptance = acceptance_arg(accepted, layout)
            where = (txn.counters, acceptance, self._slots)
            self._launcher.launch(plan, layout, *where, count=count)
