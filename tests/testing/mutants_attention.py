"""Executors with one defect in their attention each; see ``mutants``."""

import attrs
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn import attention
from kvtxn.cache_planes import decoded
from kvtxn.executor import AttentionArgs, StagedLayer, Txn
from kvtxn.row_io import read


class _Attention(TorchExecutor):
    """Attention in the hands of a subclass; the rest is sound."""

    def fresh(self, txn: Txn, layer: StagedLayer) -> tuple[Tensor, ...] | None:
        return layer.rows if txn.policy == "deferred" else None

    def attend(self, txn, layer, query, attention_args):
        rows = self.fresh(txn, layer)
        return attention.attend(txn.layout, layer.ref.planes, rows, query, attention_args)


class DoesNotSeeItsOwnWrites(_Attention):
    def fresh(self, txn, layer):
        return None


class ReadsUnscaledRows(_Attention):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        planes = tuple(
            attrs.evolve(plane, format=attrs.evolve(plane.format, scale=None))
            for plane in layer.ref.planes
        )
        return attention.attend(txn.layout, planes, self.fresh(txn, layer), query, args)


class SeesTheFuture(_Attention):
    """Every query is taken for the last of its request."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        out = super().attend(txn, layer, query, args)
        for row in range(query.shape[0]):
            request = int(txn.layout.request[row])
            last = txn.layout.starts[request + 1] - 1
            swapped = query.clone()
            swapped[last] = query[row]
            out[row] = super().attend(txn, layer, swapped, args)[last]
        return out


class IgnoresTheSlidingWindow(_Attention):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        return super().attend(txn, layer, query, attrs.evolve(args, sliding_window=None))


class SlidesOneTooFar(_Attention):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        if args.sliding_window is not None:
            args = attrs.evolve(args, sliding_window=args.sliding_window + 1)
        return super().attend(txn, layer, query, args)


class IgnoresTheSoftCap(_Attention):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        return super().attend(txn, layer, query, attrs.evolve(args, soft_cap=None))


class DropsTheSoftCapWithoutDrafts(_Attention):
    """As a kernel for prompts does that an executor takes where nothing is a draft."""

    def attend(self, txn, layer, query, attention_args):
        if not any(txn.layout.draft_len):
            attention_args = attrs.evolve(attention_args, soft_cap=None)
        return TorchExecutor.attend(self, txn, layer, query, attention_args)


class MixesUpQueryGroups(_Attention):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        return super().attend(txn, layer, query.flip(1), args).flip(1)


class WeighsWhatIsNotSeen(_Attention):
    """Weights of 0 for later rows, whose NaN comes through."""

    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        out = super().attend(txn, layer, query, args)
        fresh = self.fresh(txn, layer)
        if fresh is None:
            return out
        return out + 0.0 * decoded(layer.ref.planes, fresh)[1].sum()


class ScalesOwnRowsByTheCache(_Attention):
    """Codes from the window, scales from where they will lie once it is committed."""

    def fresh(self, txn, layer):
        rows = super().fresh(txn, layer)
        if rows is None or not layer.ref.planes[-1].is_scale:
            return rows
        slots = txn.slots[layer.ref.group]
        return tuple(
            read(plane, slots) if plane.is_scale else part
            for plane, part in zip(layer.ref.planes, rows, strict=True)
        )


class ClaimsAttention(TorchExecutor):
    def attend(self, txn: Txn, layer: StagedLayer, query: Tensor, args: AttentionArgs) -> Tensor:
        raise NotImplementedError
