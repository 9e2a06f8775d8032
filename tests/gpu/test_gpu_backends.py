"""vLLM's Triton attention and its latent attention over rows that wait: the same bits as in place.

``kvtxn bench backends`` compares large batches; here are other shapes of heads, and what layers add
to their scores. ``tests/benchmarks/test_bench_backends.py`` shows that the comparison can fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_jobs import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from kvtxn.benchmarks.kernels import attention_backends
from kvtxn.benchmarks.kernels.attention_backends import LOADS, BackendCase
from kvtxn.benchmarks.kernels.backends import BACKENDS, differences

KINDS = [
    (name, fp8) for name, eight in BACKENDS.items() for fp8 in (False, True) if eight or not fp8
]
#: Query heads, KV heads, head size; and query heads, width of a latent, of its rotary part.
HEADS = [(32, 8, 128), (14, 2, 64), (8, 4, 256), (8, 1, 128)]
LATENTS = [(16, 512, 64), (128, 512, 64)]
#: What a layer with TRITON_ATTN may add, as attributes of vLLM's attention.
MORE: dict[str, dict[str, Any]] = {
    "sliding": {"sliding_window": (199, 0)},
    "capped": {"logits_soft_cap": 30.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 32, dtype=torch.bfloat16, device="cuda")},
    "ALiBi": {"alibi_slopes": torch.linspace(0.01, 0.5, 32, device="cuda")},
}


def load(name: str, requests: int, context: int, *, fp8: bool = False, block: int = 16) -> Any:
    """Two layers, and a step of five rows per request."""
    case = BackendCase(name, requests, context, fp8, block)
    return LOADS[name](case, torch.device("cuda"), layers=2)


@pytest.mark.parametrize(("name", "fp8"), KINDS)
@pytest.mark.parametrize(("requests", "context"), [(1, 12), (3, 1030), (32, 700)])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_batches_and_blocks(name, fp8, requests, context, block):
    """Short and long requests, whatever the size of vLLM's own blocks."""
    assert differences(load(name, requests, context, fp8=fp8, block=block)) == 0


@pytest.mark.parametrize("heads", HEADS)
def test_shapes_of_heads(heads, monkeypatch):
    """Groups of query heads that are no power of two, large heads, one KV head."""
    monkeypatch.setattr(attention_backends, "HEADS", heads)
    assert differences(load("TRITON_ATTN", 3, 1030)) == 0


@pytest.mark.parametrize("name", ["TRITON_MLA", "FLASH_ATTN_MLA"])
@pytest.mark.parametrize("latent", LATENTS)
def test_shapes_of_latents(name, latent, monkeypatch):
    """Few heads, as of a model on several GPUs, and all of DeepSeek-V3's."""
    monkeypatch.setattr(attention_backends, "LATENT", latent)
    assert differences(load(name, 3, 1030)) == 0


@pytest.mark.parametrize("more", MORE)
def test_what_layers_add(more):
    """Sliding windows, soft caps, attention sinks and slopes see a row's place, not its slot."""
    made = load("TRITON_ATTN", 3, 1030)
    plain = made.blocks()[0].clone()
    vars(made.own).update(MORE[more])
    assert not made.blocks()[0].equal(plain)
    assert differences(made) == 0
