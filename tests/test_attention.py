"""Reading one's own writes: split attention equals attention over a full cache."""

from __future__ import annotations

import pytest
import torch
from kvtxn.backends.torch_executor import TorchExecutor
from small_caches import make_layers, noise, rows

from kvtxn import LayerError, LayerRef, TransactionManager, TxnConfig
from kvtxn.attention import merge, partial_attention
from kvtxn.executor import AttentionArgs
from kvtxn.testing import registered

TABLE = torch.tensor([[3, 0, 0], [1, 5, 0]])
LENGTHS = torch.tensor([3, 7])  # 3 rows in the window each: prefixes of 0 and 4
SLOTS = [[12, 13, 14], [20, 21, 22]]


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

    name = "failing"

    at = ""

    def stage(self, txn, layer):
        if self.at == "stage":
            raise RuntimeError("a test made this fail")
        super().stage(txn, layer)

    def attend(self, txn, layer, query, args):
        if self.at == "attend":
            raise RuntimeError("a test made this fail")
        return super().attend(txn, layer, query, args)


@pytest.mark.parametrize("own_block", [1, -1, 999])
@pytest.mark.parametrize("slots", [[16, 17, 18, 19], [16, -1, 18, -1]])
@pytest.mark.parametrize("at", ["stage", "attend"])
def test_after_a_fallback_attention_reads_what_it_read_before(monkeypatch, at, slots, own_block):
    """Also where the table need not name the window's own blocks, and rows have no slot."""
    seen = []
    for fails in ("", at):
        monkeypatch.setattr(Failing, "at", fails)
        torch.manual_seed(0)
        refs = [LayerRef(name, *torch.randn(2, 8, 16, 2, 8)) for name in "ab"]
        with registered(Failing) as backend:
            manager = TransactionManager(refs, TxnConfig(policy="deferred", backend=backend))
        table = torch.tensor([[0, own_block]], dtype=torch.int32)
        with manager.window(3, slots) as window:
            for ref in refs:
                window.stage(ref, *torch.randn(2, 4, 2, 8))
                seen.append(window.attend(ref, torch.randn(4, 4, 8), table, torch.tensor([20])))
            window.commit(1)
        assert window.fallback_reason == (fails or None)
    for healthy, ours in zip(seen[:2], seen[2:], strict=True):
        assert torch.allclose(ours, healthy, atol=1e-6)
