"""Attention over cache and window: however the work is divided, it gives the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtxn import LayerRef
from kvtxn.attention import attend
from kvtxn.executor import AttentionArgs
from kvtxn.layout import RowLayout

pytest.importorskip("triton")

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

    def __init__(
        self, device: str, drafts=DRAFTS, settled=SETTLED, pasts=PASTS, **settings
    ) -> None:
        made = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(device)

        self.cache = noise(BLOCKS, HEADS, BLOCK, 2 * SIZE)
        self.ref = LayerRef("layer", *self.cache.transpose(1, 2).split(SIZE, -1))
        self.layout = RowLayout.build(drafts, settled, torch.device(device))
        rows = self.layout.num_rows
        self.query = noise(rows, HEADS * GROUP, SIZE)
        self.fresh = (noise(rows, HEADS, SIZE), noise(rows, HEADS, SIZE))
        requests = len(drafts)
        blocks = torch.randperm(BLOCKS, generator=made)[: requests * MOST].view(requests, MOST)
        lengths = [sum(parts) for parts in zip(pasts, drafts, settled, strict=True)]
        self.slots = torch.tensor(
            [
                int(blocks[request, place // BLOCK]) * BLOCK + place % BLOCK
                for request, (past, length) in enumerate(zip(pasts, lengths, strict=True))
                for place in range(past, length)
            ],
            device=device,
        )
        self.args = AttentionArgs(
            block_table=blocks.to(device, torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            scale=0.3,
            **settings,
        )

    def check(self, got: torch.Tensor) -> None:
        """Against the reference."""
        wanted = attend(self.layout, self.ref.planes, self.fresh, self.query, self.args)
        assert torch.allclose(got, wanted, atol=1e-4), (got - wanted).abs().max()


@pytest.fixture
def launcher(kernel_device, triton_executor):
    """The launcher of this device."""
    from kvtxn.backends.attention_launch import AttentionLauncher

    return AttentionLauncher(torch.device(kernel_device))


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_slices_of_the_cache(monkeypatch, launcher, kernel_device, splits, how):
    """One slice ends in the output; several are combined; some of them see nothing."""
    case = Case(kernel_device, **SETTINGS[how])
    monkeypatch.setattr(launcher, "_splits", lambda *_: splits)
    case.check(launcher.attend(case.layout, case.ref, case.query, case.fresh, case.args))


@pytest.mark.parametrize("splits", [1, 4])
def test_settled_rows_are_written_once(monkeypatch, launcher, kernel_device, splits):
    """By the last slice alone, to their slots; padding and drafts nowhere."""
    case = Case(kernel_device)
    case.slots[case.layout.starts[2]] = -1
    expected = case.cache.clone()
    for row, slot in enumerate(case.slots.tolist()):
        if slot >= 0 and int(case.layout.position[row]) < 0:
            expected[slot // BLOCK, :, slot % BLOCK, :SIZE] = case.fresh[0][row]
            expected[slot // BLOCK, :, slot % BLOCK, SIZE:] = case.fresh[1][row]
    monkeypatch.setattr(launcher, "_splits", lambda *_: splits)
    facts = (case.layout, case.ref, case.query, case.fresh, case.args)
    case.check(launcher.attend(*facts, slots=case.slots))
    assert torch.equal(case.cache, expected)


@pytest.mark.parametrize("drafts", [(3, 0, 2), (18, 1, 0)])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_prefix_of_somebody_elses(monkeypatch, launcher, kernel_device, drafts, splits):
    """Short requests or long: another kernel, the same result."""
    case = Case(kernel_device, drafts, pasts=(40, 9, 0))
    monkeypatch.setattr(launcher, "_splits", lambda *_: splits)
    prefix = launcher.prefix(case.layout, case.ref, case.query, case.args)
    facts = (case.layout, case.ref, case.query, case.fresh, prefix, case.args)
    case.check(launcher.merge(*facts))
