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
    from kvtxn.backends import attention_launch, window_launch
    from kvtxn.backends.attention_shapes import Keep, Prefix, WindowForm

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
        self, device: str, drafts=DRAFTS, pasts=PASTS, *, dtype=torch.float32, **settings
    ) -> None:
        made = torch.Generator().manual_seed(3)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made).to(device, dtype)

        self.cache = noise(BLOCKS, HEADS, BLOCK, 2 * SIZE)
        self.ref = LayerRef("layer", *self.cache.transpose(1, 2).split(SIZE, -1))
        self.layout = RowLayout.build(drafts, SETTLED, torch.device(device))
        rows = self.layout.num_rows
        self.query = noise(rows, HEADS * GROUP, SIZE)
        self.fresh = (noise(rows, HEADS, SIZE), noise(rows, HEADS, SIZE))
        requests = len(drafts)
        blocks = torch.randperm(BLOCKS, generator=made)[: requests * MOST].view(requests, MOST)
        lengths = [sum(parts) for parts in zip(pasts, drafts, SETTLED, strict=True)]
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

    def settled_cache(self, position: torch.Tensor | None = None) -> torch.Tensor:
        """The cache once settled rows are written, one of which gets no slot here."""
        position = self.layout.position if position is None else position
        self.slots[self.layout.starts[2]] = -1
        expected = self.cache.clone()
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0 and int(position[row]) < 0:
                expected[slot // BLOCK, :, slot % BLOCK, :SIZE] = self.fresh[0][row]
                expected[slot // BLOCK, :, slot % BLOCK, SIZE:] = self.fresh[1][row]
        return expected

    def check(self, got: torch.Tensor) -> None:
        """Against the reference."""
        wanted = attend(self.layout, self.ref.planes, self.fresh, self.query, self.args)
        atol = 1e-4 if got.dtype is torch.float32 else 2e-3
        assert torch.allclose(got, wanted, atol=atol), (got - wanted).abs().max()


@pytest.fixture
def launcher(kernel_device, triton_executor):
    """The launcher of this device."""
    from kvtxn.backends.attention_launch import AttentionLauncher

    return AttentionLauncher(torch.device(kernel_device))


def divide(monkeypatch, splits: int) -> None:
    """Let launches have so many slices."""
    own = attention_launch.paged_tile

    def divided(*facts, **others):
        return attrs.evolve(own(*facts, **others), splits=splits)

    monkeypatch.setattr(attention_launch, "paged_tile", divided)


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_slices_of_the_cache(monkeypatch, launcher, kernel_device, splits, how):
    """One slice ends in the output; several are combined; some of them see nothing."""
    case = Case(kernel_device, **SETTINGS[how])
    divide(monkeypatch, splits)
    case.check(launcher.attend(case.layout, case.ref, case.query, case.fresh, case.args))


@pytest.mark.parametrize("splits", [1, 4])
def test_settled_rows_are_written_once(monkeypatch, launcher, kernel_device, splits):
    """By the last slice alone, to their slots; padding and drafts nowhere."""
    case = Case(kernel_device)
    expected = case.settled_cache()
    divide(monkeypatch, splits)
    facts = (case.layout, case.ref, case.query, case.fresh, case.args)
    case.check(launcher.attend(*facts, slots=case.slots))
    assert torch.equal(case.cache, expected)


FORMS = {
    "row by row": WindowForm(1, 16, 16, 1),
    "whole requests": WindowForm(4, 16, 16, 1),
    "in slices": WindowForm(2, 16, 16, 2),
}


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_window_kernel(monkeypatch, launcher, kernel_device, form, how):
    """The same output, staged rows and settled rows, however the work is divided."""
    case = Case(kernel_device, **SETTINGS[how])
    monkeypatch.setattr(window_launch, "window_form", lambda *_: FORMS[form])
    prefix = launcher.prefix(case.layout, case.ref, case.query, case.args)
    expected = case.settled_cache()
    buffers = tuple(torch.full_like(each, 7.0) for each in case.fresh)
    keep = Keep(case.slots, case.layout.position, buffers)
    facts = (case.layout, case.ref, case.query, case.fresh, prefix, case.args)
    case.check(launcher.merge(*facts, keep))
    assert torch.equal(case.cache, expected)
    assert all(map(torch.equal, buffers, case.fresh))


@pytest.mark.parametrize("drafts", [(3, 0, 2), (18, 1, 0)])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_prefix_of_somebody_elses(monkeypatch, launcher, kernel_device, drafts, splits):
    """Short requests or long: another kernel, the same result."""
    case = Case(kernel_device, drafts, pasts=(40, 9, 0))
    divide(monkeypatch, splits)
    prefix = launcher.prefix(case.layout, case.ref, case.query, case.args)
    facts = (case.layout, case.ref, case.query, case.fresh, prefix, case.args)
    case.check(launcher.merge(*facts))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_after_flash_attention(monkeypatch, launcher, kernel_device, form, marked):
    """Its output becomes all; +inf where a row saw no key; unmarked drafts are written as well."""
    case = Case(kernel_device, dtype=torch.float16)
    monkeypatch.setattr(window_launch, "window_form", lambda *_: FORMS[form])
    divide(monkeypatch, 1)
    own = launcher.prefix(case.layout, case.ref, case.query, case.args)
    blind = own.lse[0].isneginf()
    assert blind.any()
    rows, heads = blind.shape
    out = case.query.new_full((rows + 3, heads, SIZE), 7.0)  # others follow in a batch
    lse = own.lse.new_full((heads, rows + 3), float("nan"))
    out[:rows] = own.out[0].masked_fill(blind.unsqueeze(-1), float("nan"))
    lse[:, :rows] = own.lse[0].masked_fill(blind, float("inf")).t()
    position = case.layout.position if marked else torch.full_like(case.layout.position, -1)
    expected = case.settled_cache(position)
    prefix = Prefix.single(out[:rows], lse[:, :rows])
    facts = (case.layout, case.ref, case.query, case.fresh, prefix, case.args)
    got = launcher.merge(*facts, Keep(case.slots, position), output=out[:rows])
    assert got.data_ptr() == out.data_ptr()
    case.check(got)
    assert torch.equal(out[rows:], torch.full_like(out[rows:], 7.0))
    assert torch.equal(case.cache, expected)
