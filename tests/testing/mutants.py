"""Executors with one defect each, of kinds that real ones have had or easily could.

Every class is the torch executor but for a few lines. ``CAUGHT_BY`` names the
test of the kit that has to see the defect.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from mutants_attention import (
    ClaimsAttention,
    DoesNotSeeItsOwnWrites,
    DropsTheSoftCapWithoutDrafts,
    IgnoresTheSlidingWindow,
    IgnoresTheSoftCap,
    MixesUpQueryGroups,
    ReadsUnscaledRows,
    ScalesOwnRowsByTheCache,
    SeesTheFuture,
    SlidesOneTooFar,
    WeighsWhatIsNotSeen,
)
from mutants_saving import SAVING_CAUGHT_BY, RestoresNothing
from mutants_trees import TREES_CAUGHT_BY
from torch import Tensor

from kvtxn.executor import Capabilities, StagedLayer, Txn
from kvtxn.layers import LayerRef, Plane
from kvtxn.row_io import LayerRows, write_layers


class Sound(TorchExecutor):
    """No defect: the control."""


def with_planes(ref: LayerRef, planes: tuple[Plane, ...]) -> LayerRef:
    """A layer of the same name and group with other planes, as no constructor would make it."""
    other = LayerRef.__new__(LayerRef)
    fields = (("name", ref.name), ("group", ref.group), ("kind", ref.kind), ("planes", planes))
    for name, value in fields:
        object.__setattr__(other, name, value)
    return other


class _AtCommit(TorchExecutor):
    """A deferred commit in the hands of a subclass; the rest is sound."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        kept = txn.kept(accepted)
        if txn.policy == "deferred":
            rows = {name: layer.rows for name, layer in txn.staged.items()}
            self.write(self.layers, rows, txn.slots, kept, txn)
            txn.count(kept)
        else:
            super().commit(txn, accepted)

    def write(
        self,
        layers: Iterable[LayerRef],
        rows: LayerRows,
        slots: Mapping[str, Tensor],
        kept: Tensor,
        txn: Txn,
    ) -> None:
        raise NotImplementedError


class WritesRejectedRows(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        write_layers(layers, rows, slots, txn.layout.is_draft)


class DropsTheLastRow(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        kept = kept.clone()
        kept[kept.nonzero()[-1:]] = False
        write_layers(layers, rows, slots, kept)


class SkipsOneLayer(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        write_layers(list(layers)[:-1], rows, slots, kept)


class WritesPaddingAtSlotZero(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        write_layers(layers, rows, {g: s.clamp(min=0) for g, s in slots.items()}, kept)


class WrapsPaddingAround(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        for ref in layers:
            own = {ref.group: slots[ref.group] % ref.num_slots}
            write_layers([ref], rows, own, kept)


class AcceptsOneMore(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        one_more = kept.clone()
        one_more[1:] |= kept[:-1]
        write_layers(layers, rows, slots, one_more & txn.layout.is_draft)


class IgnoresTheValues(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        for ref in layers:
            only_key = {ref.name: rows[ref.name][:1]}
            write_layers([with_planes(ref, ref.planes[:1])], only_key, slots, kept)


class RoundsDoublesToFloats(_AtCommit):
    """Numbers of double precision pass through single precision on their way."""

    def write(self, layers, rows, slots, kept, txn):
        through = {
            name: tuple(
                part.view(torch.float64).float().double().view(part.dtype)
                if part.dtype.itemsize == 8
                else part
                for part in parts
            )
            for name, parts in rows.items()
        }
        write_layers(layers, through, slots, kept)


class LeavesTheScalesBehind(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        for ref in layers:
            planes = tuple(plane for plane in ref.planes if not plane.is_scale)
            codes = {ref.name: rows[ref.name][: len(planes)]}
            write_layers([with_planes(ref, planes)], codes, slots, kept)


class UsesOneGroupForAll(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        first = next(iter(slots.values()))
        write_layers(layers, rows, dict.fromkeys(slots, first), kept)


class TrustsTheStagingOrder(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        layers = list(layers)
        in_order = dict(zip((ref.name for ref in layers), rows.values(), strict=True))
        if all(a[0].shape == rows[name][0].shape for name, a in in_order.items()):
            rows = in_order
        write_layers(layers, rows, slots, kept)


class KeepsTheFirstRowsItSaw(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        mine = self.__dict__.setdefault("mine", {})
        old = mine.setdefault(txn.layout.num_rows, {n: tuple(p) for n, p in rows.items()})
        write_layers(layers, old, slots, kept)


class KeepsTheRowsOfTheLastStage(_AtCommit):
    """Its copies are stale if a window without settled rows follows, which does not call stage."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        super().stage(txn, layer)
        mine = self.__dict__.setdefault("mine", {})
        mine[layer.ref.name] = tuple(rows.clone() for rows in layer.rows)

    def write(self, layers, rows, slots, kept, txn):
        mine = self.__dict__.get("mine", {})
        fit = txn.layout.tree is None
        own = {
            name: mine[name]
            for name, parts in rows.items()
            if fit and name in mine and len(mine[name][0]) == len(parts[0])
        }
        write_layers(layers, {**rows, **own}, slots, kept)


class MakesTheCacheContiguous(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        for ref in layers:
            planes = tuple(
                attrs.evolve(plane, cells=plane.cells.contiguous()) for plane in ref.planes
            )
            write_layers([with_planes(ref, planes)], rows, slots, kept)


class TouchesTheWordBefore(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        write_layers(layers, rows, slots, kept)
        cells = next(iter(layers)).planes[0].cells
        if kept.any():
            cells.as_strided((1,), (1,), cells.storage_offset() - 1).bitwise_xor_(1)


class TakesViewsForWholeTensors(_AtCommit):
    """Reads rows from the first element of their memory on, without a look at the strides."""

    def write(self, layers, rows, slots, kept, txn):
        dense = {
            name: tuple(
                part if part.storage_offset() else part.as_strided(part.shape, _dense(part.shape))
                for part in parts
            )
            for name, parts in rows.items()
        }
        write_layers(layers, dense, slots, kept)


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class QuantisesTwice(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        twice = {
            ref.name: tuple(
                plane.format.encode(part.view(plane.format.dtype).float())
                for plane, part in zip(ref.planes, rows[ref.name], strict=True)
            )
            for ref in layers
        }
        write_layers(layers, twice, slots, kept)


class LosesNegativeZero(_AtCommit):
    def write(self, layers, rows, slots, kept, txn):
        def plus_zero(part: Tensor, dtype: torch.dtype) -> Tensor:
            return (part.view(dtype) + 0.0).view(part.dtype) if dtype.itemsize > 1 else part

        added = {
            ref.name: tuple(
                plus_zero(part, plane.format.dtype)
                for plane, part in zip(ref.planes, rows[ref.name], strict=True)
            )
            for ref in layers
        }
        write_layers(layers, added, slots, kept)


class TakesMasksForPrefixes(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.dtype is torch.bool:
            drafts = accepted & txn.layout.is_draft
            counts = torch.zeros(txn.layout.num_requests, dtype=torch.int64)
            accepted = counts.index_add(0, txn.layout.request, drafts.long())
        super().commit(txn, accepted)


class ForgetsSettledRows(TorchExecutor):
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        if txn.policy != "deferred":
            super().stage(txn, layer)


class WritesDraftsAtStage(TorchExecutor):
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        rows = {layer.ref.name: layer.rows}
        write_layers([layer.ref], rows, txn.slots, torch.ones_like(txn.layout.is_draft))


class SettlesAtCommit(TorchExecutor):
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        if txn.policy != "deferred":
            super().stage(txn, layer)

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        if txn.policy == "deferred":
            rows = {name: layer.rows for name, layer in txn.staged.items()}
            write_layers(self.layers, rows, txn.slots, ~txn.layout.is_draft)


class HidesItsWrites(TorchExecutor):
    """Writes without torch, and does not call ``increment_version``."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        planes = tuple(attrs.evolve(plane, cells=plane.cells.data) for plane in layer.ref.planes)
        super().stage(txn, attrs.evolve(layer, ref=with_planes(layer.ref, planes)))


class CountsFirst(TorchExecutor):
    """Counts before it writes, so that a window whose write fails is counted."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        txn.count(txn.kept(accepted))
        counted = txn.counters.clone()
        super().commit(txn, accepted)
        txn.counters.copy_(counted)


class NeverCounts(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        counters = txn.counters.clone()
        super().commit(txn, accepted)
        txn.counters.copy_(counters)


class CountsTwice(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        txn.count(txn.kept(accepted))


class CountsEveryLayer(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        before = txn.counters.clone()
        super().commit(txn, accepted)
        txn.counters.add_((txn.counters - before) * (len(self.layers) - 1))


class DeniesUndo(TorchExecutor):
    capabilities: ClassVar = Capabilities(
        policies=frozenset({"deferred", "direct"}), attention=True, capturable=True
    )


class DeniesAttention(TorchExecutor):
    capabilities: ClassVar = Capabilities(attention=False, capturable=True)


class CannotGoOnAfterAFault(TorchExecutor):
    """Takes a lock at staging that only a commit gives back."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        held = self.__dict__.setdefault("held", txn)
        if held is not txn and txn.policy != "direct":
            raise RuntimeError("still busy with another window")
        super().stage(txn, layer)

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        self.__dict__.pop("held", None)


class WritesAfterItSaidSo(TorchExecutor):
    """Lets a commit wait until the next window begins: a hook looks too early."""

    waiting: ClassVar[list] = []

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        while self.waiting:
            super().commit(*self.waiting.pop())
        return super().own_slots(group, slots)

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        self.waiting.append((attrs.evolve(txn, staged=dict(txn.staged)), accepted.clone()))


class WaitsAtCommit(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if int(accepted.sum()) >= 0:
            super().commit(txn, accepted)


class IgnoresTheCounts(TorchExecutor):
    """Does not read the counts when it is replayed."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, torch.zeros_like(accepted))


class DoesNotClamp(TorchExecutor):
    """A count below zero is one from the end."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        drafts = torch.tensor(txn.layout.draft_len)
        negative = accepted.dtype is not torch.bool and txn.layout.tree is None
        super().commit(txn, accepted % (drafts + 1) if negative else accepted)


class WritesOutOfRange(TorchExecutor):
    """Leaves out the row that has no place, and writes the others."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        txn.in_range = None
        super().commit(txn, accepted)


class ClaimsToBeAtomic(TorchExecutor):
    """A fault between two layers leaves one committed and one not."""

    capabilities: ClassVar = attrs.evolve(TorchExecutor.capabilities, atomic=True)


class DeniesCapture(TorchExecutor):
    capabilities: ClassVar = Capabilities(attention=True, capturable=False)


class PretendsToWait(TorchExecutor):
    capabilities: ClassVar = Capabilities(attention=True, capturable=True, no_host_sync=False)


#: The defect, and the test of the kit that must go red for it.
CAUGHT_BY: dict[type[TorchExecutor], str] = {
    WritesRejectedRows: "test_every_shape",
    DropsTheLastRow: "test_every_shape",
    SkipsOneLayer: "test_every_shape",
    AcceptsOneMore: "test_every_shape",
    IgnoresTheValues: "test_every_shape",
    UsesOneGroupForAll: "test_every_shape",
    WritesPaddingAtSlotZero: "test_padding_anywhere",
    WrapsPaddingAround: "test_padding_anywhere",
    TrustsTheStagingOrder: "test_any_order_of_layers",
    KeepsTheFirstRowsItSaw: "test_a_chain_of_windows",
    KeepsTheRowsOfTheLastStage: "test_as_many_rows_without_settled_ones",
    MakesTheCacheContiguous: "test_every_layout_and_format",
    RoundsDoublesToFloats: "test_every_layout_and_format",
    TouchesTheWordBefore: "test_every_layout_and_format",
    QuantisesTwice: "test_every_layout_and_format",
    LosesNegativeZero: "test_every_layout_and_format",
    TakesMasksForPrefixes: "test_masks_that_are_no_prefix",
    ForgetsSettledRows: "test_each_call_writes_its_own_rows",
    WritesDraftsAtStage: "test_each_call_writes_its_own_rows",
    SettlesAtCommit: "test_each_call_writes_its_own_rows",
    NeverCounts: "test_per_window",
    CountsTwice: "test_per_window",
    CountsEveryLayer: "test_per_window",
    DoesNotSeeItsOwnWrites: "test_lengths_and_settings",
    ReadsUnscaledRows: "test_layouts_and_formats",
    SeesTheFuture: "test_lengths_and_settings",
    IgnoresTheSlidingWindow: "test_lengths_and_settings",
    SlidesOneTooFar: "test_lengths_and_settings",
    WeighsWhatIsNotSeen: "test_poison_that_no_query_sees",
    ScalesOwnRowsByTheCache: "test_layouts_and_formats",
    LeavesTheScalesBehind: "test_every_layout_and_format",
    IgnoresTheSoftCap: "test_lengths_and_settings",
    DropsTheSoftCapWithoutDrafts: "test_lengths_and_settings",
    HidesItsWrites: "test_a_staged_view_of_the_cache",
    TakesViewsForWholeTensors: "test_ways_to_stage",
    CountsFirst: "test_a_commit_counts_last",
    MixesUpQueryGroups: "test_lengths_and_settings",
    DeniesUndo: "test_policies",
    DeniesAttention: "test_attention",
    ClaimsAttention: "test_lengths_and_settings",
    ClaimsToBeAtomic: "test_atomic",
    DoesNotClamp: "test_device_counts_out_of_range",
    WritesOutOfRange: "test_a_commit_that_the_device_refuses",
    CannotGoOnAfterAFault: "test_the_next_window_is_sound",
    WritesAfterItSaidSo: "test_an_offloader_sees_accepted_rows_only",
    **TREES_CAUGHT_BY,
    **SAVING_CAUGHT_BY,
}

#: Defects that only a GPU can show.
CAUGHT_ON_CUDA: dict[type[TorchExecutor], str] = {
    WaitsAtCommit: "test_no_host_sync",
    IgnoresTheCounts: "test_commit_in_a_graph",
    DeniesCapture: "test_capture",
    PretendsToWait: "test_waiting",
}

#: Defects that the random program has to find by itself.
FOUND_BY_CHANCE = (WritesRejectedRows, ForgetsSettledRows, RestoresNothing, CountsTwice)
