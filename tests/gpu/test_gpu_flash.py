"""vLLM's own FlashAttention 3 over rows that wait: the same bits as over rows in their places."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from gpu_jobs import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from kvtxn.backends.graphs.slot_block_table import slot_tables
from kvtxn.integrations.vllm_plugin.seam import backends
from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import by_rows
from vllm._custom_ops import reshape_and_cache_flash

#: Rows of each request after the step, and its rows of the step.
BATCHES = {
    "one": ([1030], [5]),
    "short": ([17, 6, 5], [5, 5, 5]),
    "uneven": ([1030, 40, 2000, 8190], [5, 5, 3, 5]),
    "many": ([1000 + 7 * i for i in range(32)], [5] * 32),
    "prompts": ([1030, 40, 700, 333], [5, 5, 1, 300]),
    "wide": ([900] * 64, [5] * 64),
}
#: Query heads, KV heads, head size.
SHAPES = [(32, 8, 128), (14, 2, 64), (8, 4, 256), (8, 1, 128)]


@pytest.mark.parametrize(
    ("batch", "block_size"),
    # Of large blocks FlashAttention reads a prompt otherwise.
    [(b, size) for b in BATCHES for size in (16, 32, 128) if size < 128 or b != "prompts"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_layers(batch, shape, block_size):
    """For all head counts and lengths."""
    assert differences(batch, shape, block_size) == []


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("more", ["sliding", "capped", "sinks", "fp8"])
def test_other_layers(batch, more):
    """Sliding windows, soft caps, attention sinks and 8-bit rows give equal bits, too."""
    assert differences(batch, (32, 8, 128), 16, more) == []


def differences(
    batch: str, shape: tuple[int, int, int], block_size: int, more: str = ""
) -> list[str]:
    """Attend over a cache with all rows in their slots, and over one whose drafts wait.

    Returns what is not as it should be, by the number of splits: attention with other bits, and
    slots that were written although their rows wait, or were not although theirs do not.
    """
    made = torch.Generator("cuda").manual_seed(5)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=made, device="cuda").to(torch.bfloat16)

    (totals, lengths), (heads, kv_heads, size) = BATCHES[batch], shape
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    wide = -(-9000 // block_size)
    counts = [-(-total // block_size) for total in totals]
    spare = sum(counts) * block_size
    cache = noise(sum(counts) + -(-starts[-1] // block_size), block_size, kv_heads, 2 * size)
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    blocks, free = torch.zeros(len(totals), wide, **numbers), torch.randperm(sum(counts)).tolist()
    slots, waits = [], torch.full((starts[-1],), -1, device="cuda")
    for r, (first, last) in enumerate(pairwise(starts)):
        own = [free.pop() for _ in range(counts[r])]
        blocks[r, : counts[r]] = torch.tensor(own)
        places = range(totals[r] - lengths[r], totals[r])
        slots += [own[place // block_size] * block_size + place % block_size for place in places]
        if lengths[r] < 9:  # a prompt has no drafts
            waits[first + 1 : last] = torch.arange(first + 1, last)
    query, (key, value) = noise(starts[-1], heads, size), noise(2, starts[-1], kv_heads, size)
    if more == "fp8":
        cache, query = cache.to(torch.float8_e4m3fn), query.to(torch.float8_e4m3fn)
    cu_starts, lens = torch.tensor(starts, **numbers), torch.tensor(totals, **numbers)
    own_slots = torch.tensor(slots, device="cuda")
    table, written = slot_tables(
        *(cu_starts, lens, blocks, own_slots, waits),
        spare=spare,
        block_size=block_size,
        longest=max(totals),
    )
    flash, one = backends.flash_module(), torch.ones(1, device="cuda")
    window = (200, 0) if more == "sliding" else (-1, -1)

    def run(rows: torch.Tensor, where: torch.Tensor, table: torch.Tensor, splits: int) -> Any:
        given = rows.view(torch.uint8) if more == "fp8" else rows
        parts = given.split(size, -1)
        dtype = "fp8" if more == "fp8" else "auto"
        reshape_and_cache_flash(key, value, *parts, where, dtype, one, one)
        page_size = block_size
        if table.shape[1] > wide:
            page_size = 1
            paged = by_rows(rows.transpose(1, 2))
            assert paged is not None
            rows = paged.transpose(1, 2)
        schedule = flash.get_scheduler_metadata(
            **{"batch_size": len(totals), "max_seqlen_q": max(lengths), "causal": True},
            **{"max_seqlen_k": max(totals), "num_heads_q": heads, "num_heads_kv": kv_heads},
            **{"headdim": size, "cache_seqlens": lens, "qkv_dtype": query.dtype},
            **{"cu_seqlens_q": cu_starts, "page_size": page_size, "window_size": window},
            num_splits=splits,
        )
        scales = one.expand(len(totals), kv_heads) if more == "fp8" else None
        k, v = rows.split(size, -1)
        return flash.flash_attn_varlen_func(
            **{"q": query, "k": k, "v": v, "cu_seqlens_q": cu_starts, "seqused_k": lens},
            **{"max_seqlen_q": max(lengths), "max_seqlen_k": max(totals), "causal": True},
            **{"softmax_scale": size**-0.5, "window_size": list(window), "block_table": table},
            **{"softcap": 30.0 if more == "capped" else 0.0, "num_splits": splits},
            **{"q_descale": scales, "k_descale": scales, "v_descale": scales},
            s_aux=noise(heads) if more == "sinks" else None,
            scheduler_metadata=schedule if splits else None,
            fa_version=3,
        )

    found = []
    for splits in (0, 1, 32):
        stock, ours = cache.clone(), cache.clone()
        state = made.get_state()
        wanted = run(stock, own_slots, blocks, splits)
        made.set_state(state)
        if not run(ours, written, table, splits).equal(wanted):
            found.append(f"{splits} splits: other bits")
        there = [slot for slot, waiting in zip(slots, waits.tolist(), strict=True) if waiting < 0]
        changed = (ours.view(torch.uint8) != cache.view(torch.uint8)).flatten(2).any(2).flatten()
        if changed[:spare].nonzero().flatten().tolist() != sorted(there):
            found.append(f"{splits} splits: other slots are written")
    return found
