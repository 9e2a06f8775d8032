"""Attention that reads a window, over FlashAttention's interface: a batch's parts, put together.

FlashAttention itself is plain torch here, by its documentation, and says if a schedule was made
for another call than it is passed to. The window kernel is the real one.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_jobs import missing
from vllm_step_rig import BLOCK, DEVICE, HEADS, SIZE, Calls, Rig, anywhere  # noqa: F401

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

from kernels_here import importing_kernels

with importing_kernels():
    from kvtxn.benchmarks.exactness_watch import InjectedFault, fault
    from kvtxn.integrations import vllm_internals
    from kvtxn.integrations.vllm_flash import FlashHook, Reading, WindowFlashBuilder
    from kvtxn.integrations.vllm_runner_gpu import hook_attention

    from kvtxn.errors import LayerError
    from kvtxn.executor import AttentionArgs

GROUP = 2  # query heads of a KV head
CALL = ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "causal", "window_size", "num_splits")


def visible(rows: int, keys: int, causal: bool, left: int) -> torch.Tensor:
    """Which keys a row sees, both aligned at their ends."""
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    seen = (j <= i) if causal else torch.ones(rows, keys, dtype=torch.bool)
    return seen & (j >= i - left) if left >= 0 else seen


def attend(query, key, value, seen, scale):
    """Softmax attention of one request, and its log-sum-exp; 0 and -inf where nothing is seen."""
    key, value = (each.repeat_interleave(GROUP, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, value), lse


class Flash:
    """Stands in for the operators of vLLM's FlashAttention backend."""

    def __init__(self) -> None:
        self.calls = []
        self.schedules = 0

    def get_scheduler_metadata(self, *, cache_seqlens, batch_size, **given):
        self.schedules += 1
        assert batch_size == len(cache_seqlens) == len(given["cu_seqlens_q"]) - 1
        return {name: given[name] for name in CALL} | {"seqused_k": cache_seqlens}

    def flash_attn_varlen_func(self, *, q, k, v, out, scheduler_metadata, **given):
        for name in (*CALL, "seqused_k"):
            assert (
                scheduler_metadata[name] is given[name] or scheduler_metadata[name] == given[name]
            )
        self.calls.append(given)
        lse = torch.full((q.shape[1], q.shape[0]), float("nan"), device=q.device)
        starts, left = given["cu_seqlens_q"].tolist(), given["window_size"][0]
        for r, count in enumerate(given["seqused_k"].tolist()):
            rows = slice(starts[r], starts[r + 1])
            assert rows.stop - rows.start <= given["max_seqlen_q"]
            assert count <= given["max_seqlen_k"]
            at = torch.arange(count, device=k.device)
            where = given["block_table"][r, at // BLOCK].long(), at % BLOCK
            seen = visible(rows.stop - rows.start, count, given["causal"], left)
            out[rows], lse[:, rows] = attend(
                q[rows], k[where], v[where], seen, given["softmax_scale"]
            )
        return out, lse

    def reshape_and_cache_flash(self, key, value, key_cache, value_cache, slots, *_):
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                key_cache[slot // BLOCK, slot % BLOCK] = key[row]
                value_cache[slot // BLOCK, slot % BLOCK] = value[row]


@pytest.fixture
def flash(monkeypatch):
    found = Flash()
    module = vllm_internals.flash_attention()
    for name in ("get_scheduler_metadata", "flash_attn_varlen_func", "reshape_and_cache_flash"):
        monkeypatch.setattr(module, name, getattr(found, name), raising=False)
    return found


class Batch:
    """Requests of two blocks each: rows that they have already, and rows of this step."""

    def __init__(self, before: list[int], lengths: list[int], padding: int = 0) -> None:
        self.before, self.lengths, self.padding = before, lengths, padding
        self.rig = Rig("deferred")
        self.rows, self.starts = sum(self.lengths), [0]
        for length in self.lengths:
            self.starts.append(self.starts[-1] + length)
        count = len(self.lengths)
        self.place(torch.arange(2 * count, dtype=torch.int32, device=DEVICE).view(count, 2))
        size = (self.rows + self.padding, HEADS, SIZE)
        self.key, self.value = torch.randn(2, *size, device=DEVICE)
        self.query = torch.randn(size[0], GROUP * HEADS, SIZE, device=DEVICE)
        self.output = torch.full_like(self.query, 7.0)

    def place(self, blocks: torch.Tensor) -> None:
        """Which blocks are whose."""
        self.blocks = blocks
        self.slots = [
            int(blocks[r, place // BLOCK]) * BLOCK + place % BLOCK
            for r, (old, length) in enumerate(zip(self.before, self.lengths, strict=True))
            for place in range(old, old + length)
        ]

    def begin(self, drafts) -> None:
        self.rig.begin(drafts, self.lengths)
        self.rig.slots.fill_(-1)
        self.rig.slots[0, : self.rows] = torch.tensor(self.slots)

    def metadata(self, splits: int):
        totals = [a + b for a, b in zip(self.before, self.lengths, strict=True)]
        return SimpleNamespace(
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(totals, dtype=torch.int32, device=DEVICE),
            block_table=self.blocks,
            slot_mapping=self.rig.slots[0, : self.rows],
            num_actual_tokens=self.rows,
            max_query_len=max(self.lengths),
            max_seq_len=max(totals),
            max_num_splits=splits,
        )

    def attend(self, reading, layer: int, sliding: int | None, splits: int = 32) -> None:
        reading.attend(*self.arguments(layer, sliding, splits))

    def arguments(self, layer: int, sliding: int | None, splits: int):
        """What a layer's attention is called with."""
        ref, steps = self.rig.steps.layers[layer], self.rig.steps
        args = AttentionArgs(
            block_table=steps.window.position,
            seq_lens=steps.window.position,
            scale=0.3,
            sliding_window=sliding,
            soft_cap=None,
        )
        hook = FlashHook(steps, ref, args, steps.window.keep(ref, None))
        impl = SimpleNamespace(
            scale=0.3,
            num_heads=GROUP * HEADS,
            num_kv_heads=HEADS,
            head_size=SIZE,
            logits_soft_cap=0,
            sliding_window=(-1, -1) if sliding is None else (sliding - 1, 0),
            vllm_flash_attn_version=3,
            kv_cache_dtype="auto",
        )
        module = SimpleNamespace(_k_scale=None, _v_scale=None)
        given = (self.query, self.key, self.value, self.metadata(splits), self.output)
        return hook, impl, module, *given

    def expected(self, cache, sliding: int | None) -> torch.Tensor:
        """Causal attention of each request over what it had and its own rows."""
        found = torch.full_like(self.query, 7.0)
        old_key, old_value = cache.transpose(1, 2).split(SIZE, -1)
        for r, old in enumerate(self.before):
            rows, at = slice(*self.starts[r : r + 2]), torch.arange(old)
            where = self.blocks[r].cpu()[at // BLOCK].long(), at % BLOCK
            key = torch.cat([old_key[where], self.key[rows]])
            value = torch.cat([old_value[where], self.value[rows]])
            seen = visible(self.lengths[r], len(key), True, -1 if sliding is None else sliding - 1)
            found[rows], _ = attend(self.query[rows], key, value, seen, 0.3)
        return found

    def written(self, before: torch.Tensor, left_out: set[int]) -> torch.Tensor:
        """What a cache holds once all rows but those are in it."""
        after = before.clone()
        for row, slot in enumerate(self.slots):
            if row not in left_out:
                both = torch.cat([self.key[row], self.value[row]], -1)
                after[slot // BLOCK, :, slot % BLOCK] = both
        return after


@pytest.mark.parametrize("sliding", [None, 5])
@pytest.mark.parametrize("splits", [32, 1])
def test_a_mixed_batch(flash, sliding, splits):
    """Drafts are read and left out of the cache; a prompt and a plain decode row are written."""
    batch = Batch(before=[3, 4, 0, 4], lengths=[3, 3, 5, 1], padding=4)
    batch.begin([2, 2, 0, 0])
    steps = batch.rig.steps
    reading = Reading(steps, steps.step.layout, captured=False)
    before = [cache.clone() for cache in batch.rig.caches]
    drafts = {1, 2, 4, 5}
    for layer, cache in enumerate(batch.rig.caches):
        batch.attend(reading, layer, sliding, splits)
        torch.testing.assert_close(batch.output, batch.expected(before[layer], sliding))
        assert cache.equal(batch.written(before[layer], drafts))
    assert steps.step.staged == list(steps.layers)
    for ref in steps.layers:
        for plane, rows in enumerate((batch.key, batch.value)):
            assert steps.window.rows_of(ref, plane)[list(drafts)].equal(rows[list(drafts)])
    # One call for all; sliding windows begin elsewhere for the drafts.
    wanted = [(True, 5)] if sliding is None else [(False, 3), (True, 5)]
    assert [(call["causal"], call["max_seqlen_q"]) for call in flash.calls] == 2 * wanted
    assert {call["num_splits"] for call in flash.calls} == {1 if splits == 1 else 0}
    assert flash.schedules == len(wanted)  # for both layers


def test_an_injected_fault_comes_by(flash):
    """Where ``kvtxn bench exactness`` lets the attention fail, a layer comes by."""
    batch = Batch(before=[3, 4, 0], lengths=[3, 3, 5])
    batch.begin([2, 2, 0])
    reading = Reading(batch.rig.steps, batch.rig.steps.step.layout, captured=False)
    with fault(batch.rig.steps, "attend", 1) as calls:
        batch.attend(reading, 0, None)
        with pytest.raises(InjectedFault):
            batch.attend(reading, 1, None)
    assert calls == [2]


def test_a_group_like_an_earlier_one(flash):
    """vLLM copies that one's metadata; blocks and slots are others, for the rows of both parts."""
    batch = Batch(before=[3, 4, 0], lengths=[3, 3, 5])
    batch.begin([2, 2, 0])
    steps, builder = batch.rig.steps, object.__new__(WindowFlashBuilder)
    first, other = batch.metadata(32), batch.blocks.roll(-1, 0)
    first.kvtxn = Reading(steps, steps.step.layout, captured=False)
    slots = torch.tensor([(at + 2 * BLOCK) % (6 * BLOCK) for at in batch.slots], device=DEVICE)
    second = builder.update_block_table(first, other, slots)
    for layer, metadata in enumerate((first, second)):
        batch.place(metadata.block_table)
        before = batch.rig.caches[layer].clone()
        *facts, _, output = batch.arguments(layer, None, 32)
        metadata.kvtxn.attend(*facts, metadata, output)
        torch.testing.assert_close(output, batch.expected(before, None))
        assert batch.rig.caches[layer].equal(batch.written(before, {1, 2, 4, 5}))


def test_uneven_drafts_and_nothing_else(flash):
    """No other request: one call per layer."""
    batch = Batch(before=[4, 2], lengths=[2, 4])
    batch.begin([1, 3])
    steps = batch.rig.steps
    reading = Reading(steps, steps.step.layout, captured=False)
    before = batch.rig.caches[0].clone()
    batch.attend(reading, 0, None)
    torch.testing.assert_close(batch.output, batch.expected(before, None))
    assert batch.rig.caches[0].equal(batch.written(before, {1, 3, 4, 5}))
    assert len(flash.calls) == 1


@pytest.mark.parametrize("sliding", [None, 6])
@pytest.mark.parametrize("shown", [True, False])
def test_a_captured_forward(flash, sliding, shown):
    """One forward serves a window, whose drafts wait, and a step without, that writes all."""
    batch = Batch(before=[3, 1], lengths=[4, 4])
    batch.begin([3, 3])
    steps = batch.rig.steps
    layout = steps.graph_layout(2, 4, 8)
    assert layout is steps.step.layout
    steps.window.show(layout if shown else None)
    reading = Reading(steps, layout, captured=True)
    before = batch.rig.caches[0].clone()
    batch.attend(reading, 0, sliding)
    torch.testing.assert_close(batch.output, batch.expected(before, sliding))
    drafts = {1, 2, 3, 5, 6, 7} if shown else set()
    assert batch.rig.caches[0].equal(batch.written(before, drafts))
    assert [call["num_splits"] for call in flash.calls] == [32]  # fixed, whatever a step has


def test_a_sliding_window_within_a_step_is_refused():
    """FlashAttention would see all that came before the step; nothing is hooked then."""
    steps = Rig("deferred").steps
    impl = SimpleNamespace(scale=0.3, logits_soft_cap=0, sliding_window=(steps.query_len - 1, 0))
    with pytest.raises(LayerError, match=r"sliding window of 'layer.0'.*more than 4"):
        hook_attention(steps, [SimpleNamespace(impl=impl)] * 2, [])
    assert not hasattr(impl, "kvtxn")


@pytest.mark.parametrize(("sliding", "slices"), [(None, 0), (5, 2)])
def test_later_layers_ask_torch_for_next_to_nothing(flash, monkeypatch, sliding, slices):
    """What layers share is made at the first; two calls slice query and output for the prefix."""
    batch = Batch(before=[3, 4, 0], lengths=[3, 3, 5], padding=4)
    batch.begin([2, 2, 0])
    steps, lse = batch.rig.steps, torch.zeros(GROUP * HEADS, 6, device=DEVICE)
    monkeypatch.setattr(steps, "attention", SimpleNamespace(merge_into=lambda *_: None))
    for name in ("flash_attn_varlen_func", "reshape_and_cache_flash"):
        monkeypatch.setattr(vllm_internals.flash_attention(), name, lambda *_, **__: (None, lse))
    reading = Reading(steps, steps.step.layout, captured=False)
    first, second = (batch.arguments(layer, sliding, 32) for layer in range(2))
    reading.attend(*first)
    with Calls() as calls:
        reading.attend(*second)
    assert calls.names == ["slice.Tensor"] * slices
