"""vLLM's other attention backends over windows whose drafts wait: TRITON_ATTN, TRITON_MLA.

vLLM's own code and kernels attend, through Triton's interpreter; ``test_flash_backend`` has what
all backends share.
"""

from __future__ import annotations

from itertools import takewhile
from types import SimpleNamespace as Made
from typing import ClassVar

import pytest
import torch
from engine_jobs import missing
from step_rig import DEVICE, anywhere  # noqa: F401

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

import triton
from failing_stage import failing_stage
from interpreted import load
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    import waiting_batch
    from kvtxn.integrations.vllm_plugin.gpu.slot_reading import Reading
    from kvtxn.integrations.vllm_plugin.gpu.triton_backend import (
        WindowTritonBuilder,
        WindowTritonImpl,
        WindowTritonLatentBuilder,
        WindowTritonLatentImpl,
    )
    from waiting_batch import OWN

from kvtxn import WindowState

if ON_GPU:
    pytest.skip("the grid runs these backends there", allow_module_level=True)

OPS = "v1/attention/ops/"
BLOCK, SPARE = 16, 1
HEADS, KV_HEADS, SIZE = 4, 2, 32
LATENT, ROTARY = 32, 16


def write(key, value, key_cache, value_cache, slots, *_):
    """vLLM's writer of rows; it asks for the GPU."""
    for row, cache in ((key, key_cache), (value, value_cache)):
        there = slots >= 0
        cache[slots[there] // BLOCK, slots[there] % BLOCK] = row[there]


def write_latents(latents, rotary, cache, slots, **_):
    """vLLM's writer of latents, which has no CPU operator."""
    there = slots >= 0
    rows = torch.cat((latents, rotary), 1)
    cache[slots[there] // BLOCK, slots[there] % BLOCK] = rows[there]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """vLLM's kernels through Triton's interpreter."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.mla import triton_mla

    helpers = (f"{OPS}triton_attention_helpers.py",)
    attend = load(f"{OPS}triton_unified_attention.py", helpers).unified_attention
    decode = load(f"{OPS}triton_decode_attention.py").decode_attention_fwd
    monkeypatch.setattr(triton_attn, "unified_attention", attend)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", write)
    monkeypatch.setattr(triton_mla, "triton", triton)
    monkeypatch.setattr(triton_mla, "decode_attention_fwd", decode)
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", write_latents)


class Batch(waiting_batch.Batch):
    """Requests of a step over two layers of one backend, which are checked by their places."""

    block, reading = BLOCK, Reading

    def __init__(self, *args, **named) -> None:
        self.builder = object.__new__(self.made_by)
        super().__init__(*args, **named)
        self.inputs = [self.random_inputs() for _ in range(2)]

    def check(self, number, left_out=()) -> None:
        """Stock's very sums, and in vLLM's blocks all rows but those left out."""
        layer = self.layers[number]
        output = self.run(layer, layer.cache, self.metadata[layer.name])
        hook, layer.impl.kvtxn = layer.impl.kvtxn, None
        before = self.stock[number].clone()
        assert output.equal(self.run(layer, self.stock[number], self.plain()))
        layer.impl.kvtxn = hook
        rows, old = self.by_place(self.stock[number]), self.by_place(before)
        for row in left_out:
            rows[self.own_slots[row]] = old[self.own_slots[row]]
        mine = self.by_place(layer.cache)
        assert mine[: OWN * BLOCK].equal(rows[: OWN * BLOCK])


class Attention(Batch):
    """TRITON_ATTN."""

    row_shape = (KV_HEADS, SIZE)
    made_by = WindowTritonBuilder
    sliding: int | None = None
    alibi: ClassVar[list[float] | None] = None
    more: ClassVar[dict[str, object]] = {}

    def cache(self):
        return torch.randn(OWN + SPARE, BLOCK, KV_HEADS, 2 * SIZE).transpose(1, 2)

    def by_place(self, cache):
        return cache.transpose(1, 2).reshape(-1, KV_HEADS, 2 * SIZE)

    def layer(self, number):
        sides = HEADS, SIZE, 0.2, KV_HEADS
        impl = WindowTritonImpl(*sides, self.alibi, self.sliding, "auto", **self.more)
        one = torch.ones(1)
        return Made(layer_name=f"layer.{number}", impl=impl, _k_scale=one, _v_scale=one), impl

    def random_inputs(self):
        key, value = torch.randn(2, self.rows, KV_HEADS, SIZE)
        return torch.randn(self.rows, HEADS, SIZE), key, value

    def plain(self):
        none = torch.empty(0)
        return Made(
            num_actual_tokens=self.rows,
            max_query_len=max(self.lengths),
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            max_seq_len=max(self.totals()),
            seq_lens=torch.tensor(self.totals(), dtype=torch.int32),
            block_table=self.blocks,
            seq_threshold_3D=0,  # the kernel of prompts and drafts for all
            num_par_softmax_segments=16,
            softmax_segm_output=none,
            softmax_segm_max=none,
            softmax_segm_expsum=none,
            causal=True,
            mm_prefix_range_tensor=None,
            rswa_prefix_lens=None,
            rswa_window=None,
        )

    def run(self, layer, cache, metadata):
        query, key, value = self.inputs[int(layer.name[-1])]
        layer.impl.do_kv_cache_update(layer.module, key, value, cache, self.slots[0, : self.rows])
        output = torch.full_like(query, 7.0)
        return layer.impl.forward(layer.module, query, key, value, cache, metadata, output)


class Latents(Batch):
    """TRITON_MLA; from the first request on that differs in length they count among prompts."""

    row_shape = (LATENT + ROTARY,)
    made_by = WindowTritonLatentBuilder

    def cache(self):
        return torch.randn(OWN + SPARE, BLOCK, LATENT + ROTARY)

    def by_place(self, cache):
        return cache.view(-1, LATENT + ROTARY)

    def layer(self, number):
        impl = object.__new__(WindowTritonLatentImpl)
        impl.__dict__ |= {"kv_lora_rank": LATENT, "scale": 0.2, "_sm_count": 4, "dcp_world_size": 1}
        module = Made(layer_name=f"layer.{number}", impl=impl, _k_scale=torch.ones(1))
        return module, impl

    def random_inputs(self):
        query = torch.randn(self.rows, HEADS, LATENT + ROTARY)
        return query, torch.randn(self.rows, LATENT), torch.randn(self.rows, 1, ROTARY)

    def plain(self):
        count = sum(1 for _ in takewhile(lambda length: length == self.lengths[0], self.lengths))
        lengths = torch.tensor(self.totals()[:count], dtype=torch.int32)
        return Made(
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            max_seq_len=max(self.totals()),
            num_decode_tokens=self.starts[count],
            causal=True,
            decode=Made(block_table=self.blocks[:count], seq_lens=lengths),
        )

    def run(self, layer, cache, metadata):
        query, latents, rotary = self.inputs[int(layer.name[-1])]
        slots, scale = self.slots[0, : self.rows], layer.module._k_scale
        layer.impl.do_kv_cache_update(latents, rotary, cache, slots, "auto", scale)
        decoding = query[: metadata.num_decode_tokens]
        return layer.impl.forward_mqa(decoding, cache, metadata, layer.module)[0]


class Sliding(Attention):
    """Gemma's layers: sliding windows and a soft cap."""

    sliding = 9
    more: ClassVar = {"logits_soft_cap": 20.0}


class Sinks(Attention):
    """gpt-oss's."""

    more: ClassVar = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}


class Alibi(Attention):
    """Bloom's."""

    alibi: ClassVar = [0.5, 0.25, 0.125, 0.0625]


BOTH = pytest.mark.parametrize("kind", [Attention, Latents])


@pytest.mark.parametrize("kind", [Attention, Sliding, Sinks, Alibi, Latents])
def test_a_mixed_batch(monkeypatch, kind):
    """Drafts are read and left out of the blocks; a prompt is written; the commit keeps some."""
    batch = kind(monkeypatch, [20, 33, 0], [3, 3, 5])
    batch.begin([2, 2, 0])
    for number in range(2):
        batch.check(number, left_out={1, 2, 4, 5})
    assert batch.steps.window.state is WindowState.STAGED
    batch.steps.commit(torch.tensor([2, 3, 1], dtype=torch.int32))
    for number in range(2):
        layer, stock = batch.layers[number], batch.stock[number].clone()
        layer.impl.kvtxn = None
        batch.run(layer, stock, batch.plain())  # all rows
        rejected = batch.own_slots[2]  # of the first request's drafts
        batch.by_place(stock)[rejected] = batch.by_place(batch.stock[number])[rejected]
        assert batch.caches[number].equal(stock[:OWN])


@BOTH
@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [([1, 1, 3], [0, 0, 2]), ([3, 1, 3], [2, 0, 2]), ([1, 3, 1], [0, 2, 0])],
)
def test_drafts_wait_among_requests_without_any(monkeypatch, kind, lengths, drafts):
    """As vLLM's V1 runner leaves them where the order of a batch decides about sums."""
    batch = kind(monkeypatch, [20, 33, 7], lengths)
    batch.steps.among_others = True
    batch.begin(drafts)
    starts = zip(batch.starts, lengths, drafts, strict=False)
    waiting = {first + n - 1 - i for first, n, count in starts for i in range(count)}
    for number in range(2):
        batch.check(number, left_out=waiting)
    batch.steps.commit(torch.tensor([count + 1 for count in drafts], dtype=torch.int32))
    for layer, cache, stock in zip(batch.layers, batch.caches, batch.stock, strict=True):
        layer.impl.kvtxn = None
        batch.run(layer, stock, batch.plain())  # all rows
        assert cache.equal(stock[:OWN])


@BOTH
def test_a_step_without_a_window_is_vllms_own(monkeypatch, kind):
    """One row per request."""
    batch = kind(monkeypatch, [20, 33], [1, 1])
    batch.begin([0, 0])
    batch.check(0)
    assert not batch.steps.waits


@BOTH
@pytest.mark.parametrize("shown", [True, False])
def test_a_captured_forward(monkeypatch, kind, shown):
    """A captured forward serves steps with a window, whose drafts wait, and steps without."""
    batch = kind(monkeypatch, [20, 33], [4, 4])
    batch.begin([3, 3], captured=True)
    if not shown:
        batch.steps.windows.mark(None)
    for number in range(2):
        batch.check(number, left_out={1, 2, 3, 5, 6, 7} if shown else ())


@BOTH
def test_a_layer_that_fails(monkeypatch, kind):
    """Rows that waited are written, and the rest of the forward is vLLM's own: nothing is lost."""
    batch = kind(monkeypatch, [20, 33, 0], [3, 3, 5])
    batch.begin([2, 2, 0])
    with failing_stage(batch.steps, "attend", 1):
        for layer in batch.layers:
            batch.run(layer, layer.cache, batch.metadata[layer.name])
    assert batch.steps.window.state is WindowState.DIRECT
    for number, layer in enumerate(batch.layers):
        layer.impl.kvtxn = None
        batch.run(layer, batch.stock[number], batch.plain())
        assert batch.caches[number].equal(batch.stock[number][:OWN])
    assert batch.steps.manager.snapshot()["kvtxn_fallbacks_total_attend"] == 1


def test_latents_of_prompts_alone(monkeypatch):
    """No request decodes, so there is no table; rows are written where they belong."""
    batch = Latents(monkeypatch, [20, 33], [3, 3])
    batch.begin([2, 2])
    found = batch.metadata["layer.0"]
    found.decode, found.num_decode_tokens = None, 0
    layer = batch.layers[0]
    _, latents, rotary = batch.inputs[0]
    before = batch.by_place(layer.cache).clone()
    slots = batch.slots[0, : batch.rows]
    layer.impl.do_kv_cache_update(latents, rotary, layer.cache, slots, "auto", None)
    changed = (batch.by_place(layer.cache) != before).any(1).nonzero().flatten().tolist()
    spare = [OWN * BLOCK + row for row in (1, 2, 4, 5)]
    assert changed == sorted([*batch.own_slots[[0, 3]].tolist(), *spare])
    assert found.kvtxn.read().decode is None


def test_requests_of_one_row_have_one_line(monkeypatch):
    """Lines that stock does not repeat are not repeated here; nor are any without causal order."""
    batch = Latents(monkeypatch, [20, 33], [3, 3])
    tables, found = batch.builder.kvtxn_tables, batch.plain()
    assert tables.arguments(found).lines == 3
    found.causal = False
    assert tables.arguments(found).lines == 1
    found.causal, found.num_decode_tokens = True, 2
    assert tables.arguments(found).lines == 1
    lengths = found.decode.seq_lens
    assert tables.by_slot(found, batch.blocks, None).decode.seq_lens is lengths
