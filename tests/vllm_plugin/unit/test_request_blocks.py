"""Whose a block is, by what the scheduler tells a runner; and connectors that name blocks alone."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.seam import connectors
from kvtxn.integrations.vllm_plugin.seam.request_blocks import RequestBlocks
from transfer_rig import scheduled


@pytest.fixture
def requests():
    """Requests "a", with five blocks in a sliding window and one in another group, and "b"."""
    requests = RequestBlocks()
    requests.hear(scheduled(new=[came("a", [1, 2, 3], [7])]))
    requests.hear(scheduled(grown=[("a", ([4, 5], []))], new=[came("b", [6], [8])]))
    return requests


def came(name, *tables):
    """A request that comes with these blocks by group."""
    return name, SimpleNamespace(block_ids=tables)


def owners(requests, *blocks):
    return [requests.owner(block) for block in blocks]


def test_each_block_has_its_request_group_and_column(requests):
    found = owners(requests, 1, 5, 7, 6, 8)
    assert found == [("a", 0, 0), ("a", 0, 4), ("a", 1, 0), ("b", 0, 0), ("b", 1, 0)]
    assert owners(requests, 0, 9) == [None, None]
    assert requests.tables("a") == [[1, 2, 3, 4, 5], [7]]


def test_a_block_that_left_a_window_is_the_next_request_s_once_it_has_it(requests):
    """The table of the one before goes on naming it; a prefix may begin with null blocks."""
    requests.hear(scheduled(new=[came("c", [0, 0, 9, 2], [10])]))
    assert owners(requests, 1, 2, 3) == [("a", 0, 0), ("c", 0, 3), ("a", 0, 2)]
    assert requests.tables("a")[0] == [1, 2, 3, 4, 5]
    assert requests.owner(0) is None


def test_a_block_may_go_on_in_another_group(requests):
    requests.hear(scheduled(grown=[("b", ([], [2]))]))
    assert requests.owner(2) == ("b", 1, 1)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_request_that_was_put_back_has_its_rows_until_others_get_the_blocks(requests, runner):
    """To the V1 runner it comes again as a running one, to the V2 runner as a new one."""
    requests.hear(scheduled(preempted={"a"}, grown=[("b", ([1], []))]))
    assert owners(requests, 1, 2, 7) == [("b", 0, 1), ("a", 0, 1), ("a", 1, 0)]
    assert not requests.tables("a")
    if runner == "v1":
        requests.hear(scheduled(resumed=[("a", ([2, 9], [10]))]))
    else:
        requests.hear(scheduled(new=[came("a", [2, 9], [10])]))
    assert owners(requests, 1, 2, 9, 3) == [("b", 0, 1), ("a", 0, 0), ("a", 0, 1), ("a", 0, 2)]
    assert requests.tables("a") == [[2, 9], [10]]


def test_blocks_of_a_request_that_ended_are_its_own_until_others_get_them(requests):
    """Its store may be pending, and a connector may store what is about to be evicted."""
    requests.hear(scheduled(gone=["a"]))
    assert owners(requests, 1, 7) == [("a", 0, 0), ("a", 1, 0)]
    assert (requests.tables("a"), requests.content("a")) == ((), None)
    requests.hear(scheduled(grown=[("b", ([1], []))]))
    assert owners(requests, 1, 2) == [("b", 0, 1), ("a", 0, 1)]


@pytest.mark.parametrize("ended", [False, True])
def test_a_name_that_is_used_again_owns_no_block_of_the_request_before(requests, ended):
    requests.hear(scheduled(gone=["a"], new=[came("a", [9, 2], [10])]))
    if ended:
        requests.hear(scheduled(gone=["a"]))
    assert owners(requests, 1, 2, 9, 7) == [None, ("a", 0, 1), ("a", 0, 0), None]


def test_nothing_is_kept_of_a_request_that_ended_and_has_no_block(requests):
    requests.hear(scheduled(gone=["b"]))
    requests.hear(scheduled(new=[came("c", [6], [8])]))
    gc.collect()
    assert {*requests._latest} == {"a", "c"}


def test_blocks_that_are_filled_for_a_request_that_waits_are_nobody_s(requests):
    """The runner is told of it when its rows have come."""
    job = SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[2]))
    jobs = SimpleNamespace(store_jobs={}, load_jobs={1: job})
    loose = SimpleNamespace(store_gpu_blocks=[], load_gpu_blocks=[1])
    told = scheduled(gone=["a"])
    told.kv_connector_metadata = SimpleNamespace(metadata=(jobs, loose))
    connectors.hear(requests, told)
    assert owners(requests, 1, 2, 3) == [None, None, ("a", 0, 2)]


def test_neighbouring_blocks_of_a_request_are_handed_over_together(requests):
    """In each group; not across a gap, and none where none leave."""
    requests.hear(scheduled(new=[came("c", [3, 9], [10])]))
    moved = SimpleNamespace(store_gpu_blocks=[8, 5, 9, 2, 1, 3, 4, 11], load_gpu_blocks=[6])
    found = connectors.transfers(SimpleNamespace(), requests, moved)
    assert [(each.request, each.group, each.blocks, each.begin) for each in found.stores] == [
        ("a", "group.0", [1, 2], 0),
        ("a", "group.0", [4, 5], 3),
        ("b", "group.1", [8], 0),
        ("c", "group.0", [3, 9], 0),
    ]
    assert found.loads == []


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_leaves_out_blocks_between_its_first_and_its_last(requests, ended):
    """Those that the store has, or that nobody could load; it says where the first one lies."""
    requests.hear(scheduled(grown=[("a", ([9, 10], [11]))]))
    if ended:
        requests.hear(scheduled(gone=["a"]))
    places = SimpleNamespace(block_ids=[20, 21, 22, 23, 24])
    spec = SimpleNamespace(block_ids=[2, 4, 5, 10, 11], group_sizes=[4, 1], block_indices=[1, 1])
    job = SimpleNamespace(req_id="a", src_spec=spec, dst_spec=places)
    config = SimpleNamespace(
        kv_cache_groups=[None, None], hisparse_host_num_blocks=None,
        prefix_cacheable_group_ids=(0, 1),
    )  # fmt: skip
    runner = SimpleNamespace(
        kv_cache_config=config, vllm_config=SimpleNamespace(kv_transfer_config=None)
    )
    found = connectors.transfers(
        runner, requests, SimpleNamespace(store_jobs={1: job}, load_jobs={})
    ).stores
    assert [(each.group, each.blocks, each.begin) for each in found] == [
        ("group.0", [2], 1),
        ("group.0", [4, 5], 3),
        ("group.0", [10], 6),
        ("group.1", [11], 1),
    ]
    assert [each.keys for each in found] == [[(0, 20)], [(0, 21), (0, 22)], [(0, 23)], [(0, 24)]]


def test_a_job_names_a_block_that_is_not_the_request_s(requests):
    """It counts as the next one: the rows under that hash are others."""
    assert requests.column("a", 0, 6, 2) == 3
    assert requests.column("nobody", 0, 30, 2) == 3
