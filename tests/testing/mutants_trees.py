"""Executors with one defect each in what they do with draft trees."""

from typing import ClassVar

import attrs
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from torch import Tensor

from kvtxn.executor import AttentionArgs, Capabilities, StagedLayer, Txn
from kvtxn.row_io import read_layers, write_layers


class _AtPath(TorchExecutor):
    """A commit along a path in the hands of a subclass; the rest is sound."""

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        if accepted.ndim != 2:
            super().commit(txn, accepted)
            return
        kept, sources = self.choose(txn, accepted)
        if txn.policy == "undo":
            rejected = txn.permit(txn.layout.is_draft) & ~kept
            write_layers(self.layers, txn.saved, txn.slots, rejected)
        write_layers(self.layers, self.rows(txn), txn.slots, kept, sources)
        txn.count(kept)

    def choose(self, txn: Txn, accepted: Tensor) -> tuple[Tensor, Tensor]:
        return txn.kept(accepted), txn.sources(accepted)

    def rows(self, txn: Txn) -> dict[str, tuple[Tensor, ...]]:
        return {name: layer.rows for name, layer in txn.staged.items()}


class LeavesNodesInPlace(_AtPath):
    """Keeps the accepted nodes where they were drafted, as a linear commit would."""

    def choose(self, txn, accepted):
        sources = txn.sources(accepted)
        rows = torch.arange(len(sources))
        return torch.isin(rows, sources), rows


class TrustsThePath(_AtPath):
    """Takes every node of the path that exists, whoever its parent is."""

    def choose(self, txn, accepted):
        layout = txn.layout
        kept, sources = txn.kept(accepted), txn.sources(accepted)
        for row, place in enumerate(layout.position.tolist()):
            request = int(layout.request[row])
            if 0 <= place < accepted.shape[1]:
                node = int(accepted[request, place])
                if 0 <= node < layout.draft_len[request]:
                    kept[row], sources[row] = True, row - place + node
        return txn.permit(kept), sources


class KeepsTreesByShape(_AtPath):
    """Takes the trees of a window for those of an earlier one with as many nodes."""

    def choose(self, txn, accepted):
        layout = txn.layout
        trees = self.__dict__.setdefault("trees", {})
        tree = trees.setdefault((layout.settled, layout.draft_len), layout.tree)
        sources = tree.sources(layout.request, layout.position, accepted)
        return txn.permit(sources >= 0), sources


class CutsDeepPaths(_AtPath):
    def choose(self, txn, accepted):
        return super().choose(txn, accepted[:, :8])


class TakesPathsForDense(_AtPath):
    def choose(self, txn, accepted):
        path = accepted.as_strided(accepted.shape, torch.empty(accepted.shape).stride())
        return super().choose(txn, path)


class MovesWithinTheCache(_AtPath):
    """Reads the rows from the cache once rejected ones have been put back there."""

    def rows(self, txn):
        return txn.staged and read_layers(self.layers, txn.slots)


class _OtherTree(TorchExecutor):
    """Attention under another tree than the window's."""

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention_args: AttentionArgs
    ) -> Tensor:
        if txn.layout.tree is None:
            return super().attend(txn, layer, query, attention_args)
        real = txn.layout
        txn.layout = attrs.evolve(real, tree=self.other(real))
        try:
            return super().attend(txn, layer, query, attention_args)
        finally:
            txn.layout = real

    def other(self, layout):
        raise NotImplementedError


class SeesOtherBranches(_OtherTree):
    def other(self, layout):
        tree = layout.tree
        longest = tree.visible.shape[1]
        row = torch.arange(layout.num_rows) - torch.tensor(layout.starts)[layout.request]
        visible = torch.arange(longest) <= row.unsqueeze(1)
        return attrs.evolve(tree, visible=visible)


class SeesSixtyFourNodes(_OtherTree):
    """Has 64 bits for the rows that a row sees."""

    def other(self, layout):
        visible = layout.tree.visible.clone()
        visible[:, 64:] = False
        return attrs.evolve(layout.tree, visible=visible)


class SlidesByRowNumber(_OtherTree):
    """Takes a node's number for its depth."""

    def other(self, layout):
        row = torch.arange(layout.num_rows) - torch.tensor(layout.starts)[layout.request]
        return attrs.evolve(layout.tree, order=row)


class DeniesTrees(TorchExecutor):
    capabilities: ClassVar = Capabilities(attention=True, capturable=True, trees=False)


TREES_CAUGHT_BY: dict[type[TorchExecutor], str] = {
    LeavesNodesInPlace: "test_forests",
    TrustsThePath: "test_random_trees",
    KeepsTreesByShape: "test_forests",
    CutsDeepPaths: "test_chains_take_counts",
    TakesPathsForDense: "test_random_trees",
    MovesWithinTheCache: "test_forests",
    SeesOtherBranches: "test_tree_mask",
    SeesSixtyFourNodes: "test_a_wide_tree",
    SlidesByRowNumber: "test_tree_mask",
    DeniesTrees: "test_trees",
}
