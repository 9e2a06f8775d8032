"""vLLM's own FlashAttention code over a window whose drafts wait behind the cache's blocks.

What its operators are called with is vLLM's doing and the plug-in's; see ``flash_rig``.
"""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest
import torch
from engine_jobs import missing
from step_rig import DEVICE, Calls, anywhere  # noqa: F401

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from failing_stage import failing_stage
from flash_rig import BLOCK, Batch, Flash
from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu import slot_reading
    from kvtxn.integrations.vllm_plugin.gpu.flash_backend import (
        WindowFlashBuilder,
        WindowFlashImpl,
    )
    from kvtxn.integrations.vllm_plugin.seam import backends

from kvtxn import WindowState


@pytest.fixture
def flash(monkeypatch):
    found, module = Flash(), backends.flash_module()
    monkeypatch.setattr(module, "_FA4_DENSE_ATTENTION_KERNEL", found.attend)
    monkeypatch.setattr(module, "flash_attn_varlen_func", found.attend, raising=False)
    monkeypatch.setattr(module, "reshape_and_cache_flash", found.write, raising=False)
    return found


@pytest.mark.parametrize("sliding", [None, 3])
def test_a_mixed_batch(flash, monkeypatch, sliding):
    """Drafts are read and left out of the blocks; a prompt and a plain decode row are written."""
    batch = Batch(monkeypatch, [3, 8, 0, 4], [3, 2, 5, 1], sliding=sliding)
    batch.begin([2, 1, 0, 0])
    for number in range(2):
        batch.check(number, left_out={1, 2, 4})
    assert batch.steps.window.state is WindowState.STAGED
    assert [call["block_size"] for call in flash.calls] == [1, 1]
    batch.steps.commit(torch.tensor([2, 2, 1, 1], dtype=torch.int32, device=DEVICE))
    for number in range(2):  # of the drafts the first and the third are kept
        batch.expected(number, left_out={2})
        assert batch.caches[number].equal(batch.stock[number])


def test_a_step_without_a_window_is_vllms_own(flash, monkeypatch):
    """Without a window vLLM's code gets the cache and the metadata unchanged."""
    batch = Batch(monkeypatch, [3, 4], [1, 1])
    batch.begin([0, 0])
    batch.check(0)
    assert [call["block_size"] for call in flash.calls] == [BLOCK]


@pytest.mark.parametrize("shown", [True, False])
def test_a_captured_forward(flash, monkeypatch, shown):
    """A captured forward serves steps with a window, whose drafts wait, and steps without."""
    batch = Batch(monkeypatch, [3, 1], [4, 4])
    batch.begin([3, 3], captured=True)
    if not shown:
        batch.steps.windows.mark(None)
    for number in range(2):
        batch.check(number, left_out={1, 2, 3, 5, 6, 7} if shown else ())
    assert [call["block_size"] for call in flash.calls] == [1, 1]


def test_a_group_like_an_earlier_one(flash, monkeypatch):
    """vLLM copies that one's metadata; blocks and slots are others."""
    batch = Batch(monkeypatch, [3, 4, 0], [3, 3, 5])
    batch.begin([2, 2, 0])
    batch.check(0, left_out={1, 2, 4, 5})
    batch.place(batch.blocks.flip(0))
    copied = batch.builder.update_block_table(
        batch.metadata["layer.0"], batch.blocks, batch.slots[0, : batch.rows + 3]
    )
    batch.metadata["layer.1"] = copied
    batch.check(1, left_out={1, 2, 4, 5})
    assert [call["block_size"] for call in flash.calls] == [1, 1]


def test_metadata_is_built_for_windows_and_graphs(monkeypatch):
    """Not for steps without one, and not for what a drafter builds, which it does fast."""
    batch = Batch(monkeypatch, [3], [3])
    own = backends.flash_attention()[0]
    monkeypatch.setattr(
        *(own, "build"),
        lambda _, prefix, common, fast: SimpleNamespace(scheduler_metadata=None if fast else 5),
    )
    monkeypatch.setattr(
        own, "build_for_cudagraph_capture", lambda self, common: self.build(0, common)
    )
    build = batch.builder.build
    batch.begin([2])
    assert build(0, None).scheduler_metadata == 5  # the first says whether vLLM makes a schedule
    batch.steps.abandon()
    assert not hasattr(build(0, None), "kvtxn")
    assert build(0, None).scheduler_metadata == 5
    captured = batch.builder.build_for_cudagraph_capture(None)
    assert captured.kvtxn.captured
    assert captured.scheduler_metadata is None  # steps with a window would not fill it anew
    batch.begin([2])
    assert not build(0, None).kvtxn.captured
    assert build(0, None).scheduler_metadata is None  # the first layer makes it
    assert not hasattr(build(0, None, True), "kvtxn")


@pytest.mark.parametrize("makes", [True, False])
def test_the_schedule_is_made_once_and_as_vllm_makes_it(flash, monkeypatch, makes):
    """vLLM makes one schedule for all layers, or none if sliding windows differ."""
    batch = Batch(monkeypatch, [3, 4], [3, 3])
    batch.begin([2, 2])
    batch.builder.schedules, asked = makes, []
    batch.builder.block_size = 128  # of such blocks FlashAttention may divide work differently

    def schedule(self, **given):
        asked.append(given | {"page_size": self.block_size})
        return "a schedule"

    monkeypatch.setattr(WindowFlashBuilder, "_get_scheduler_metadata", schedule)
    for number in range(2):
        batch.check(number, left_out={1, 2, 4, 5})
    found = batch.plain()
    assert len(asked) == makes
    for given in asked:
        assert given.pop("seqlens").equal(found.seq_lens)
        assert given.pop("cu_query_lens").equal(found.query_start_loc)
        assert given == {
            **{"aot_schedule": True, "batch_size": 2, "max_query_len": 3, "max_seq_len": 7},
            **{"causal": True, "max_num_splits": 0, "page_size": 1},
        }
    assert batch.builder.block_size == 128
    wanted = "a schedule" if makes else None
    assert [call["scheduler_metadata"] for call in flash.calls] == [wanted] * 2


@pytest.mark.parametrize("operator", ["write", "attend"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_operator_that_fails(flash, monkeypatch, operator, layer):
    """Rows that waited are written, and the rest of the forward is vLLM's own: nothing is lost."""
    batch = Batch(monkeypatch, [3, 4, 0], [3, 3, 5])
    batch.begin([2, 2, 0])
    module = backends.flash_module()
    name = {"write": "reshape_and_cache_flash", "attend": "flash_attn_varlen_func"}[operator]
    works, calls = getattr(module, name), []

    def fails(*args, **kwargs):
        calls.append(None)
        if len(calls) == layer + 1:
            raise RuntimeError("a test made this fail")
        return works(*args, **kwargs)

    monkeypatch.setattr(module, name, fails)
    for number in range(2):
        assert batch.run(number).equal(batch.expected(number))
    for number in range(2):
        assert batch.caches[number].equal(batch.stock[number])
    assert batch.steps.window.state is WindowState.DIRECT
    assert batch.steps.manager.snapshot()["kvtxn_fallbacks_total_attend"] == 1


def test_an_injected_fault_comes_by(flash, monkeypatch):
    """A layer comes by the place at which ``failing_stage`` lets the attention fail."""
    batch = Batch(monkeypatch, [3, 4, 0], [3, 3, 5])
    batch.begin([2, 2, 0])
    with failing_stage(batch.steps, "attend", 1) as calls:
        batch.run(0)
        assert batch.steps.window.state is WindowState.OPEN
        batch.run(1)
    assert calls == [2]
    assert batch.steps.window.state is WindowState.DIRECT


def test_rows_that_something_else_wrote(flash, monkeypatch):
    """Rows that something else wrote to vLLM's blocks are read from those blocks."""
    batch = Batch(monkeypatch, [3, 4], [3, 3])
    batch.begin([2, 2])
    monkeypatch.setattr(
        WindowFlashImpl, "do_kv_cache_update", WindowFlashImpl.__mro__[1].do_kv_cache_update
    )
    batch.check(0)
    assert batch.steps.window.state is WindowState.DIRECT


def test_errors_can_be_asked_for(flash, monkeypatch):
    """With ``on_error="raise"`` an operator's error reaches the caller."""
    batch = Batch(monkeypatch, [3], [3], on_error="raise")
    batch.begin([2])
    monkeypatch.setattr(slot_reading, "slot_tables", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.run(0)


def test_later_layers_ask_torch_for_what_vllm_asks(flash, monkeypatch):
    """The first layer makes the parts that all share; outside of graphs the host's time counts."""
    batch = Batch(monkeypatch, [3, 4, 0], [3, 3, 5])
    module = backends.flash_module()
    for name in (
        "_FA4_DENSE_ATTENTION_KERNEL",
        "flash_attn_varlen_func",
        "reshape_and_cache_flash",
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None, raising=False)
    asked = []
    for drafts in ([0, 0, 0], [2, 2, 0]):
        batch.begin(drafts)
        batch.run(0)
        with Calls() as calls:
            batch.run(1)
        asked.append(calls.names)
    assert set(asked[1]) <= set(asked[0])
    assert len(asked[1]) < len(asked[0])


@pytest.mark.parametrize("sliding", [None, 3])
def test_what_is_made_once_is_what_vllm_passes(flash, monkeypatch, sliding):
    """FlashAttention gets the same from here as from vLLM's own code, and less only of nothing."""
    batch = Batch(monkeypatch, [3, 4], [3, 3], sliding=sliding)
    batch.layers[0].impl.logits_soft_cap = 20.0
    batch.hook()
    batch.begin([2, 2])
    batch.run(0)
    hook = batch.layers[0].impl.kvtxn
    batch.layers[0].impl.kvtxn = attrs.evolve(hook, fixed=None)
    batch.run(0)
    ours, own = flash.calls
    for name in ours.keys() | own.keys():
        theirs = own.get(name)
        if name in ours:
            assert ours[name] is theirs or ours[name] == theirs
        else:
            assert theirs is None or name.endswith("_descale")


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_dtype", "fp8"), ("alibi_slopes", torch.ones(4))]
)
def test_where_vllm_passes_more_its_own_code_does(flash, monkeypatch, name, value):
    """Scales of 8-bit rows, slopes; and metadata that is not causal in the plain way."""
    batch = Batch(monkeypatch, [3], [3])
    assert batch.layers[0].impl.kvtxn.fixed is not None
    setattr(batch.layers[0].impl, name, value)
    batch.hook()
    assert batch.layers[0].impl.kvtxn.fixed is None
    batch.begin([2])
    batch.metadata["layer.1"].causal = False
    batch.run(1)
    assert "k_descale" in flash.calls[0]  # by vLLM's own code
