"""Blocks that were stored are read before a runner fills them with zeros, or with copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvtxn.integrations.vllm_plugin.audit.runner_steps import CpuSteps, StepsV2
from transfer_rig import kinds, rig, scheduled, stored

__all__ = ["rig"]


@pytest.mark.parametrize("steps", [CpuSteps, StepsV2])
@pytest.mark.parametrize("how", ["zeros", "copies"])
def test_blocks_are_read_before_the_runner_overwrites_them(rig, steps, how):
    """The watch hears later who gets them. Beside a prefix that is copied, one may be new."""
    rig.watch.begin(stored(rig, 1, 2))
    rig.watch.end()
    told = rig.runner.kvtxn_scheduled = scheduled()
    rig.runner.kvtxn_audit = SimpleNamespace(transfers=rig.watch, on_violation="log")
    for block, read in (4, 0), (2, 2):
        if how == "zeros":
            told.new_block_ids_to_zero = [block]
        else:
            told.kv_cache_block_copies = [SimpleNamespace(src_block_id=5, dst_block_id=block)]
        steps(rig.runner).begin()
        rig.watch._blocks.look()
        assert len(rig.watch._blocks._table) == read
    assert kinds(rig) == []
    told.new_block_ids_to_zero = [None]
    steps(rig.runner).begin()
    assert len(rig.stopped) == 1  # the audit alone
