"""The oracle of states finds rows where vLLM's own writer puts them, however a CPU packs them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from engine_jobs import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from state_oracle import places, storage_bytes, words

PACKINGS = ("vec", "vec16", "amx") if torch.cpu._is_amx_tile_supported() else ("vec", "vec16")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [32, 96])
def test_rows_are_found_where_vllm_writes_them(packing, size):
    """Of two heads, in one block of three, of a cache that begins within its memory."""
    from vllm import _custom_ops

    memory = torch.zeros(4, 2, size, 128, dtype=torch.bfloat16)
    cache = memory[1:]
    rows, slots = torch.randn(2, 3, 2, 64).bfloat16(), torch.tensor([1, 17, size - 1]) + size
    parts = cache.view(3, 2, 2 * size, 64).chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(*rows, *parts, slots, packing)
    where = places(SimpleNamespace(kv_cache=cache, isa=packing), slots)
    held = storage_bytes(cache).view(torch.int16)
    assert torch.equal(held[where], words(rows.transpose(0, 1).contiguous()))
    held[where] = 0
    assert not held.any()


def test_another_packing_is_refused():
    layer = SimpleNamespace(kv_cache=torch.zeros(1, 1, 32, 64), isa="neon")
    with pytest.raises(AssertionError, match="another packing"):
        places(layer, torch.tensor([0]))
