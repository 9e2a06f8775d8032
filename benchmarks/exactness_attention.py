"""How far split attention and FlashAttention's one call are from a float64 reference."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..backends.attention_launch import AttentionLauncher
from ..backends.attention_shapes import Prefix
from ..executor import AttentionArgs
from ..integrations import vllm_internals as internals
from ..layers import LayerRef
from ..layout import RowLayout

#: Requests, rows before the window, rows of the window.
CASES: Final = (
    (1, 17, 5), (1, 1024, 5), (1, 8192, 5), (8, 1024, 5), (32, 1024, 5), (64, 1024, 5),
    (8, 8192, 5), (32, 1024, 2), (32, 1024, 9),
)  # fmt: skip

_HEADS, _KV_HEADS, _SIZE, _BLOCK = 32, 8, 128, 16


def measure(seed: int = 0) -> list[dict[str, Any]]:
    """Errors in bf16 of both, at each of ``CASES``; relative to the largest value of the result."""
    rows = []
    for requests, context, length in CASES:
        wanted, stock, split = _outputs(requests, context, length, seed)
        scale = wanted.abs().max()
        row: dict[str, Any] = {"requests": requests, "context": context, "rows": length}
        for name, got in (("stock", stock), ("split", split)):
            error = (got.float() - wanted).abs()
            row[name] = {"max": float(error.max() / scale), "mean": float(error.mean() / scale)}
        rows.append(row)
    return rows


def _outputs(requests: int, context: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """The reference, one causal call over everything, and prefix merged with fresh rows."""
    torch.manual_seed(seed)
    on = {"device": "cuda", "dtype": torch.bfloat16}
    total = context + length
    blocks = -(-total // _BLOCK)
    cache = torch.randn(requests * blocks, _KV_HEADS, _BLOCK, 2 * _SIZE, **on)  # type: ignore[call-overload]
    key_cache, value_cache = cache.transpose(1, 2).split(_SIZE, -1)
    table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
    query = torch.randn(requests * length, _HEADS, _SIZE, **on)  # type: ignore[call-overload]
    keys, values = (
        side[table.long()].flatten(1, 2)[:, :total] for side in (key_cache, value_cache)
    )
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * length
    lens = torch.full((requests,), total, device="cuda", dtype=torch.int32)
    flash = internals.flash_attention().flash_attn_varlen_func
    shared: dict[str, Any] = {
        "q": query, "k": key_cache, "v": value_cache, "cu_seqlens_q": starts,
        "max_seqlen_q": length, "max_seqlen_k": total, "softmax_scale": _SIZE**-0.5,
        "block_table": table, "fa_version": 3,
    }  # fmt: skip
    stock = flash(**shared, seqused_k=lens, causal=True)
    out, lse = flash(**shared, seqused_k=lens - length, causal=False, return_softmax_lse=True)
    layout = RowLayout.build((length - 1,) * requests, (1,) * requests, query.device)
    fresh = tuple(side[:, context:].reshape(-1, _KV_HEADS, _SIZE) for side in (keys, values))
    split = AttentionLauncher(query.device).merge(
        layout,
        LayerRef("layer", key_cache, value_cache),
        query,
        fresh,
        Prefix.single(out, lse),
        AttentionArgs(block_table=table, seq_lens=lens, scale=_SIZE**-0.5),
    )
    return _reference(query.view(requests, length, _HEADS, _SIZE), keys, values), stock, split


def _reference(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention in float64, rounded to float32: ``[requests * length, heads, size]``."""
    length, total = query.shape[1], keys.shape[1]
    hidden = torch.ones(length, total, dtype=torch.bool, device=query.device)
    hidden = hidden.triu(total - length + 1)
    found = []
    for q, k, v in zip(query.double(), keys.double(), values.double(), strict=True):
        k, v = (side.repeat_interleave(_HEADS // _KV_HEADS, 1) for side in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(_SIZE)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(found).float()


def main() -> None:
    """``python -m kvtxn.benchmarks.exactness_attention RESULT``."""
    Path(sys.argv[1]).write_text(json.dumps(measure()))


if __name__ == "__main__":
    main()
