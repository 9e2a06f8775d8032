"""Rows in the caches of vLLM's GPU backends are found where each layout's rule puts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import layer_refs
    from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

BLOCKS, HEADS, SIZE, WIDTH, LAYERS = 4, 2, 8, 16, 3


def layer(cache, row_shape, dtype=torch.bfloat16) -> TargetLayer:
    """A target layer over a cache."""
    module = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=0.25)
    return TargetLayer("layer", "group.0", module, None, cache, row_shape, dtype)


def heads_first(dtype):
    """One tensor per layer, the rows of a head together (FLASH_ATTN, TRITON_ATTN, FLASHINFER)."""
    return torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=dtype)


def tokens_first(dtype):
    """The heads of a row together (FLEX_ATTENTION, and FLASHINFER where it is told to)."""
    return torch.zeros(BLOCKS, SIZE, HEADS, 2 * WIDTH, dtype=dtype).transpose(1, 2)


def layers_inside(dtype):
    """All layers of a block together, as connectors like it."""
    return torch.zeros(BLOCKS, LAYERS, HEADS, SIZE, 2 * WIDTH, dtype=dtype)[:, 1]


@pytest.mark.parametrize("layout", [heads_first, tokens_first, layers_inside])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16, "auto"), (torch.uint8, "fp8")])
def test_keys_and_values_of_a_slot(layout, dtype, kv_dtype):
    """vLLM's writers: ``cache[block, head, offset]`` is a row's keys, then its values."""
    cache = layout(dtype)
    [ref] = layer_refs([layer(cache, (HEADS, WIDTH))], kv_dtype)
    assert [plane.row_shape for plane in ref.planes] == [(HEADS, WIDTH)] * 2
    for slot in (0, 5, SIZE, BLOCKS * SIZE - 1):
        cache.zero_()
        cache[slot // SIZE, :, slot % SIZE, :WIDTH] = 1
        cache[slot // SIZE, :, slot % SIZE, WIDTH:] = 2
        found = [plane.cells[plane.index(torch.tensor([slot]))] for plane in ref.planes]
        words = [plane.cells.new_zeros(()) for plane in ref.planes]
        for plane, cells, value in zip(ref.planes, found, (1, 2), strict=True):
            assert torch.equal(cells.view(dtype), torch.full_like(cells.view(dtype), value))
            cells_of_others = int((plane.cells != words[0]).sum()) - cells.numel()
            assert cells_of_others == 0
    if kv_dtype == "fp8":
        assert [float(plane.format.scale) for plane in ref.planes] == [0.5, 0.25]


@pytest.mark.parametrize("size", [SIZE, 64])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16, "auto"), (torch.uint8, "fp8")])
def test_the_latent_of_a_slot(size, dtype, kv_dtype):
    """TRITON_MLA, FLASH_ATTN_MLA, and FLASHMLA with its blocks of 64."""
    cache = torch.zeros(BLOCKS, size, 3 * WIDTH, dtype=dtype)
    [ref] = layer_refs([layer(cache, (3 * WIDTH,))], kv_dtype)
    [plane] = ref.planes
    assert (plane.part, plane.row_shape, plane.block_size) == ("latent", (3 * WIDTH,), size)
    slot = 2 * size + 3
    cache[2, 3] = 1
    cells = plane.cells[plane.index(torch.tensor([slot]))]
    assert int((plane.cells != 0).sum()) == cells.numel() == 3 * WIDTH
