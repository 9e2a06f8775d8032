"""Default size of a window on a GPU, and the memory that is reserved for it."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace as Made
from typing import NamedTuple

import pytest
import torch
from kernels_here import importing_kernels

pytest.importorskip("vllm")

from kvtxn.integrations.serving.parts import Part, Parts
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config
from kvtxn.integrations.vllm_plugin.seam import gpu_cache_layout

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.windows import bytes_of_steps, reserve_memory
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts

from kvtxn import TxnConfig
from kvtxn.cuda_graphs import MOST_BYTES


@pytest.mark.parametrize(
    ("requests", "drafts", "captured", "rows"),
    [
        (64, 4, 512, 320),  # what all requests may have
        (1024, 4, 512, 960),  # buffers at most twice the largest graph's rows, tables included
        (1024, 4, 0, 5120),  # no graphs: nothing to compare with
        (8, 0, 512, 8),
        (64, 4, 1, 5),  # one request always has room
    ],
)
def test_rows_of_a_window(requests, drafts, captured, rows):
    """All requests' rows, within reason."""
    config = Made(
        speculative_config=Made(num_speculative_tokens=drafts) if drafts else None,
        scheduler_config=Made(max_num_seqs=requests),
        compilation_config=Made(max_cudagraph_capture_size=captured),
    )
    assert engine_config.window_rows(config) == rows


class Spec(NamedTuple):
    """Stands for the spec of a layer's cache; as in vLLM, alike specs are equal."""

    page_size_bytes: int
    block_size: int


def runner(**settings):
    """A runner with two layers of 96 bytes a row, and a drafter's."""
    spec = Spec(16 * 96, 16)
    return Made(
        device=torch.device("cpu"),
        compilation_config=Made(static_forward_context={}),
        speculator=Made(draft_attn_layer_names={"draft"}),
        get_kv_cache_spec=lambda: {"a": spec, "b": spec, "draft": spec},
        kvtxn_config=TxnConfig(policy="undo", max_rows=10, **settings),
        kvtxn_rank=0,
    )


def test_room_is_the_target_layers_rows():
    """A row is a slot's share of a page; the drafter's layers have no windows."""
    made = runner()
    assert bytes_of_steps(made) == 10 * 2 * 96


@pytest.mark.parametrize(("last", "windows"), [(True, 1), (False, 3)])
def test_room_for_every_window_that_is_open_at_one_time(last, windows):
    """An earlier pipeline stage saves rows of as many steps as vLLM's queue has entries."""
    made = runner()
    made.pp_handler = Made(is_last_rank=last, queue=[] if last else [None] * 3)
    assert bytes_of_steps(made) == windows * 10 * 2 * 96


@pytest.mark.parametrize(("mixed", "requests"), [("PIECEWISE", 12), ("FULL", 30)])
def test_room_for_tables_where_rows_may_wait(monkeypatch, mixed, requests):
    """Four bytes for each token of context of each request of the largest graph, in each group."""
    monkeypatch.setattr(
        engine_config, "config_facts", lambda config: EngineFacts(device="cuda", runner="v2")
    )
    made = runner()
    spec, other = Spec(16 * 96, 16), Spec(0, 1)
    layers = {"a": spec, "b": spec, "c": spec, "d": other}  # in groups of one: three and one
    made.get_kv_cache_spec = lambda: layers
    layer = Made(impl=Made(vllm_flash_attn_version=3, kvtxn=None))
    compilation = Made(
        max_cudagraph_capture_size=60,
        cudagraph_mode=Made(mixed_mode=lambda: Made(name=mixed)),
        static_forward_context=dict.fromkeys(layers, layer),
    )
    made.vllm_config, made.compilation_config = Made(compilation_config=compilation), compilation
    made.decode_query_len, made.max_num_reqs, made.max_model_len = 5, 30, 100
    made.kvtxn_config = TxnConfig(policy="auto", max_rows=10)
    assert bytes_of_steps(made) == 16 * 3 * 96 + 4 * requests * 100 * 4  # rows wait in whole blocks
    layer.impl.kvtxn_line_per_row = True  # and of each row, where the kernel wants it so
    assert bytes_of_steps(made) == 16 * 3 * 96 + 4 * requests * 5 * 100 * 4
    layer.impl.vllm_flash_attn_version = 2
    assert bytes_of_steps(made) == 10 * 3 * 96


@pytest.mark.parametrize(
    ("layers", "states", "groups"),
    [
        ([4, 0], 0, 1),  # a single group
        ([4, 8], 0, 3),  # of layers that share blocks
        ([4, 6], 0, 3),  # the last group has two layers, and the blocks of four
        ([4, 0], 12, 1),  # states share the blocks, and have no rows
    ],
)
@pytest.mark.parametrize("rows", [5, 500, 960])
def test_room_is_that_of_the_spare_blocks(rows, layers, states, groups):
    """As many bytes as ``with_spare_blocks`` adds to the caches once they are planned."""
    full, sliding, state = Spec(1 << 16, 528), Spec(1 << 16, 264), Spec(1 << 16, 9999)
    specs = {f"full.{n}": full for n in range(layers[0])}
    specs |= {f"sliding.{n}": sliding for n in range(layers[1])}
    specs |= {f"state.{n}": state for n in range(states)}
    made = runner()
    made.get_kv_cache_spec = lambda: specs
    sizes = [528] + [264] * (groups - 1)
    added = sum(-(-rows // size) for size in sizes) * 4 * (1 << 16)
    with pytest.MonkeyPatch.context() as patch:
        names = {name: None for name in specs if name.startswith("state")}
        patch.setattr(gpu_cache_layout.state_layers, "modules_of", lambda runner: names)
        assert gpu_cache_layout.bytes_of_spare_blocks(made, rows) == added


class Wanting(Part):
    """A part that takes so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def memory_wanted(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("free", "given", "left"),
    [
        (1 << 30, None, (1 << 30) - MOST_BYTES - 1000),
        (1 << 20, None, 0),
        (1 << 30, 1 << 30, 1 << 30),
    ],
)
def test_memory_of_parts_and_captured_commits_is_in_the_plan(free, given, left):
    """vLLM sizes its cache without it, unless the user says how large the cache is."""
    parts = Parts([Wanting(600), Wanting(400)])
    config = Made(kv_cache_memory_bytes=given)
    made = Made(kvtxn_unhook=ExitStack(), cache_config=config, kvtxn_parts=parts)
    worker = Made(model_runner=made, determine_available_memory=lambda: free)
    reserve_memory(Made(worker=worker))
    assert worker.determine_available_memory() == left
    made.kvtxn_unhook.close()
    assert worker.determine_available_memory() == free


def test_room_that_cannot_be_had():
    """The engine starts all the same, unless errors were asked for."""
    made = runner()
    del made.get_kv_cache_spec
    assert bytes_of_steps(made) == 0
    made = runner(on_error="raise")
    del made.get_kv_cache_spec
    with pytest.raises(AttributeError):
        bytes_of_steps(made)
