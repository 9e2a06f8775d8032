"""Launches of ``advance_states``: planned from the layers, and remembered where they recur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from ...executor import SampledIds, StagedLayer
from ...layers import LayerRef
from ...layout import RowLayout
from ...recurrent.state_slots import Crossings
from ..move_rows.acceptance import AcceptanceArg, acceptance_arg
from ..move_rows.address_upload import AddressBook
from ..move_rows.launch import CachedLaunch, KernelCall
from . import kernel
from .plan import CROSSING, PART, StatePlan, build_plans, places_of

#: Launches that are remembered; when there are more, all are forgotten.
_MAX_RECURRING: Final = 64

#: Keeps products and sums apart, each rounded by itself, so the bytes are the reference's.
#: With so many registers and warps, the programs of a multiprocessor fill it.
_OPTIONS: Final = {"enable_fp_fusion": False, "maxnreg": 128}
_WARPS: Final = 2
_PROGRAMS: Final = 8


@attrs.frozen(eq=False)
class _Shape:
    """The facts of a layout that the kernel reads.

    Attributes:
        starts: int64 ``[num_requests + 1]`` on the device, the first row of each request and the
            end; never read if all requests are alike.
        longest: a power of two, at least the rows of the longest request.
        drafts: drafts of each request if all requests are alike, else 0.
        settled: settled rows of each request if all requests are alike, else 0.
    """

    starts: Tensor
    longest: int
    drafts: int = 0
    settled: int = 0

    @classmethod
    def of(cls, layout: RowLayout) -> _Shape:
        """Read the facts from a layout without waiting for the device."""
        pairs = {*zip(layout.draft_len, layout.settled, strict=True)}
        longest = max(sum(pair) for pair in pairs)
        power = max(2, 1 << (longest - 1).bit_length())
        if len(pairs) == 1:
            return cls(layout.request, power, *pairs.pop())
        requests = torch.arange(layout.num_requests + 1, device=layout.request.device)
        return cls(torch.searchsorted(layout.request, requests), power)


@attrs.frozen(eq=False)
class _Parts:
    """The table of parts, for one window.

    Attributes:
        table: int64 on the device.
        count: number of parts in the table.
        crossings: tensors whose addresses stand in the table behind the parts.
    """

    table: Tensor
    count: int
    crossings: tuple[Crossings, ...]


class StateAdvancer:
    """Advances the recurrent states of one executor's layers.

    Args:
        layers: the layers whose states are advanced by replay.
        numbers: the number of each group of the executor.
        limits: int64 ``[groups]`` on the device, slots in the smallest cache of each group.
    """

    def __init__(
        self,
        layers: Sequence[LayerRef],
        numbers: Mapping[str, int],
        limits: Tensor,
    ) -> None:
        self._layers = {ref.name: ref for ref in layers}
        self._numbers, self._limits, self._device = numbers, limits, limits.device
        self._programs = 1
        if limits.is_cuda:
            device = torch.cuda.get_device_properties(self._device)
            self._programs = _PROGRAMS * device.multi_processor_count
        parts = sum(len(ref.kept) for ref in layers)
        self._book = AddressBook(len(PART) * parts + len(CROSSING) * len(numbers), self._device)
        self._plans: dict[tuple[str, ...], list[StatePlan]] = {}
        self._shapes: WeakKeyDictionary[RowLayout, _Shape] = WeakKeyDictionary()
        #: Launches captured in a caller's graphs, kept alive because replays read their tensors.
        self._captured: list[tuple[KernelCall, _Parts]] = []
        self._recurring: dict[tuple[object, ...], tuple[CachedLaunch, object]] = {}

    def advance(
        self,
        staged: Mapping[str, StagedLayer],
        layout: RowLayout,
        slots: Tensor,
        known: int,
        accepted: Tensor | SampledIds,
        crossings: Mapping[str, Crossings],
    ) -> None:
        """Advance all states: one launch, or one per dtype and key size if layers differ in them.

        Args:
            staged: layers by name; layers that are not advanced by replay are skipped.
            layout: the rows.
            slots: int64 ``[groups, n]``, one slot per row.
            known: bit g is set if group g has slots.
            accepted: counts, mask, ids or, for ``layout.tree``, paths.
            crossings: the window's boundary crossings, see ``Txn``.
        """
        taken = self._taken(staged)
        if not taken or not layout.num_rows:
            return
        parts = self._parts(taken, crossings)
        for plan in self._plan(taken):
            self._launch(plan, parts, layout, slots, known, accepted)

    def calls(
        self,
        staged: Mapping[str, StagedLayer],
        layout: RowLayout,
        slots: Tensor,
        known: int,
        accepted: Tensor | SampledIds,
    ) -> list[KernelCall]:
        """Arrange the launches of ``advance``, without crossings, for code that captures them.

        The calls have a table of addresses of their own, which is on the device already, and read
        ``slots`` and ``accepted`` where they are.
        """
        taken = self._taken(staged)
        parts = self._parts(taken, {})
        parts = attrs.evolve(parts, table=parts.table.clone())
        shape, given = self._shape(layout), acceptance_arg(accepted, layout)
        return [
            self._arranged(plan, parts, layout, shape, slots, known, given)
            for plan in self._plan(taken)
        ]

    def _taken(self, staged: Mapping[str, StagedLayer]) -> list[StagedLayer]:
        return [layer for name, layer in staged.items() if name in self._layers]

    def _parts(self, taken: Sequence[StagedLayer], crossings: Mapping[str, Crossings]) -> _Parts:
        """Upload where the rows and the crossings of a window are."""
        places = [place for layer in taken for place in places_of(layer)]
        count = len(places) // len(PART)
        for group in self._numbers if crossings else ():
            at = crossings.get(group)
            places += [0, 0] if at is None else [at.boundary.data_ptr(), at.beyond.data_ptr()]
        return _Parts(self._book.write(places), count, tuple(crossings.values()))

    def _plan(self, taken: Sequence[StagedLayer]) -> list[StatePlan]:
        names = tuple(layer.ref.name for layer in taken)
        found = self._plans.get(names)
        if found is None:
            refs = [layer.ref for layer in taken]
            groups = [self._numbers[ref.group] for ref in refs]
            found = self._plans[names] = build_plans(refs, groups)
        return found

    def _launch(
        self,
        plan: StatePlan,
        parts: _Parts,
        layout: RowLayout,
        slots: Tensor,
        known: int,
        accepted: Tensor | SampledIds,
    ) -> None:
        given = acceptance_arg(accepted, layout)
        # Tensors that are computed during a capture get their numbers at replays only.
        if self._book.capturing:
            launch = self._arranged(plan, parts, layout, _Shape.of(layout), slots, known, given)
            self._captured.append((launch, parts))
            launch.run()
            return
        # The key names objects by id; the entry keeps them alive, so no other object gets that id.
        key = (
            *(id(plan), id(parts.table), id(layout), id(slots), known),
            *(
                bool(parts.crossings),
                given.kind,
                given.tensor.dtype,
                given.columns,
                given.placeholder,
                given.vocabulary,
            ),
        )
        found = self._recurring.get(key)
        if found is None:
            if len(self._recurring) >= _MAX_RECURRING:
                self._recurring.clear()
            launch = self._arranged(plan, parts, layout, self._shape(layout), slots, known, given)
            found = self._recurring[key] = (
                CachedLaunch(launch),
                (plan, parts.table, layout, slots),
            )
        found[0].run(given.tensor)

    def _shape(self, layout: RowLayout) -> _Shape:
        found = self._shapes.get(layout)
        if found is None:
            found = self._shapes[layout] = _Shape.of(layout)
        return found

    def _arranged(
        self,
        plan: StatePlan,
        parts: _Parts,
        layout: RowLayout,
        shape: _Shape,
        slots: Tensor,
        known: int,
        given: AcceptanceArg,
    ) -> KernelCall:
        """Arrange one launch, down to its last argument."""
        uniform = shape.drafts + shape.settled
        num_tiles = plan.tiles.shape[0]
        tree = layout.tree
        arguments = {
            "plan": plan.table,
            "tiles": plan.tiles,
            "parts": parts.table,
            "slots": slots,
            "limits": self._limits,
            "starts": shape.starts,
            "request": layout.request,
            "position": layout.position,
            "accepted": given.tensor,
            "trees": layout.position if tree is None else tree.table,
            "num_requests": layout.num_requests,
            "num_tiles": num_tiles,
            "num_rows": layout.num_rows,
            "num_parts": parts.count,
            "slot_stride": slots.stride(0),
            "known": known,
            "columns": given.columns,
            "placeholder": given.placeholder,
            "vocabulary": given.vocabulary,
            "depth": 0 if tree is None else tree.depth,
            "per_request": max(1, uniform),
            "settled": shape.settled,
            "ACCEPT": given.kind,
            "UNIFORM": uniform > 0,
            "GROUPS": len(self._numbers),
            "CROSSES": bool(parts.crossings),
            **plan.constants,
            "LONGEST": shape.longest,
            "CHUNK": 128 if layout.num_rows <= 128 else 512,
        }
        grid = (min(self._programs, num_tiles * layout.num_requests), 1, 1)
        return KernelCall(kernel.advance_states, grid, arguments, _WARPS, _OPTIONS)
