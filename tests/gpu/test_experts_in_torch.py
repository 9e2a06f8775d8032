"""Routing in torch, beside loops over rows."""

from __future__ import annotations

import inspect

import experts_in_torch
import pytest
import torch
from engine_jobs import missing


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rows_are_ordered_by_expert(rows, block):
    """Whole blocks of each; every place once, and the rest is padding."""
    experts, top = 6, 2
    torch.manual_seed(rows)
    chosen = torch.rand(rows, experts).topk(top).indices.int()
    most = rows * top + experts * (block - 1)
    rows_of = torch.zeros(most, dtype=torch.int32)
    expert_of = torch.full((-(-most // block),), 99, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    experts_in_torch.moe_align_block_size(chosen, experts, block, rows_of, expert_of, total)
    wanted, blocks = [], []
    for expert in range(experts):
        mine = [i for i, each in enumerate(chosen.flatten().tolist()) if each == expert]
        count = -(-len(mine) // block)
        wanted += [*mine, *[rows * top] * (count * block - len(mine))]
        blocks += [expert] * count
    assert int(total) == len(wanted)
    assert rows_of[: len(wanted)].tolist() == wanted
    assert (rows_of[len(wanted) :] == rows * top).all()
    assert expert_of[: len(blocks)].tolist() == blocks
    assert int(expert_of.max()) < experts


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_likeliest_experts_are_chosen(renormalize):
    gates = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    weights, chosen, sources = torch.zeros(2, 2), *torch.zeros(2, 2, 2, dtype=torch.int32).unbind()
    experts_in_torch.topk_softmax(weights, chosen, sources, gates, renormalize)
    assert chosen.tolist() == [[1, 2], [0, 2]]
    assert sources.tolist() == [[0, 2], [1, 3]]
    shares = gates.softmax(-1).gather(1, chosen.long())
    assert torch.allclose(weights, shares / shares.sum(1, keepdim=True) if renormalize else shares)
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    parts = torch.randn(2, 2, 3).bfloat16()
    experts_in_torch.moe_sum(parts, out)
    assert torch.equal(out, (parts[:, 0].float() + parts[:, 1].float()).bfloat16())


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_vllms_operators_are_given_the_same():
    """As many arguments, in the same order."""
    from vllm import _custom_ops as own

    for name in ("topk_softmax", "moe_align_block_size", "moe_sum"):
        mine, theirs = (
            inspect.signature(getattr(each, name)).parameters.values()
            for each in (experts_in_torch, own)
        )
        assert [p.default for p in mine] == [p.default for p in theirs], name
