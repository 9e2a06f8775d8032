"""A connector that copies blocks by address, over caches with blocks behind vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest
import torch
from kernels_here import importing_kernels
from planned_caches import GROUPS, OWN, PLANS, allocated, planned

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.seam import connectors
    from kvtxn.integrations.vllm_plugin.seam.gpu_cache_layout import with_spare_blocks

from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

ROWS = 13
SAME = ("one layer", "one group", "two groups share their memory", "groups of different sizes")
PAGES = [
    each for each in PLANS if each.values[2] is None and each.values[1] in map(GROUPS.get, SAME)
]


@pytest.fixture
def connector(monkeypatch):
    """The worker's half of SimpleCPUOffloadConnector, without a GPU's streams and pinned memory."""

    class Stream:
        priority_range = staticmethod(lambda: (0, 0))

        def __init__(self, priority):
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(SimpleCPUOffloadWorker, "_init_cpu_mode", lambda *given: None)

    def made(config):
        worker = SimpleCPUOffloadWorker(None, config, 1 << 20)
        found = Made(_kv_cache_config=config, worker_handler=worker)
        several = Made(_kv_cache_config=config, _connectors=[found])
        monkeypatch.setattr(connectors, "connector", lambda: several)
        return worker

    return made


def blocks_of(worker, cache, block):
    """The region and block that begin where a block of a layer's cache does, or None."""
    at = cache[block].data_ptr()
    for name, region in worker.gpu_kv_caches.items():
        for number in range(region.shape[0]):
            begin = region[number].data_ptr()
            if begin <= at < begin + region.shape[1]:
                return name, number, at - begin
    return None


@pytest.mark.parametrize(("layout", "groups", "size"), PAGES)
def test_a_connector_copies_the_blocks_that_are_meant(connector, layout, groups, size):
    """With spare blocks the layers lie further apart; the connector's blocks are the caches'."""
    before = planned(layout, groups)
    worker = connector(before)
    after, spare = with_spare_blocks(before, ROWS, set())
    assert connectors.adopt(before, after) == 3  # two connectors and the worker
    assert worker.kv_cache_config is after
    assert before.num_blocks == OWN < after.num_blocks == spare.total
    caches = allocated(after, layout)
    worker.register_kv_caches(caches)
    for cache in caches.values():
        places = [blocks_of(worker, cache, block) for block in range(OWN)]
        assert [place[1] for place in places] == list(range(OWN))
        assert len({(name, offset) for name, _, offset in places}) == 1


def test_a_connector_that_was_not_told_copies_others(connector):
    """Where layers come first, addresses by the configuration without spare blocks are wrong."""
    [layout] = {each.values[0] for each in PAGES if each.values[0].name == "LBNHC"}
    before = planned(layout, GROUPS["one group"])
    worker = connector(before)
    after, _ = with_spare_blocks(before, ROWS, set())
    caches = allocated(after, layout)
    worker.register_kv_caches(caches)
    found = [blocks_of(worker, caches["c"], block) for block in range(OWN)]
    assert [place and place[1] for place in found] != list(range(OWN))


def test_without_a_connector_nobody_is_told(monkeypatch):
    monkeypatch.setattr(connectors, "connector", lambda: None)
    assert connectors.adopt(object(), object()) == 0
