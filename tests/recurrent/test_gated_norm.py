"""The gated norm in one launch is that of torch, beside gates whose rows lie apart."""

from __future__ import annotations

import sys

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    from kvtxn.backends.gated_delta.gated_norm import gated_norm

DEVICE = "cuda" if ON_GPU else "cpu"


def expected(x, gate, weight, eps, *, sigmoid):
    x, gate = x.double(), gate.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return normed * torch.sigmoid(gate) * (1 if sigmoid else gate)


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 4, 128), (5, 6, 24), (3, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normed_in_place(rows, heads, size, dtype, sigmoid):
    torch.manual_seed(0)
    width = heads * size
    whole = torch.randn(rows, width + 8, device=DEVICE).to(dtype)
    gates = torch.randn(rows, 3 * width, device=DEVICE).to(dtype)
    x, gate = (part[:, :width].unflatten(1, (heads, size)) for part in (whole, gates))
    weight = torch.rand(size, device=DEVICE) + 0.5
    right, beside = expected(x, gate, weight, 1e-6, sigmoid=sigmoid), whole[:, width:].clone()
    gated_norm(x, gate, weight, 1e-6, sigmoid=sigmoid)
    near = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts bfloat16 off
    assert ((x - right).abs() <= near * right.abs() + 1e-6).all()
    assert torch.equal(whole[:, width:], beside)


def test_nothing_is_launched_for_no_row(monkeypatch):
    """A stand-in for the kernel cannot be launched; with a row it would have been."""
    monkeypatch.setattr(sys.modules[gated_norm.__module__], "norm_rows", None)
    x, weight = torch.zeros(1, 4, 16, device=DEVICE), torch.ones(16, device=DEVICE)
    gated_norm(x[:0], x[:0], weight, 1e-6, sigmoid=True)
    with pytest.raises(TypeError):
        gated_norm(x, x, weight, 1e-6, sigmoid=True)


def test_a_batch_may_have_more_rows_than_the_second_axis_of_a_grid(monkeypatch):
    """CUDA takes 65 535 programs along it."""
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(sys.modules[gated_norm.__module__], "norm_rows", Launches())
    x = torch.zeros(1, 1, 1).expand(70_000, 16, 8)
    gated_norm(x, x, torch.ones(8), 1e-6, sigmoid=True)
    [grid] = grids
    assert grid[0] == 70_000
    assert max(grid[1:]) < 65_536
