"""Executors with one wrong assumption each about what a caller gives: dtypes, strides, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn.executor import AttentionArgs, SampledIds, StagedLayer, Txn
from kvtxn.row_io import last_writers, select, write, write_layers


def dense(tensor: Tensor) -> Tensor:
    """The elements that lie behind the first one, whatever the strides are."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


def is_counts(accepted: Any) -> bool:
    return isinstance(accepted, Tensor) and accepted.ndim == 1 and accepted.dtype is not torch.bool


# -- what is accepted ---------------------------------------------------------------------------


class ReadsLongCountsAlone(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        wrong = is_counts(accepted) and accepted.dtype is not torch.int64
        super().commit(txn, torch.zeros_like(accepted) if wrong else accepted)


class AdvancesByLongCountsAlone(TorchExecutor):
    def advance(self, txn: Txn, accepted: Tensor) -> None:
        wrong = is_counts(accepted) and accepted.dtype is not torch.int64
        super().advance(txn, torch.zeros_like(accepted) if wrong else accepted)


class AdvancesByCountsBelowZero(TorchExecutor):
    """A count below zero is one from the end, in states."""

    def advance(self, txn: Txn, accepted: Tensor) -> None:
        drafts = torch.tensor(txn.layout.draft_len)
        if is_counts(accepted):
            accepted = torch.where(accepted < 0, accepted + drafts, accepted)
        super().advance(txn, accepted)


class TakesCountsForDense(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, dense(accepted) if is_counts(accepted) else accepted)


class TakesMasksForDense(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, dense(accepted) if accepted.dtype is torch.bool else accepted)


class ClampsInPlace(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted.clamp_(min=0) if is_counts(accepted) else accepted)


class KnowsCountsById(TorchExecutor):
    """Takes the same tensor for the same counts."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        seen = self.__dict__.setdefault("seen", {})
        super().commit(txn, seen.setdefault(id(accepted), (accepted, accepted.clone()))[1])


class TakesIdsForDense(TorchExecutor):
    capabilities: ClassVar = attrs.evolve(TorchExecutor.capabilities, takes_ids=True)

    def read(self, accepted: Tensor | SampledIds) -> Tensor:
        if isinstance(accepted, Tensor):
            return accepted
        return attrs.evolve(accepted, ids=dense(accepted.ids)).counts()

    def commit(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        super().commit(txn, self.read(accepted))

    def advance(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        super().advance(txn, self.read(accepted))


class TakesNoIdForAll(TakesIdsForDense):
    """A request without an id has a count below zero, which is one from the end."""

    def read(self, accepted: Tensor | SampledIds) -> Tensor:
        if isinstance(accepted, Tensor):
            return accepted
        counts = accepted.counts()
        return torch.where(counts < 0, counts + accepted.ids.shape[1], counts)


class DeniesIds(TakesIdsForDense):
    capabilities: ClassVar = TorchExecutor.capabilities


class TakesCallersMasksForCounts(TorchExecutor):
    """Where the caller writes the rows itself, a mask is taken for that many first drafts."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if not txn.staged and accepted.dtype is torch.bool:
            counts = torch.zeros(txn.layout.num_requests, dtype=torch.int64)
            accepted = counts.index_add_(0, txn.layout.request, accepted.long())
        super().commit(txn, accepted)


# -- rows and caches ----------------------------------------------------------------------------


class _Writes(TorchExecutor):
    """A deferred commit in the hands of a subclass; the rest is sound."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if txn.policy != "deferred":
            super().commit(txn, accepted)
            return
        kept = txn.kept(accepted)
        rows = {name: self.rows(layer) for name, layer in txn.staged.items()}
        self.write(rows, self.places(txn.slots, kept), kept, txn.sources(accepted))
        txn.count(kept)

    def rows(self, layer: StagedLayer) -> tuple[Tensor, ...]:
        return layer.rows

    def places(self, slots: Mapping[str, Tensor], kept: Tensor) -> Mapping[str, Tensor]:
        return slots

    def write(
        self,
        rows: Mapping[str, tuple[Tensor, ...]],
        slots: Mapping[str, Tensor],
        kept: Tensor,
        sources: Tensor | None,
    ) -> None:
        write_layers(self.moved, rows, slots, kept, sources)


class ReadsRowsByNumpy(_Writes):
    """As no tensor can be read that requires a gradient."""

    def rows(self, layer):
        for part in layer.rows:
            if part.requires_grad:
                part.numpy()  # which raises
        return layer.rows


class TakesRepeatedHeadsForDense(_Writes):
    """A stride of 0 is taken for none."""

    def rows(self, layer):
        return tuple(torch.zeros_like(p) if 0 in p.stride() else p for p in layer.rows)


class MovesATensorOnce(_Writes):
    """What is staged for two planes is moved for one."""

    def write(self, rows, slots, kept, sources):
        done = set()
        for ref in self.moved:
            mask = last_writers(slots[ref.group], kept) if ref.kind.overwrites else kept
            for plane, part in zip(ref.planes, rows[ref.name], strict=True):
                if part.data_ptr() not in done:
                    write(plane, part, select(slots[ref.group], mask, sources))
                done.add(part.data_ptr())


class TakesEndsForAStretch(_Writes):
    """Where first and last slot are as far apart as their rows, all between are taken for so."""

    def places(self, slots, kept):
        def stretch(line: Tensor) -> Tensor:
            if len(line) < 2 or not kept.all() or line[-1] - line[0] != len(line) - 1:
                return line
            return torch.arange(int(line[0]), int(line[-1]) + 1)

        return {group: stretch(line) for group, line in slots.items()}


class KeepsRowsOfAnAbort(_Writes):
    """Copies rows where ``stage`` is called, and forgets the copies at a commit alone."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        super().stage(txn, layer)
        copies = tuple(part.clone() for part in layer.rows)
        self.__dict__.setdefault("copies", {})[layer.ref.name] = copies

    def rows(self, layer):
        copies = self.__dict__.get("copies", {}).get(layer.ref.name, layer.rows)
        return copies if copies[0].shape == layer.rows[0].shape else layer.rows

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        self.__dict__.get("copies", {}).clear()


class RepeatsWhatWasAborted(TorchExecutor):
    """A commit without rows launches what an aborted window had prepared."""

    waiting: Any = None

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        super().stage(txn, layer)
        copies = tuple(part.clone() for part in layer.rows)
        self.waiting = (layer.ref, copies, txn.slots, txn.layout.is_draft)

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if self.waiting is not None and not txn.layout.num_rows:
            ref, rows, slots, drafts = self.waiting
            write_layers([ref], {ref.name: rows}, slots, drafts)
        self.waiting = None
        super().commit(txn, accepted)


class HidesTheValues(TorchExecutor):
    """Writes without torch, and calls ``increment_version`` for the keys alone."""

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        values = layer.ref.planes[1:2]
        versions = [plane.cells._version for plane in values]
        super().stage(txn, layer)
        for plane, version in zip(values, versions, strict=True):
            torch._C._autograd._unsafe_set_version_counter((plane.cells,), (version,))


class WritesInAnyMode(TorchExecutor):
    """Writes outside of inference mode to caches that were made in it, which torch refuses."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        for ref in self.layers:
            for plane in ref.planes:
                plane.cells[:0].zero_()
        super().commit(txn, accepted)


# -- attention ----------------------------------------------------------------------------------


class _Asks(TorchExecutor):
    """Attention with other arguments than the caller's."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        return super().attend(txn, layer, query, self.other(args, layer))

    def other(self, args: AttentionArgs, layer: StagedLayer) -> AttentionArgs:
        raise NotImplementedError


def _in_halves(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes a tensor for int32."""
    return dense(tensor).view(torch.int32).flatten()[: tensor.numel()].view(tensor.shape)


class ReadsTablesAsInt32(_Asks):
    def other(self, args, layer):
        return attrs.evolve(args, block_table=_in_halves(args.block_table.contiguous()))


class ReadsLengthsAsInt32(_Asks):
    def other(self, args, layer):
        return attrs.evolve(args, seq_lens=_in_halves(args.seq_lens.contiguous()))


class ReadsStaleBlocks(_Asks):
    """Loads every block that a table names, and hides what is behind the tokens."""

    def other(self, args, layer):
        layer.ref.planes[0].cells[args.block_table.long()]
        return args


class TakesTheScaleForPositive(_Asks):
    def other(self, args, layer):
        return attrs.evolve(args, scale=abs(args.scale))


class AnswersInFloats(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        out = super().attend(txn, layer, query, args)
        return out.float() if out.dtype is torch.float64 else out


#: The defect, and the test of the kit that must go red for it.
CAUGHT_BY: dict[type[TorchExecutor], str] = {
    ReadsLongCountsAlone: "test_device_counts_out_of_range",
    AdvancesByLongCountsAlone: "test_device_counts_out_of_range",
    AdvancesByCountsBelowZero: "test_device_counts_out_of_range",
    TakesCountsForDense: "test_device_counts_out_of_range",
    ClampsInPlace: "test_device_counts_out_of_range",
    KnowsCountsById: "test_device_counts_out_of_range",
    TakesMasksForDense: "test_masks_that_are_no_prefix",
    TakesIdsForDense: "test_sampled_ids_say_the_same_as_counts",
    TakesNoIdForAll: "test_ids_beyond_the_vocabulary_count_as_nothing",
    DeniesIds: "test_sampled_ids",
    TakesCallersMasksForCounts: "test_rows_written_by_the_caller",
    TakesRepeatedHeadsForDense: "test_ways_to_stage",
    ReadsRowsByNumpy: "test_ways_to_stage",
    MovesATensorOnce: "test_ways_to_stage",
    TakesEndsForAStretch: "test_rows_side_by_side",
    KeepsRowsOfAnAbort: "test_as_many_rows_without_settled_ones",
    RepeatsWhatWasAborted: "test_as_many_rows_without_settled_ones",
    HidesTheValues: "test_a_staged_view_of_the_cache",
    WritesInAnyMode: "test_debug_finds_nothing",
    ReadsTablesAsInt32: "test_lengths_and_settings",
    ReadsLengthsAsInt32: "test_lengths_and_settings",
    ReadsStaleBlocks: "test_lengths_and_settings",
    TakesTheScaleForPositive: "test_lengths_and_settings",
    AnswersInFloats: "test_many_requests_and_rows",
}
