"""``kvtxn bench backends``: vLLM's Triton kernels add in one order, whatever the blocks' size."""

from __future__ import annotations

import pytest
import torch
from engine_jobs import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from interpreted import load
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    import triton
    from kvtxn.benchmarks.kernels import attention_backends, backends
    from kvtxn.benchmarks.kernels.attention_backends import LOADS, BackendCase

if ON_GPU:
    pytest.skip("measured there", allow_module_level=True)

OPS = "v1/attention/ops/"


def write(key, value, key_cache, value_cache, slots, *_):
    """vLLM's writer of rows; it asks for the GPU."""
    for row, cache in ((key, key_cache), (value, value_cache)):
        size = cache.shape[1]
        cache[slots // size, slots % size] = row


def write_latents(latents, rotary, cache, slots, **_):
    """vLLM's writer of latents, which has no CPU operator."""
    cache.flatten(0, 1)[slots] = torch.cat((latents, rotary), 1)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """vLLM's kernels through Triton's interpreter, and small models."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.mla import triton_mla

    helpers = (f"{OPS}triton_attention_helpers.py",)
    attend = load(f"{OPS}triton_unified_attention.py", helpers).unified_attention
    decode = load(f"{OPS}triton_decode_attention.py").decode_attention_fwd
    monkeypatch.setattr(triton_attn, "unified_attention", attend)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", write)
    monkeypatch.setattr(triton_mla, "triton", triton)
    monkeypatch.setattr(triton_mla, "decode_attention_fwd", decode)
    monkeypatch.setattr(type(current_platform), "num_compute_units", lambda *_: 4)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", write_latents)
    monkeypatch.setattr(attention_backends, "NUMBER", torch.float32)  # which it multiplies well
    monkeypatch.setattr(attention_backends, "HEADS", (4, 2, 32))
    monkeypatch.setattr(attention_backends, "LATENT", (4, 32, 16))


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "TRITON_MLA"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_sums_are_stocks(backend, block_size):
    """To the bit, with the drafts in spare slots; and not where they lie in their own."""
    case = BackendCase(backend, 2, 50, False, block_size, drafts=2)
    made = LOADS[backend](case, torch.device("cpu"), layers=2)
    assert backends.differences(made) == 0
    assert backends.differences(made) == 0
    made.ours = made.stock  # vLLM's own blocks, in which the drafts are forgotten
    made.one_row_blocks = lambda cache: cache
    assert backends.differences(made) == 2
