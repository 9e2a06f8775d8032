"""One call for drafts and all else, over vLLM's own FlashAttention: each sees what it should.

Prefixes may be shorter than a request's rows, so that some rows see nothing in the call itself.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from gpu_jobs import missing

from kvtxn import LayerRef
from kvtxn.executor import AttentionArgs
from kvtxn.layout import RowLayout

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

import vllm.vllm_flash_attn  # noqa: F401  # its operators
from kvtxn.backends.attention_launch import AttentionLauncher
from kvtxn.backends.attention_shapes import Keep, Tail
from kvtxn.integrations import vllm_internals_gpu as inside

BLOCK, HEADS, GROUP, SIZE, SCALE = 16, 8, 4, 128, 0.09
OPERATORS = {2: "varlen_fwd", 3: "fwd"}
BEFORE, LENGTHS, DRAFTS = [1, 2, 3, 4, 5, 33, 700, 0, 90], [5, 5, 3, 5, 5, 2, 5, 40, 1], 7


def softmax(query, key, value):
    """Causal attention in float64 of rows that are the last of their keys'."""
    key, value = (each.double().repeat_interleave(GROUP, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * SCALE
    rows, keys = scores.shape[1:]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=key.device).triu(keys - rows + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("splits", [0, 1])
def test_one_call_for_all(version, splits):
    """The first requests have drafts; the last two are a prompt and a plain decode row."""
    if not hasattr(getattr(torch.ops, f"_vllm_fa{version}_C"), OPERATORS[version]):
        pytest.skip(f"FlashAttention {version} is not in this build")
    made = torch.Generator("cuda").manual_seed(5)

    def noise(*shape):
        return torch.randn(shape, generator=made, device="cuda").to(torch.bfloat16)

    count, most = len(BEFORE), max(BEFORE) // BLOCK + 4
    cache = noise(count * most, HEADS, BLOCK, 2 * SIZE) * 20  # what nobody should see
    ref = LayerRef("layer", *cache.transpose(1, 2).split(SIZE, -1))
    starts = [sum(LENGTHS[:number]) for number in range(count + 1)]
    query, key, value = noise(starts[-1], HEADS * GROUP, SIZE), *noise(2, starts[-1], HEADS, SIZE)
    wanted = torch.empty_like(query, dtype=torch.float64)
    for number, ((first, last), past) in enumerate(zip(pairwise(starts), BEFORE, strict=True)):
        rows = torch.cat([noise(past, HEADS, 2 * SIZE), torch.cat([key, value], -1)[first:last]])
        wanted[first:last] = softmax(query[first:last], *rows.split(SIZE, -1))
        there = rows if number >= DRAFTS else rows[:past]  # drafts are not in the cache
        at = torch.arange(len(there), device="cuda")
        cache[number * most + at // BLOCK, :, at % BLOCK] = there
    numbers = {"dtype": torch.int32, "device": "cuda"}
    totals = [past + length for past, length in zip(BEFORE, LENGTHS, strict=True)]
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor(starts, **numbers),
        seq_lens=torch.tensor(totals, **numbers),
        block_table=torch.arange(count * most, **numbers).view(count, most),
        max_query_len=max(LENGTHS),
        max_seq_len=max(totals),
        max_num_splits=splits,
    )
    keys = torch.tensor([*BEFORE[:DRAFTS], *totals[DRAFTS:]], **numbers)
    impl = SimpleNamespace(
        **{"scale": SCALE, "logits_soft_cap": 0.0, "vllm_flash_attn_version": version},
        **{"num_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_size": SIZE},
    )
    output = torch.empty_like(query)
    requests = inside.FlashRequests.following(metadata, 0, keys)
    lse = requests.attend(impl, ref, (-1, -1), query, output)
    drafts = tuple(length - 1 for length in LENGTHS[:DRAFTS])
    layout = RowLayout.build(drafts, (1,) * DRAFTS, torch.device("cuda"))
    room = torch.empty_like(key), torch.empty_like(value)
    AttentionLauncher(layout.position.device).merge_into(
        *(layout, ref, query, (key, value), output, lse),
        AttentionArgs(block_table=metadata.block_table, seq_lens=metadata.seq_lens, scale=SCALE),
        Keep(None, layout.position, room),
        Tail(metadata.seq_lens, metadata.block_table),
    )
    assert (output - wanted).abs().max() < 0.04  # the largest is 3.3, in bfloat16
