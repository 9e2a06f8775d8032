"""Attention over cache and window: however the work is divided, it gives the same."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from kernels_here import importing_kernels

from kvtxn import LayerRef
from kvtxn.attention import attend
from kvtxn.executor import AttentionArgs
from kvtxn.layout import RowLayout

pytest.importorskip("triton")

with importing_kernels():
    from kvtxn.backends.attention import launch as attention_launch

BLOCKS, BLOCK, HEADS, GROUP, SIZE = 60, 4, 2, 3, 16
DRAFTS, SETTLED, PASTS = (3, 0, 2), (1, 1, 2), (61, 9, 0)
MOST = -(-max(PASTS) // BLOCK) + 1

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": {"sliding_window": 17},
    "capped": {"soft_cap": 1.5},
}


class Case:
    """Requests of different lengths over one packed cache."""

    def __init__(self, device: str, drafts=DRAFTS, pasts=PASTS, **settings) -> None:
        made = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(device)

        self.cache = noise(BLOCKS, HEADS, BLOCK, 2 * SIZE)
        self.ref = LayerRef("layer", *self.cache.transpose(1, 2).split(SIZE, -1))
        self.layout = RowLayout.build(drafts, SETTLED, torch.device(device))
        rows = self.layout.num_rows
        self.query = noise(rows, HEADS * GROUP, SIZE)
        self.fresh = (noise(rows, HEADS, SIZE), noise(rows, HEADS, SIZE))
        requests = len(drafts)
        blocks = torch.randperm(BLOCKS, generator=made)[: requests * MOST].view(requests, MOST)
        lengths = [sum(parts) for parts in zip(pasts, drafts, SETTLED, strict=True)]
        self.args = AttentionArgs(
            block_table=blocks.to(device, torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            scale=0.3,
            **settings,
        )

    def far(self, got: torch.Tensor) -> list[float]:
        """The values that are not near enough to those of the reference."""
        wanted = attend(self.layout, self.ref.planes, self.fresh, self.query, self.args)
        return got[~torch.isclose(got, wanted, atol=1e-4)].tolist()


@pytest.fixture
def launcher(kernel_device, triton_executor):
    """The launcher of this device."""
    from kvtxn.backends.attention.launch import AttentionLauncher

    return AttentionLauncher(torch.device(kernel_device))


def divide(monkeypatch, splits: int) -> None:
    """Let launches have so many slices."""
    own = attention_launch.tile_for

    def divided(*facts, **others):
        return attrs.evolve(own(*facts, **others), splits=splits)

    monkeypatch.setattr(attention_launch, "tile_for", divided)


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_slices_of_the_cache(monkeypatch, launcher, kernel_device, splits, how):
    """One slice ends in the output; several are combined; some of them see nothing."""
    case = Case(kernel_device, **SETTINGS[how])
    divide(monkeypatch, splits)
    got = launcher.attend(case.layout, case.ref, case.query, case.fresh, case.args)
    assert case.far(got) == []


@pytest.mark.parametrize("splits", [1, 4])
def test_a_request_with_many_drafts(monkeypatch, launcher, kernel_device, splits):
    """Several blocks of rows per request, and requests without any drafts or past."""
    case = Case(kernel_device, drafts=(18, 1, 0), pasts=(40, 9, 0))
    divide(monkeypatch, splits)
    got = launcher.attend(case.layout, case.ref, case.query, case.fresh, case.args)
    assert case.far(got) == []
