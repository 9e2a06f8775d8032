"""vLLM's FlashAttention backend in a batch of its own: layers, caches with spare blocks, a forward.

The two operators of FlashAttention are plain torch here: one writes rows to slots, one attends over
blocks of any size.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import torch
from kernels_here import importing_kernels
from step_rig import DEVICE

with importing_kernels():
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.vllm_plugin.gpu.cache_layout import layer_refs, waiting_rows
    from kvtxn.integrations.vllm_plugin.gpu.window_backends import (
        FlashReading,
        WindowFlashBuilder,
        WindowFlashImpl,
    )
    from kvtxn.integrations.vllm_plugin.gpu.windows import hook_attention
    from kvtxn.integrations.vllm_plugin.internals import batches
    from kvtxn.integrations.vllm_plugin.internals.layers import TargetLayer

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from kvtxn import TransactionManager, TxnConfig

HEADS, GROUP, SIZE, BLOCK = 2, 2, 8, 4  # KV heads, query heads of each
OWN, SPARE, MAX_ROWS = 12, 4, 16  # blocks that vLLM hands out, and those behind


class Flash:
    """Stands in for the operators of vLLM's FlashAttention backend."""

    def __init__(self) -> None:
        self.calls = []

    def attend(self, *, q, k, v, out, cu_seqlens_q, seqused_k, block_table, **given):
        """Causal attention of each request, its rows the last of its keys."""
        self.calls.append(given | {"block_size": k.shape[1]})
        starts, (left, _) = cu_seqlens_q.tolist(), given["window_size"]
        for r, total in enumerate(seqused_k.tolist()):
            rows, at = slice(starts[r], starts[r + 1]), torch.arange(total, device=k.device)
            where = block_table[r, at // k.shape[1]].long(), at % k.shape[1]
            out[rows] = softmax(q[rows], k[where], v[where], left, given["softmax_scale"])

    def write(self, key, value, key_cache, value_cache, slots, *_):
        """Rows to slots; -1 is left out."""
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                key_cache[slot // BLOCK, slot % BLOCK] = key[row]
                value_cache[slot // BLOCK, slot % BLOCK] = value[row]


def softmax(query, key, value, left, scale):
    """Causal attention of one request; ``left``: rows seen before one's own, -1 is all."""
    key, value = (each.repeat_interleave(GROUP, 1) for each in (key, value))
    i = torch.arange(len(query), device=key.device)[:, None] + len(key) - len(query)
    j = torch.arange(len(key), device=key.device)[None]
    seen = (j <= i) & ((j >= i - left) if left >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


class Batch:
    """A batch over two layers; requests have three blocks each."""

    def __init__(self, monkeypatch, before, lengths, *, sliding=None, on_error="fallback") -> None:
        torch.manual_seed(3)
        self.before, self.lengths = before, lengths
        self.starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        self.rows = self.starts[-1]
        whole = torch.randn(2, OWN + SPARE, BLOCK, HEADS, 2 * SIZE, device=DEVICE).transpose(2, 3)
        self.caches = [cache[:OWN] for cache in whole]
        self.stock = [cache.clone() for cache in self.caches]
        sides = {"num_heads": HEADS * GROUP, "head_size": SIZE, "num_kv_heads": HEADS}
        settings = {"alibi_slopes": None, "sliding_window": sliding, "kv_cache_dtype": "auto"}
        self.layers = []
        for number, cache in enumerate(whole):
            impl = WindowFlashImpl(scale=0.3, **sides, **settings)
            impl.vllm_flash_attn_version = 3
            one = torch.ones(1)
            module = SimpleNamespace(
                layer_name=f"layer.{number}", impl=impl, _q_scale=one, _k_scale=one, _v_scale=one
            )
            shape = (HEADS, SIZE)
            self.layers.append(
                TargetLayer(f"layer.{number}", "group.0", module, impl, cache, shape, whole.dtype)
            )
        own = [
            TargetLayer(x.name, x.group, x.module, x.impl, cache, x.row_shape, x.dtype)
            for x, cache in zip(self.layers, self.caches, strict=True)
        ]
        config = TxnConfig(
            policy="deferred", backend="triton", max_rows=MAX_ROWS, on_error=on_error
        )
        manager = TransactionManager(layer_refs(own, "auto"), config)
        self.slots = torch.full((1, 32), -1, dtype=torch.int64, device=DEVICE)
        self.first = first = {"group.0": OWN * BLOCK}
        waiting = {
            ref.name: waiting_rows(ref, first[ref.group], MAX_ROWS)
            for ref in layer_refs(self.layers, "auto")
        }
        self.steps = GraphSteps(manager, self.slots, query_len=4, rows=waiting)
        self.builder = object.__new__(WindowFlashBuilder)
        self.hook()
        count = len(lengths)
        self.place(torch.randperm(OWN).int()[: 3 * count].view(count, 3).to(DEVICE))
        self.key, self.value = torch.randn(2, 2, self.rows + 3, HEADS, SIZE, device=DEVICE)
        self.query = torch.randn(self.rows + 3, GROUP * HEADS, SIZE, device=DEVICE)
        self.metadata: dict[str, object] = {}
        monkeypatch.setattr(batches, "metadata_of", lambda layer: self.metadata[layer.layer_name])

    def hook(self) -> None:
        """Let the layers' attention read the windows."""
        hook_attention(self.steps, self.layers, self.first, [self.builder])

    def place(self, blocks) -> None:
        """Set the block table, and the slots of the batch by it."""
        self.blocks = blocks
        self.own_slots = [
            int(blocks[r, place // BLOCK]) * BLOCK + place % BLOCK
            for r, (old, length) in enumerate(zip(self.before, self.lengths, strict=True))
            for place in range(old, old + length)
        ]
        self.slots.fill_(-1)
        self.slots[0, : self.rows] = torch.tensor(self.own_slots)

    def begin(self, drafts) -> None:
        """A step with these drafts, and its metadata; three rows of padding follow."""
        lengths = numpy.array(self.lengths)
        self.steps.begin(numpy.array(drafts), lengths, numpy.zeros(len(lengths), dtype=bool))
        window = self.steps.waits
        found = self.plain_metadata()
        if window:
            found.kvtxn = FlashReading(self.steps, False, self.builder)
        self.metadata = {layer.name: found for layer in self.layers}

    def plain_metadata(self):
        totals = [a + b for a, b in zip(self.before, self.lengths, strict=True)]
        numbers = {"dtype": torch.int32, "device": DEVICE}
        return FlashAttentionMetadata(
            num_actual_tokens=self.rows,
            max_query_len=max(self.lengths),
            query_start_loc=torch.tensor(self.starts, **numbers),
            max_seq_len=max(totals),
            seq_lens=torch.tensor(totals, **numbers),
            block_table=self.blocks,
            slot_mapping=self.slots[0, : self.rows + 3],
        )

    def run(self, number: int) -> torch.Tensor:
        """One layer of the forward, as vLLM's two operators call it."""
        layer, metadata = self.layers[number], self.metadata[self.layers[number].name]
        key, value = self.key[number], self.value[number]
        slots = self.slots[0, : self.rows + 3]
        layer.impl.do_kv_cache_update(layer.module, key, value, layer.cache, slots)
        output = torch.full_like(self.query, 7.0)
        given = self.query, key, value, layer.cache, metadata, output
        return layer.impl.forward(layer.module, *given)

    def expected(self, number: int, left_out=()) -> torch.Tensor:
        """Stock's output of a layer; in ``self.stock`` are then all rows but those left out."""
        stock, flash = self.stock[number], Flash()
        key_cache, value_cache = stock.transpose(1, 2).split(SIZE, -1)
        before = stock.clone()
        flash.write(self.key[number], self.value[number], key_cache, value_cache, self.slots[0])
        output, metadata = torch.full_like(self.query, 7.0), self.plain_metadata()
        flash.attend(
            q=self.query,
            k=key_cache,
            v=value_cache,
            out=output,
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            window_size=self.layers[number].impl.sliding_window,
            softmax_scale=0.3,
        )
        for row in left_out:
            slot = self.own_slots[row]
            stock[slot // BLOCK, :, slot % BLOCK] = before[slot // BLOCK, :, slot % BLOCK]
        return output

    def check(self, number: int, left_out=()) -> None:
        """Stock's very sums, and in vLLM's blocks all rows but those left out."""
        output = self.run(number)
        assert output.equal(self.expected(number, left_out))
        assert self.caches[number].equal(self.stock[number])
