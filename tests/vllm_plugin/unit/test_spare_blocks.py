"""Blocks behind vLLM's own, for drafts that wait, in caches as vLLM plans and allocates them."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace as Made

import pytest
import torch
from kernels_here import importing_kernels
from planned_caches import (
    GROUPS,
    OWN,
    PLANS,
    KVCacheLayout,
    allocated,
    cells,
    full,
    planned,
    sliding,
)

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.seam import gpu_cache_layout
    from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import layer_refs, waiting_rows
    from kvtxn.integrations.vllm_plugin.seam.layers import TargetLayer

    from kvtxn.errors import LayerError

ROWS = 13
EVERY = pytest.mark.parametrize(("layout", "groups", "kernel_size"), PLANS)


def test_what_vllm_plans_is_what_is_meant():
    """The layouts that FlashAttention's caches may have are among them, and smaller blocks."""
    ids = {each.id for each in PLANS}
    for layout in ("LBNHC", "LBHNC"):
        assert {f"{layout}-{name}-pages" for name in GROUPS} <= ids
    assert {f"BLNHC-{name}-pages" for name in GROUPS} <= ids
    assert {f"LBNHC-{name}-4" for name in GROUPS if name != "padded pages"} <= ids


def target(groups) -> list[tuple[int, list[str], int]]:
    """Groups with layers of the target: number, these layers, and rows of a block."""
    found = []
    for number, (names, spec) in enumerate(groups):
        own = [name for name in names.split() if not name.startswith("draft")]
        if own:
            found.append((number, own, spec.block_size))
    return found


def drafters(groups) -> set[str]:
    return {name for names, _ in groups for name in names.split() if name.startswith("draft")}


@EVERY
def test_caches_are_what_vllm_plans_for_more_blocks(layout, groups, kernel_size):
    """By as many as each group of the target's needs; what was given stays as it is."""
    config = planned(layout, groups)
    given = deepcopy(config)
    more, spare = gpu_cache_layout.with_spare_blocks(config, ROWS, drafters(groups))
    assert config == given
    assert more.kv_cache_groups == given.kv_cache_groups
    added = sum(-(-ROWS // size) for _, _, size in target(groups))
    assert (spare.own, spare.total, more.num_blocks) == (OWN, OWN + added, OWN + added)
    found = allocated(more, layout, kernel_size)
    wanted = allocated(planned(layout, groups, OWN + added), layout, kernel_size)
    before = allocated(config, layout, kernel_size)
    assert list(found) == list(wanted) == list(before)
    for name, cache in found.items():
        assert cache.shape == wanted[name].shape
        assert cache.shape[1:] == before[name].shape[1:]
        assert len(cache) * OWN == len(before[name]) * (OWN + added)
        assert cache.stride() == wanted[name].stride()
        assert cache.storage_offset() == wanted[name].storage_offset()
        assert cache.untyped_storage().nbytes() == wanted[name].untyped_storage().nbytes()


@EVERY
def test_rows_wait_where_nothing_else_is(layout, groups, kernel_size):
    """No block that vLLM hands out is there, and no other row that waits, of whatever layer.

    However small the blocks are that the attention counts.
    """
    more, spare = gpu_cache_layout.with_spare_blocks(
        planned(layout, groups), ROWS, drafters(groups)
    )
    caches = allocated(more, layout, kernel_size)
    assert set(spare.first) == {f"group.{number}" for number, _, _ in target(groups)}
    handed_out = []
    for cache in caches.values():
        begin = spare.begin(cache)
        assert begin == len(cache) // spare.total * OWN
        handed_out.append(cells(cache, torch.arange(begin * cache.shape[2])).flatten())
    waiting = []
    for number, names, size in target(groups):
        slots = spare.first[f"group.{number}"] + torch.arange(ROWS)
        assert slots.max() < spare.total * size
        waiting += [cells(caches[name], slots).flatten() for name in names]
    waiting = torch.cat(waiting)
    assert len(waiting.unique()) == len(waiting)
    assert not torch.isin(waiting, torch.cat(handed_out)).any()


@EVERY
def test_layers_of_a_group_do_not_overlap(layout, groups, kernel_size):
    """Their regions have all moved by as much as they grew."""
    more, _ = gpu_cache_layout.with_spare_blocks(planned(layout, groups), ROWS, drafters(groups))
    caches = allocated(more, layout, kernel_size)
    for names, _ in groups:
        found = [
            cells(caches[name], torch.arange(caches[name].shape[0] * caches[name].shape[2]))
            for name in names.split()
        ]
        places = torch.cat([each.flatten() for each in found])
        assert len(places.unique()) == len(places)


def test_kernels_may_count_smaller_blocks():
    """Four to one of vLLM's."""
    spare = gpu_cache_layout.SpareBlocks(own=7, total=9, first={})
    assert spare.begin(torch.empty(4 * 9, 2, 2, 4)) == 4 * 7


@pytest.mark.parametrize("name", ["size", "offset", "layer_stride"])
def test_a_layout_that_is_not_by_blocks_is_refused(name):
    """A cache of another size than whole blocks is refused, and stays unchanged."""
    config = planned(KVCacheLayout.LBNHC, GROUPS["one group"])
    setattr(config.kv_cache_tensors[0], name, getattr(config.kv_cache_tensors[0], name) + 2)
    given = deepcopy(config)
    with pytest.raises(LayerError, match=rf"{name} of a KVCacheTensor a multiple of 7 blocks"):
        gpu_cache_layout.with_spare_blocks(config, ROWS, set())
    assert config == given


@EVERY
def test_blocks_of_one_row(layout, groups, kernel_size):
    """By slot they are what plain indexing finds; there are none if rows lie unevenly."""
    for cache in allocated(planned(layout, groups), layout, kernel_size).values():
        rows = gpu_cache_layout.by_rows(cache)
        blocks, heads, size, width = cache.shape
        there = cells(cache, torch.arange(blocks * size))
        assert (rows is not None) == (len(there[:, 0].diff().unique()) == 1)
        if rows is not None:
            assert rows.shape == (blocks * size, heads, 1, width)
            assert cells(rows, torch.arange(blocks * size)).equal(there)


@pytest.mark.parametrize(
    ("groups", "layout", "even"),
    [
        ([("a b", full(heads=1))], KVCacheLayout.LBHNC, True),  # nothing lies between its rows
        ([("a b", full())], KVCacheLayout.LBNHC, True),  # FlashAttention's
        ([("a b", full())], KVCacheLayout.LBHNC, False),
        ([("a", full())], KVCacheLayout.BLNHC, True),
        ([("a b", full())], KVCacheLayout.BLNHC, False),
        ([("a b", full(page_size_padded=512))], KVCacheLayout.LBNHC, False),
        ([("a b", full()), ("c", sliding())], KVCacheLayout.LBNHC, True),
    ],
)
def test_what_is_even_depends_on_strides_alone(groups, layout, even):
    caches = allocated(planned(layout, groups), layout)
    assert {gpu_cache_layout.by_rows(cache) is not None for cache in caches.values()} == {even}


def test_latent_rows_are_blocks_of_one_row():
    """Where they follow each other evenly; in memory that several layers share they do not."""
    whole = torch.arange(4 * 2 * 16 * 24).view(4, 2, 16, 24)
    even, uneven = whole.view(8, 16, 24), whole[:, 0]
    rows = gpu_cache_layout.by_rows(even)
    assert rows is not None
    assert rows.equal(even.reshape(128, 1, 24))
    assert rows.data_ptr() == even.data_ptr()
    assert gpu_cache_layout.by_rows(uneven) is None


@pytest.mark.parametrize(
    ("layout", "kernel_size"), [("LBNHC", None), ("LBNHC", 4), ("LHBNC", None)]
)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16, "auto"), (torch.uint8, "fp8")])
def test_waiting_rows_are_those_of_the_slots(layout, kernel_size, dtype, kv_dtype):
    """From the first one on, across blocks, and the cache's own memory."""
    layout = KVCacheLayout[layout]
    module = Made(_k_scale_float=0.5, _v_scale_float=0.25)
    for name, cache in allocated(planned(layout, GROUPS["one group"]), layout, kernel_size).items():
        cache = cache.view(dtype)
        blocks, heads, size, width = cache.shape
        layer = TargetLayer(name, "group.0", module, None, cache, (heads, width // 2), dtype)
        [ref] = layer_refs([layer], kv_dtype)
        first = blocks * size - ROWS - 1
        for plane, part in zip(waiting_rows(ref, first, ROWS), (0, width // 2), strict=True):
            assert plane.shape == (ROWS, heads, width // 2)
            for row in range(ROWS):
                slot, value = first + row, float(row + 1)
                cache.zero_()
                plane.view(dtype)[row] = value
                written = cache[slot // size, :, slot % size, part : part + width // 2]
                assert bool((written == value).all())
                assert int((cache != 0).sum()) == written.numel()
