"""Connectors that name blocks alone: whose they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.internals import connectors


def runner_of(tables, computed=0, **spec):
    """A V2 runner with requests that have these blocks by group."""
    told = {
        name: SimpleNamespace(tables=own, came=None, computed=computed)
        for name, own in tables.items()
    }
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4, **spec))
    return SimpleNamespace(
        kvtxn_requests=told, kv_cache_config=SimpleNamespace(kv_cache_groups=[group] * 2)
    )


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"sliding_window": 8}, [5, 6]),
        ({"sliding_window": 32}, [1, 2, 3, 4, 5, 6]),
        ({"attention_chunk_size": 16}, [6]),
    ],
    ids=str,
)
def test_blocks_that_left_a_window_are_others(spec, kept):
    """The runner's table keeps their numbers, and another request may have got them since."""
    runner = runner_of({"a": ([1, 2, 3, 4, 5, 6],)}, computed=20, **spec)
    moved = SimpleNamespace(store_gpu_blocks=[1, 2, 3, 4, 5, 6], load_gpu_blocks=[])
    (found,) = connectors.transfers(runner, moved).stores
    assert (found.blocks, found.begin) == (kept, 6 - len(kept))


def test_neighbouring_blocks_of_a_request_are_handed_over_together():
    """Of each request that has them, in each group; not across a gap, and none where none leave."""
    runner = runner_of({"a": ([1, 2, 3, 5], [7, 8]), "b": ([1, 2, 9],), "c": ([4],)})
    moved = SimpleNamespace(store_gpu_blocks=[1, 2, 5, 8], load_gpu_blocks=[])
    found = connectors.transfers(runner, moved)
    assert [(each.request, each.group, each.blocks, each.begin) for each in found.stores] == [
        ("a", "group.0", [1, 2], 0),
        ("a", "group.0", [5], 3),
        ("a", "group.1", [8], 1),
        ("b", "group.0", [1, 2], 0),
    ]
    assert found.loads == []
