"""A step's batch over two layers of one attention backend, behind whose blocks drafts wait."""

from __future__ import annotations

import numpy
import torch
from kernels_here import importing_kernels
from step_rig import DEVICE

with importing_kernels():
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.vllm_plugin.gpu.windows import hook_attention
    from kvtxn.integrations.vllm_plugin.seam import batches
    from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import layer_refs, waiting_rows
    from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

from kvtxn import TransactionManager, TxnConfig

OWN, MAX_ROWS = 12, 16  # blocks that vLLM hands out, and rows of a window


class Batch:
    """Requests have three blocks each; what a backend is, its subclasses say."""

    block: int
    row_shape: tuple[int, ...]
    reading: type
    builder: object

    def __init__(self, monkeypatch, before, lengths, on_error="fallback") -> None:
        torch.manual_seed(3)
        self.before, self.lengths = before, lengths
        self.starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        self.rows = self.starts[-1]
        whole = [self.cache() for _ in range(2)]
        self.caches = [cache[:OWN] for cache in whole]
        self.stock = [cache.clone() for cache in whole]
        self.layers = [
            TargetLayer(f"layer.{n}", "group.0", *self.layer(n), cache, self.row_shape, cache.dtype)
            for n, cache in enumerate(whole)
        ]
        own = [
            TargetLayer(x.name, x.group, x.module, x.impl, cache, x.row_shape, x.dtype)
            for x, cache in zip(self.layers, self.caches, strict=True)
        ]
        config = TxnConfig(
            policy="deferred", backend="triton", max_rows=MAX_ROWS, on_error=on_error
        )
        manager = TransactionManager(layer_refs(own, "auto"), config)
        self.slots = torch.full((1, 32), -1, dtype=torch.int64, device=DEVICE)
        self.first = {"group.0": OWN * self.block}
        waiting = {
            ref.name: waiting_rows(ref, self.first[ref.group], MAX_ROWS)
            for ref in layer_refs(self.layers, "auto")
        }
        self.steps = GraphSteps(manager, self.slots, query_len=4, rows=waiting)
        self.hook()
        count = len(lengths)
        self.place(torch.randperm(OWN).int()[: 3 * count].view(count, 3).to(DEVICE))
        self.metadata: dict[str, object] = {}
        monkeypatch.setattr(batches, "metadata_of", lambda layer: self.metadata[layer.layer_name])

    def hook(self) -> None:
        """Let the layers' attention read the windows."""
        hook_attention(self.steps, self.layers, self.first, [self.builder])

    def place(self, blocks) -> None:
        """Set the block table, and the slots of the batch by it."""
        self.blocks = blocks
        self.own_slots = torch.tensor(
            [
                int(blocks[r, place // self.block]) * self.block + place % self.block
                for r, (old, length) in enumerate(zip(self.before, self.lengths, strict=True))
                for place in range(old, old + length)
            ]
        )
        self.slots.fill_(-1)
        self.slots[0, : self.rows] = self.own_slots

    def begin(self, drafts, *, captured=False) -> None:
        """A step with these drafts; a captured forward is not told whether it has any."""
        lengths = numpy.array(self.lengths)
        self.steps.begin(numpy.array(drafts), lengths, numpy.zeros(len(lengths), dtype=bool))
        found = self.plain()
        if captured:
            self.steps._window = None
        if captured or self.steps.waits:
            found.kvtxn = self.reading(self.steps, captured, self.builder)
        self.metadata = {layer.name: found for layer in self.layers}

    def totals(self):
        return [a + b for a, b in zip(self.before, self.lengths, strict=True)]
