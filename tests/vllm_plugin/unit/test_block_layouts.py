"""What other processes may have in common: the layout of a block, whatever caches they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam import connectors

from kvtxn.audit import Key

KEY = Key.new()
BLOCK = 2, 4, 2, 8


def runner_of(cache, blocks):
    """A runner with one layer, whose cache has so many blocks."""
    groups = [SimpleNamespace(layer_names=["x"])]
    layers = {"x": SimpleNamespace(kv_cache=cache)}
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def k_beside_v(blocks):
    return torch.zeros(blocks, *BLOCK)


def k_apart_from_v(blocks):
    return torch.zeros(2, blocks, *BLOCK[1:])


def heads_first(blocks):
    return torch.zeros(blocks, 2, 2, 4, 8).transpose(2, 3)


def larger_pages(blocks):
    return torch.zeros(blocks, 3, *BLOCK[1:])[:, :2]


def padded_rows(blocks):
    return torch.zeros(blocks, *BLOCK[:-1], 9)[..., :8]


LAYOUTS = [k_beside_v, k_apart_from_v, larger_pages, padded_rows]


def known_of(cache, blocks):
    """The layout of a cache, and the checksum of a block that has the same values in each."""
    runner = runner_of(cache, blocks)
    block = cache.movedim(connectors._block_dimension(cache, blocks), 0)[3]
    block.copy_(torch.arange(block.numel()).view(block.shape))
    sums = connectors.BlockBytes(runner, KEY).checksums("group.0", [3])
    return connectors.block_layout(runner, "group.0"), sums.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("blocks", [5, 9])
def test_engines_with_other_numbers_of_blocks_know_each_others(layout, blocks):
    """As engines beside each other, or with other memory, have; or with other padding."""
    assert known_of(layout(blocks), blocks) == known_of(k_beside_v(7), 7)


def test_the_order_of_a_blocks_bytes_tells_layouts_apart():
    (layout, sums), (other, others) = (known_of(make(5), 5) for make in (k_beside_v, heads_first))
    assert layout != other
    assert sums != others


def test_a_cache_of_many_runs_has_the_same_order():
    """Whatever order a cache has in memory, padding does not change it."""
    padded = torch.zeros(5, 2, 2, 4, 9)[..., :8].transpose(2, 3)
    assert known_of(padded, 5) == known_of(heads_first(7), 7)
