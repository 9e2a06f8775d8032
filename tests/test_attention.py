"""Reading one's own writes: split attention equals attention over a full cache."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from small_caches import BLOCK_SIZE, HEAD_SIZE, HEADS, make_layers, noise, rows

from kvtxn import LayerError, LayerRef, TransactionManager, TxnConfig, registry
from kvtxn.attention import merge, partial_attention
from kvtxn.executor import AttentionArgs

TABLE = torch.tensor([[3, 0, 0], [1, 5, 0]])
LENGTHS = torch.tensor([3, 7])  # 3 rows in the window each: prefixes of 0 and 4
SLOTS = [[12, 13, 14], [20, 21, 22]]


def naive(query, key, value, window=None, cap=None):
    """Attention of the last rows of a sequence, straight from the definition."""
    groups = query.shape[1] // key.shape[1]
    start = key.shape[0] - query.shape[0]
    out = torch.empty(*query.shape[:2], value.shape[2])
    for i in range(query.shape[0]):
        first = 0 if window is None else max(0, start + i + 1 - window)
        for head in range(query.shape[1]):
            keys = key[first : start + i + 1, head // groups]
            scores = keys @ query[i, head] / query.shape[2] ** 0.5
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            out[i, head] = torch.softmax(scores, 0) @ value[first : start + i + 1, head // groups]
    return out


@pytest.mark.parametrize("policy", ["deferred", "undo", "direct"])
@pytest.mark.parametrize("query_heads", [2, 6])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (2, None), (4, None), (None, 0.7)])
def test_own_writes(policy, query_heads, window, cap):
    """Every policy sees prefix and window, grouped queries, sliding window and soft cap."""
    ref = make_layers(1)[0]
    manager = TransactionManager([ref], TxnConfig(policy=policy))
    key, value = rows(6)
    query = noise(6, query_heads, HEAD_SIZE)
    prefix = [ref.key_cache[1].clone(), ref.value_cache[1].clone()]
    with manager.window(2, torch.tensor(SLOTS).flatten()) as w:
        w.stage(ref, key, value)
        out = w.attend(ref, query, TABLE, LENGTHS, sliding_window=window, soft_cap=cap)
        w.commit(0)
    first = naive(query[:3], key[:3], value[:3], window, cap)
    second = naive(
        query[3:],
        torch.cat([prefix[0], key[3:]]),
        torch.cat([prefix[1], value[3:]]),
        window,
        cap,
    )
    torch.testing.assert_close(out, torch.cat([first, second]), rtol=1e-5, atol=1e-5)


def test_nan_in_stale_rows_does_not_leak():
    """Rows past the prefix are masked, whatever they hold."""
    ref = make_layers(1)[0]
    ref.key_cache[3], ref.value_cache[3] = torch.nan, torch.inf
    manager = TransactionManager([ref], TxnConfig(policy="deferred"))
    with manager.window([2], torch.tensor(SLOTS[0])) as w:
        w.stage(ref, *rows(3))
        out = w.attend(ref, noise(3, HEADS, HEAD_SIZE), TABLE[:1], LENGTHS[:1])
        w.abort()
    assert out.isfinite().all()


def test_quantised_rows_read_as_they_will_be_stored():
    """An own read before commit equals a read after it."""
    cache = torch.zeros(6, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=torch.int8)
    ref = LayerRef("a", cache, cache.clone(), k_scale=0.02, v_scale=0.03)
    query = noise(3, HEADS, HEAD_SIZE)
    manager = TransactionManager([ref], TxnConfig(policy="deferred"))
    outputs = []
    staged = rows(3)
    for accepted in (2, 2):
        with manager.window([2], torch.tensor(SLOTS[0])) as w:
            w.stage(ref, *staged)
            outputs.append(w.attend(ref, query, TABLE[:1], LENGTHS[:1]))
            w.commit(accepted)
    direct = TransactionManager([ref], TxnConfig(policy="direct"))
    with direct.window([2], torch.tensor(SLOTS[0])) as w:
        w.stage(ref, *staged)
        outputs.append(w.attend(ref, query, TABLE[:1], LENGTHS[:1]))
        w.commit(2)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=1e-5, atol=1e-6)
    assert torch.equal(outputs[0], outputs[1])


def test_merging_with_an_empty_part_changes_nothing():
    """A part that sees no key weighs nothing."""
    args = AttentionArgs(block_table=TABLE, seq_lens=LENGTHS, scale=1.0)
    query, (key, value) = noise(2, 2, 8), rows(3)
    where = torch.arange(3)
    full = torch.ones(3, dtype=torch.bool)
    part = partial_attention(query, key, value, torch.tensor([1, 2]), where, full, args)
    empty = partial_attention(query, key, value, torch.tensor([1, 2]), where, ~full, args)
    assert empty[1].eq(-torch.inf).all()
    assert torch.equal(merge([part, empty]), merge([part]))
    assert merge([empty]).eq(0).all()


@pytest.mark.parametrize(
    ("query", "table", "lengths"),
    [
        (noise(5, 2, 8), TABLE, LENGTHS),
        (noise(6, 3, 8), TABLE, LENGTHS),
        (noise(6, 2, 4), TABLE, LENGTHS),
        (noise(6, 2, 8), TABLE[:1], LENGTHS),
        (noise(6, 2, 8), TABLE, LENGTHS[:1]),
    ],
)
def test_misfits_are_refused(query, table, lengths):
    """Query, block table and lengths must fit the window."""
    ref = make_layers(1)[0]
    with TransactionManager([ref]).window(2, torch.tensor(SLOTS).flatten()) as w:
        w.stage(ref, *rows(6))
        with pytest.raises(LayerError, match="attend"):
            w.attend(ref, query, table, lengths)
        w.abort()


def test_a_layer_must_be_staged_first():
    """There is nothing of it to read yet."""
    layers = make_layers(2)
    with TransactionManager(layers).window(2, torch.tensor(SLOTS).flatten()) as w:
        w.stage(layers[0], *rows(6))
        with pytest.raises(LayerError, match="not staged"):
            w.attend(layers[1], noise(6, 2, 8), TABLE, LENGTHS)
        w.abort()


class Failing(TorchExecutor):
    """Fails at one operation."""

    at = ""

    def stage(self, txn, layer):
        if self.at == "stage":
            raise RuntimeError("a test made this fail")
        super().stage(txn, layer)

    def attend(self, txn, layer, query, args):
        if self.at == "attend":
            raise RuntimeError("a test made this fail")
        return super().attend(txn, layer, query, args)


@pytest.fixture
def failing():
    """The name of an executor that fails where it is told."""
    registry.register("failing", Failing)
    yield "failing"
    registry.unregister("failing")


@pytest.mark.parametrize("own_block", [1, -1, 999])
@pytest.mark.parametrize("slots", [[16, 17, 18, 19], [16, -1, 18, -1]])
@pytest.mark.parametrize("at", ["stage", "attend"])
def test_after_a_fallback_attention_reads_what_it_read_before(
    monkeypatch, failing, at, slots, own_block
):
    """Also where the table need not name the window's own blocks, and rows have no slot."""
    seen = []
    for fails in ("", at):
        monkeypatch.setattr(Failing, "at", fails)
        torch.manual_seed(0)
        refs = [LayerRef(name, *torch.randn(2, 8, 16, 2, 8)) for name in "ab"]
        manager = TransactionManager(refs, TxnConfig(policy="deferred", backend=failing))
        table = torch.tensor([[0, own_block]], dtype=torch.int32)
        with manager.window(3, slots) as window:
            for ref in refs:
                window.stage(ref, *torch.randn(2, 4, 2, 8))
                seen.append(window.attend(ref, torch.randn(4, 4, 8), table, torch.tensor([20])))
            window.commit(1)
        assert window.fallback_reason == (fails or None)
    for healthy, ours in zip(seen[:2], seen[2:], strict=True):
        assert torch.allclose(ours, healthy, atol=1e-6)
