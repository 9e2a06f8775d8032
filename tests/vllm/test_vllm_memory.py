"""How many rows a window has by default on a GPU, and what is taken for them beforehand."""

from __future__ import annotations

from types import SimpleNamespace as Made

import pytest
import torch

pytest.importorskip("vllm")

from kvtxn.integrations import vllm_internals_gpu as inside


@pytest.mark.parametrize(
    ("requests", "drafts", "captured", "rows"),
    [
        (64, 4, 512, 320),  # what all requests may have
        (1024, 4, 512, 960),  # buffers at most twice the largest graph's rows, tables included
        (1024, 4, 0, 5120),  # no graphs: nothing to compare with
        (8, 0, 512, 8),
    ],
)
def test_rows_of_a_window(requests, drafts, captured, rows):
    """All requests' rows, within reason."""
    config = Made(
        speculative_config=Made(num_speculative_tokens=drafts) if drafts else None,
        scheduler_config=Made(max_num_seqs=requests),
        compilation_config=Made(max_cudagraph_capture_size=captured),
    )
    assert inside.window_rows(config) == rows


def test_room_is_the_target_layers_rows():
    """A row is a slot's share of a page; the drafter's layers have no windows."""
    spec = Made(page_size_bytes=16 * 96, block_size=16)
    runner = Made(
        device=torch.device("cpu"),
        speculator=Made(draft_attn_layer_names={"draft"}),
        get_kv_cache_spec=lambda: {"a": spec, "b": spec, "draft": spec},
    )
    assert inside.room_for_rows(runner, 10).nbytes == 10 * 2 * 96
