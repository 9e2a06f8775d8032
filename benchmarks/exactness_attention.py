"""How far FlashAttention is from a float64 reference, in its own blocks and where rows wait."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..backends.slot_tables import slot_tables
from ..integrations import vllm_internals as internals
from ..integrations.vllm_internals_gpu import by_rows

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
        wanted, stock, deferred = _outputs(requests, context, length, seed)
        scale = wanted.abs().max()
        row: dict[str, Any] = {"requests": requests, "context": context, "rows": length}
        for name, got in (("stock", stock), ("deferred", deferred)):
            error = (got.float() - wanted).abs()
            row[name] = {"max": float(error.max() / scale), "mean": float(error.mean() / scale)}
        rows.append(row | {"equal": bool(stock.equal(deferred))})
    return rows


def _outputs(requests: int, context: int, length: int, seed: int) -> tuple[Tensor, ...]:
    """The reference, one call over rows in their places, and one over drafts that wait."""
    torch.manual_seed(seed)
    on = {"device": "cuda", "dtype": torch.bfloat16}
    total = context + length
    blocks = -(-total // _BLOCK)
    own, spare = requests * blocks, -(-requests * length // _BLOCK)
    cache = torch.randn(own + spare, _BLOCK, _KV_HEADS, 2 * _SIZE, **on)  # type: ignore[call-overload]
    table = torch.randperm(own, device="cuda").int().view(requests, blocks)
    query = torch.randn(requests * length, _HEADS, _SIZE, **on)  # type: ignore[call-overload]
    keys, values = cache[table.long()].flatten(1, 2)[:, :total].split(_SIZE, -1)
    starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * length
    lens = torch.full((requests,), total, device="cuda", dtype=torch.int32)

    def attend(rows: Tensor, table: Tensor) -> Tensor:
        key, value = rows.split(_SIZE, -1)
        found: Tensor = internals.flash_attention().flash_attn_varlen_func(
            **{"q": query, "k": key, "v": value, "cu_seqlens_q": starts, "seqused_k": lens},
            **{"max_seqlen_q": length, "max_seqlen_k": total, "block_table": table},
            **{"softmax_scale": _SIZE**-0.5, "causal": True, "fa_version": 3},
        )
        return found

    stock = attend(cache, table)
    place = torch.arange(context, total, device="cuda")
    slots = (table[:, place // _BLOCK].long() * _BLOCK + place % _BLOCK).flatten()
    position = torch.arange(requests * length, device="cuda")
    position[starts[:-1].long()] = -1  # the last sampled tokens are no drafts
    by_slot, written = slot_tables(
        starts, lens, table, slots, position, spare=own * _BLOCK, block_size=_BLOCK, longest=total
    )
    flat = cache.flatten(0, 1)
    waiting = flat[slots]
    flat[slots] = flat[slots].flip(0)  # where drafts will be, something else is
    flat[written] = waiting
    paged = by_rows(cache.transpose(1, 2))
    assert paged is not None
    deferred = attend(paged.transpose(1, 2), by_slot)
    return _reference(query.view(requests, length, _HEADS, _SIZE), keys, values), stock, deferred


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
