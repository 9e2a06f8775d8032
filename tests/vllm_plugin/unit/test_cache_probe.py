"""The layout probe, against writers whose packing is known; no engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.cpu.cache_layout import layer_refs, probe
from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

from kvtxn import LayerError

SHAPE = (2, 8, 2, 16)  # keys and values, block size, heads, head size
SIZE, HEADS, WIDTH = SHAPE[1:]


def transposed(block, key, value):
    """K as ``[heads, head_size, block_size]``, V as plain rows: vLLM's vec kernels."""
    block[:, : SIZE * WIDTH] = key.permute(1, 2, 0).reshape(HEADS, -1).to(block.dtype)
    block[:, SIZE * WIDTH :] = value.permute(1, 0, 2).reshape(HEADS, -1).to(block.dtype)


def interleaved(block, key, value):
    """Pairs of elements of several rows next to each other, as matrix units want them."""
    both = torch.stack([key, value]).view(2, SIZE, HEADS, WIDTH // 2, 2)
    block.copy_(both.permute(2, 0, 3, 1, 4).reshape(HEADS, -1))


@pytest.mark.parametrize("writer", [transposed, interleaved])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_finds_every_element(writer, dtype):
    """Elements read through the table are those that the writer wrote."""
    block = torch.zeros(HEADS, 2 * SIZE * WIDTH, dtype=torch.float32).to(dtype)

    def write(key, value):
        filled = torch.zeros(block.shape)
        writer(filled, key, value)
        block.copy_(filled.to(dtype))

    table = probe(write, block, SHAPE, torch.float32)
    numbers = torch.randint(0, 9, SHAPE).float()
    write(*numbers)
    assert torch.equal(block.view(-1)[table].float(), numbers)
    assert sorted(table.flatten().tolist()) == list(range(block.numel()))


@pytest.mark.parametrize("fault", ["lost", "twice", "shared"])
def test_refuses_what_is_no_bijection(fault):
    """Rows that share elements, or have some nowhere or twice, cannot be addressed."""
    block = torch.zeros(HEADS, 2 * SIZE * WIDTH + 4)

    def write(key, value):
        transposed(block[:, : 2 * SIZE * WIDTH], key, value)
        if fault == "lost":
            block[0, 5] = 0
        elif fault == "twice":
            block[0, -1] = block[0, 0]
        else:
            block[0, 5] = block[0, 6]

    with pytest.raises(LayerError, match="one element per place"):
        probe(write, block, SHAPE, torch.float32)


def latent_layer(write, dtype=torch.float32):
    """A stand-in for a layer of latent rows that ``write(cache, rows, slots)`` stores."""
    impl = SimpleNamespace(
        kv_lora_rank=16,
        do_kv_cache_update=lambda first, second, cache, slots, *_: write(
            cache, torch.cat([first, second.squeeze(1)], 1), slots
        ),
    )
    module = SimpleNamespace(kv_cache_dtype="auto", _k_scale=None)
    cache = torch.zeros(3, SIZE, 24, dtype=dtype)
    return TargetLayer("latent", "group.0", module, impl, cache, (24,), dtype)


def test_latent_rows_as_they_are():
    def plain(cache, rows, slots):
        cache.view(-1, 24)[slots] = rows

    [ref] = layer_refs([latent_layer(plain)], "auto")
    assert ref.is_latent
    assert ref.planes[0].offsets is None
    assert ref.num_slots == 3 * SIZE


def test_packed_latent_rows_are_refused():
    def packed(cache, rows, slots):
        cache.view(-1, 24, SIZE)[0].T[slots] = rows

    with pytest.raises(LayerError, match="latent rows of 'latent' are packed"):
        layer_refs([latent_layer(packed)], "auto")
