"""Copies of vLLM's metadata that lead to blocks of one row."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest
import torch
from kvtxn.integrations.vllm_plugin.seam.backends import FlashLatentTables


@pytest.mark.parametrize("makes", [True, False])
def test_the_schedule_of_latents_is_made_as_vllm_makes_it(makes):
    """For blocks of one row, and only where vLLM makes one."""
    asked = []

    class Builder:
        page_size = 64

        def _schedule_decode(self, **given):
            asked.append(given | {"page_size": self.page_size})
            return "a schedule"

    builder, lengths = Builder(), torch.tensor([24, 36], dtype=torch.int32)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)
    decode = Made(
        block_table="vLLM's",
        seq_lens=lengths,
        query_start_loc=starts,
        max_query_len=4,
        max_seq_len=36,
        scheduler_metadata="vLLM's" if makes else None,
        max_num_splits=32,
    )
    metadata = Made(decode=decode, query_start_loc=starts, max_seq_len=36)
    tables = FlashLatentTables()
    assert tables.arguments(metadata).longest == 36
    found = tables.by_slot(metadata, "by slot", builder)
    assert (found.decode.block_table, decode.block_table) == ("by slot", "vLLM's")
    assert found.decode.scheduler_metadata == ("a schedule" if makes else None)
    wanted = {"num_reqs": 2, "max_query_len": 4, "max_seq_len": 36, "causal": True}
    tensors = {"cu_query_lens": starts, "seqlens": lengths}
    assert asked == ([wanted | tensors | {"max_num_splits": 32, "page_size": 1}] if makes else [])
    assert builder.page_size == 64
