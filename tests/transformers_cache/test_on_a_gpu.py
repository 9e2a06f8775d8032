"""The same on a GPU, where "auto" takes the Triton executor."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import NEW_TOKENS, PROMPT, RecordedCache, drafting, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("policy", ["deferred", "undo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_lookup_equals_stock_on_a_gpu(models, kind, dtype, policy):
    """Tokens, logits, steps and bytes; in float32 the tokens of plain decoding too."""
    model = copy.deepcopy(models[kind]).to("cuda", dtype)
    settings = drafting(model, "lookup")
    stock, stock_steps = run(model, PROMPT.cuda(), **settings)
    cache = RecordedCache(
        model.config, max_tokens=PROMPT.shape[1] + NEW_TOKENS, max_drafts=8, policy=policy
    )
    ours, steps = run(model, PROMPT.cuda(), past_key_values=cache, **settings)
    assert cache.manager.executor.name == "triton"
    assert ours.sequences.tolist() == stock.sequences.tolist()
    assert len(ours.logits) == len(stock.logits)
    assert all(map(torch.equal, ours.logits, stock.logits))
    assert steps == stock_steps
    assert 0 < steps.accepted < steps.drafted
    assert all(after for _, after in cache.exact)
    assert policy == "undo" or all(before for before, _ in cache.exact)
    if dtype is torch.float32:
        plain, _ = run(model, PROMPT.cuda())
        assert ours.sequences.tolist() == plain.sequences.tolist()
