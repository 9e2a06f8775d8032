"""vLLM's FlashAttention backend in a batch of its own: layers, caches with spare blocks, a forward.

The two operators of FlashAttention are plain torch here: one writes rows to slots, one attends over
blocks of any size.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from kernels_here import importing_kernels
from step_rig import DEVICE

with importing_kernels():
    import waiting_batch
    from kvtxn.integrations.vllm_plugin.gpu.flash_backend import (
        FlashReading,
        WindowFlashBuilder,
        WindowFlashImpl,
    )
    from waiting_batch import OWN

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

HEADS, GROUP, SIZE, BLOCK = 2, 2, 8, 4  # KV heads, query heads of each
SPARE = 4  # blocks behind those that vLLM hands out


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


class Batch(waiting_batch.Batch):
    """A batch of FlashAttention's."""

    block, row_shape, reading = BLOCK, (HEADS, SIZE), FlashReading

    def __init__(self, *args, sliding=None, **named) -> None:
        self.builder, self.sliding = object.__new__(WindowFlashBuilder), sliding
        super().__init__(*args, **named)
        self.stock = [cache.clone() for cache in self.caches]
        self.key, self.value = torch.randn(2, 2, self.rows + 3, HEADS, SIZE, device=DEVICE)
        self.query = torch.randn(self.rows + 3, GROUP * HEADS, SIZE, device=DEVICE)

    def cache(self):
        return torch.randn(OWN + SPARE, BLOCK, HEADS, 2 * SIZE, device=DEVICE).transpose(1, 2)

    def layer(self, number):
        sides = {"num_heads": HEADS * GROUP, "head_size": SIZE, "num_kv_heads": HEADS}
        settings = {"alibi_slopes": None, "sliding_window": self.sliding, "kv_cache_dtype": "auto"}
        impl, one = WindowFlashImpl(scale=0.3, **sides, **settings), torch.ones(1)
        impl.vllm_flash_attn_version = 3
        scales = {"_q_scale": one, "_k_scale": one, "_v_scale": one}
        return SimpleNamespace(layer_name=f"layer.{number}", impl=impl, **scales), impl

    def plain(self):
        """vLLM's metadata; three rows of padding follow."""
        numbers = {"dtype": torch.int32, "device": DEVICE}
        return FlashAttentionMetadata(
            num_actual_tokens=self.rows,
            max_query_len=max(self.lengths),
            query_start_loc=torch.tensor(self.starts, **numbers),
            max_seq_len=max(self.totals()),
            seq_lens=torch.tensor(self.totals(), **numbers),
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
        output, metadata = torch.full_like(self.query, 7.0), self.plain()
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
