"""Executors with one bound, or one assumption about their memory, that nobody promised."""

from typing import Any, ClassVar

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn.executor import AttentionArgs, StagedLayer, Txn
from kvtxn.layers import LayerRef
from kvtxn.row_io import LayerRows, read_layers, write_layers


class CommitsEightLayers(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        every = self.layers
        self.layers = every[:8]
        try:
            super().commit(txn, accepted)
        finally:
            self.layers = every


class CountsSixtyFourRequests(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.ndim == 1 and accepted.dtype is not torch.bool:
            accepted = accepted.clone()
            accepted[64:] = 0
        super().commit(txn, accepted)


class KeepsSixteenDrafts(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        counts = accepted.ndim == 1 and accepted.dtype is not torch.bool
        super().commit(txn, accepted.clamp(max=16) if counts else accepted)


class CountsSlotsAsFloats(TorchExecutor):
    """Has slots as float32, which knows every number up to 2**24 alone."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        exact = dict(txn.slots)
        txn.slots.update({group: slots.float().long() for group, slots in exact.items()})
        super().commit(txn, accepted)
        txn.slots.update(exact)


class CutsWideRows(TorchExecutor):
    """Moves 1 024 elements of a row; beyond them stays what was there."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        cut = [ref for ref in self.moved if self.cuts(ref)]
        old = read_layers(cut, txn.slots)
        super().commit(txn, accepted)
        new = read_layers(cut, txn.slots)
        for name, parts in new.items():
            for part, before in zip(parts, old[name], strict=True):
                part.flatten(1)[:, 1024:] = before.flatten(1)[:, 1024:]
        write_layers(cut, new, txn.slots, txn.kept(accepted))

    def cuts(self, ref: LayerRef) -> bool:
        return True


class CutsWideStates(CutsWideRows):
    def cuts(self, ref):
        return bool(ref.states)


class CutsRowsBehindTables(CutsWideRows):
    def cuts(self, ref):
        return ref.planes[0].offsets is not None and not ref.states


class CommitsEightGroups(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        for group in [*txn.slots][8:]:
            txn.slots[group] = torch.full_like(txn.slots[group], -1)
        super().commit(txn, accepted)


class _KeepsSome(TorchExecutor):
    """Keeps the rows of a window for which ``known`` is true, and no other."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.ndim == 1:
            accepted = txn.kept(accepted) & self.known(txn)
        super().commit(txn, accepted)

    def known(self, txn: Txn) -> Tensor:
        raise NotImplementedError


class KeepsAThousandRows(_KeepsSome):
    def known(self, txn):
        return torch.arange(txn.layout.num_rows) < 1024


class KeepsAByteOfDrafts(_KeepsSome):
    def known(self, txn):
        return txn.layout.position < 256


class SettlesAByteOfRows(TorchExecutor):
    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        real = txn.slots
        first = torch.tensor(txn.layout.starts)[txn.layout.request]
        late = (torch.arange(txn.layout.num_rows) - first >= 256) & ~txn.layout.is_draft
        txn.slots = {group: slots.masked_fill(late, -1) for group, slots in real.items()}
        super().stage(txn, layer)
        txn.slots = real


class RestoresSixtyFourLayers(TorchExecutor):
    def restore(self, txn: Txn) -> None:
        saved = [ref for ref in self.layers if ref.name in txn.saved][:64]
        write_layers(saved, txn.saved, txn.slots, txn.permit(txn.layout.is_draft))


class CutsWideHeads(TorchExecutor):
    """Multiplies the first 64 elements of a query and a key."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        near = torch.arange(query.shape[2]) < 64
        return super().attend(txn, layer, query * near, args)


class _AnswersSome(TorchExecutor):
    """Attention whose result ``spoil`` changes."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        out = super().attend(txn, layer, query, args)
        out[self.unknown(txn, layer)] = 0
        return out

    def unknown(self, txn: Txn, layer: StagedLayer) -> Any:
        raise NotImplementedError


class TakesValuesForKeys(_AnswersSome):
    """Computes as many elements of a value as a key has."""

    def unknown(self, txn, layer):
        return ..., slice(layer.ref.planes[0].row_shape[1], None)


class AnswersSixtyFourRows(_AnswersSome):
    def unknown(self, txn, layer):
        starts = torch.tensor(txn.layout.starts)[txn.layout.request]
        return torch.arange(txn.layout.num_rows) - starts >= 64


class AnswersSixtyFourRequests(_AnswersSome):
    def unknown(self, txn, layer):
        return txn.layout.request >= 64


class ShiftsToItsBlocks(_AnswersSome):
    def unknown(self, txn, layer):
        return torch.full((txn.layout.num_rows,), layer.ref.planes[0].block_size not in (2, 4, 16))


class KnowsSmallBlocks(_AnswersSome):
    def unknown(self, txn, layer):
        return torch.full((txn.layout.num_rows,), layer.ref.planes[0].block_size > 16)


class SeesAThousandTokens(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        window = min(args.sliding_window or 1024, 1024)
        return super().attend(txn, layer, query, attrs.evolve(args, sliding_window=window))


class PairsQueryHeads(TorchExecutor):
    """Query head h reads KV head h // 2, however many there are."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        heads = layer.ref.planes[0].row_shape[0]
        outs = []
        for head in range(query.shape[1]):
            every = query[:, head : head + 1].expand(-1, heads, -1)
            out = super().attend(txn, layer, every, args)
            outs.append(out[:, min(head // 2, heads - 1)])
        return torch.stack(outs, 1)


class SeesSixtyFourTokens(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        window = min(args.sliding_window or 64, 64)
        return super().attend(txn, layer, query, attrs.evolve(args, sliding_window=window))


class ReadsSixteenBlocks(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        table = args.block_table.clone()
        table[:, 16:] = table[:, 15:16]
        return super().attend(txn, layer, query, attrs.evolve(args, block_table=table))


def _as_if_dense(tensor: Tensor) -> Tensor:
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape).stride())


class TakesQueriesForDense(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        return super().attend(txn, layer, _as_if_dense(query), args)


class TakesTablesForDense(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        table = _as_if_dense(args.block_table)
        return super().attend(txn, layer, query, attrs.evolve(args, block_table=table))


class SharesItsBuffers(TorchExecutor):
    """Saved rows lie in one buffer per layer name, for all managers of the process."""

    buffers: ClassVar[dict[Any, Tensor]] = {}

    def save(self, txn: Txn, group: str) -> LayerRows:
        saved = {}
        for name, parts in super().save(txn, group).items():
            rooms = [
                self.buffers.setdefault((name, side, part.shape, part.dtype), part)
                for side, part in enumerate(parts)
            ]
            saved[name] = tuple(room.copy_(part) for room, part in zip(rooms, parts, strict=True))
        return saved


class NeverLetsGo(TorchExecutor):
    def commit(self, txn: Txn, accepted: Tensor) -> None:
        super().commit(txn, accepted)
        self.__dict__.setdefault("windows", []).append(dict(txn.staged))


#: The defect, and the test of the kit that must go red for it.
CAUGHT_BY: dict[type[TorchExecutor], str] = {
    CommitsEightLayers: "test_many_layers",
    CountsSixtyFourRequests: "test_many_requests",
    KeepsSixteenDrafts: "test_long_drafts",
    CutsWideRows: "test_wide_rows",
    CutsWideStates: "test_layouts",
    CutsRowsBehindTables: "test_wide_rows",
    PairsQueryHeads: "test_groupings_and_long_prefixes",
    SeesSixtyFourTokens: "test_groupings_and_long_prefixes",
    ReadsSixteenBlocks: "test_groupings_and_long_prefixes",
    TakesQueriesForDense: "test_strided_arguments",
    TakesTablesForDense: "test_strided_arguments",
    CommitsEightGroups: "test_many_layers",
    CountsSlotsAsFloats: "test_many_slots",
    KeepsAThousandRows: "test_many_requests",
    KeepsAByteOfDrafts: "test_long_drafts",
    SettlesAByteOfRows: "test_long_drafts",
    RestoresSixtyFourLayers: "test_rows_written_by_the_caller",
    CutsWideHeads: "test_strided_arguments",
    TakesValuesForKeys: "test_strided_arguments",
    AnswersSixtyFourRows: "test_many_requests_and_rows",
    AnswersSixtyFourRequests: "test_many_requests_and_rows",
    SeesAThousandTokens: "test_many_requests_and_rows",
    ShiftsToItsBlocks: "test_layouts_and_formats",
    KnowsSmallBlocks: "test_groupings_and_long_prefixes",
    SharesItsBuffers: "test_two_managers",
    NeverLetsGo: "test_staged_tensors_are_let_go",
}
