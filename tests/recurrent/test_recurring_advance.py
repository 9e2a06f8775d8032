"""Commits that recur: the same states as the reference, and what the driver is given."""

from __future__ import annotations

import pytest
import torch
from kernel_driver import Driver
from kernels_here import ON_GPU, importing_kernels
from verify_steps import DELTA

with importing_kernels():
    from kvtxn.backends.gated_delta import DeltaLayers, recurring, reference
    from kvtxn.backends.launching import kernel_call
    from kvtxn.backends.launching.kernel_call import KernelCall

DEVICE = "cuda" if ON_GPU else "cpu"
LENGTHS, SLOTS = [4, 1, 3, 2], [1, 2, 3, 4]


class Steps:
    """Two layers of two groups, whose tables have room for more requests than a step has."""

    def __init__(self, *, crossing: bool = False) -> None:
        self.cases = [
            DELTA.make(LENGTHS, SLOTS, device=DEVICE, slots=16, seed=seed) for seed in range(2)
        ]
        for case in self.cases:
            DELTA.verify(case)
        kept = [case.kept for case in self.cases]
        self.expected = [case.given["state"].clone() for case in self.cases]
        self.mine = DeltaLayers.build([case.given["state"] for case in self.cases], kept, [0, 1])
        self.other = DeltaLayers.build(self.expected, kept, [0, 1])
        self.starts = self.cases[0].given["starts"]
        sources = torch.zeros(2, 6, 5, dtype=torch.int32, device=DEVICE)
        sources[:, :4, -1] = torch.tensor([SLOTS, SLOTS[::-1]])
        self.sources = sources[:, :, -1]
        self.more = {"boundary": None, "snapshots": None}
        if crossing:
            ends = torch.tensor([2, 2, 3, 1, 9, 9], dtype=torch.int32, device=DEVICE)
            blocks = torch.tensor([[9, 10, 11, 12, 0, 0], [13, 0, 14, 15, 0, 0]])
            self.more = {"boundary": ends, "snapshots": blocks.int().to(DEVICE)}
        self.launch = recurring.RecurringAdvance(self.mine, self.sources, 4, **self.more)

    def assert_step(self, sampled: list[int], dtype: torch.dtype = torch.int32) -> None:
        counts = torch.tensor(sampled, dtype=dtype, device=DEVICE)
        number = len(sampled)
        self.launch.run(counts, self.starts, number)
        more = {name: None if part is None else part[..., :number]
                for name, part in self.more.items()}  # fmt: skip
        at_least = counts.clamp(min=1).int()
        reference.advance_gated_delta(
            *(self.other, self.sources[:, :number], at_least, self.starts[: number + 1]), **more
        )
        for mine, wanted in zip(self.mine.states, self.expected, strict=True):
            assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("crossing", [False, True], ids=["alone", "with snapshots"])
def test_states_are_the_references(crossing):
    """One row is kept at least, and no more than there are; steps differ in all that they may."""
    steps = Steps(crossing=crossing)
    steps.assert_step([3, 1, 2, 2])
    steps.assert_step([0, 4, 9, 1], torch.int64)
    steps.assert_step([4, 0])
    steps.assert_step([1, 1, 1, 1])


@pytest.fixture
def packed(monkeypatch):
    """A launch that was packed; Triton's own launches are noted, and make none."""
    calls = []
    monkeypatch.setattr(KernelCall, "run", lambda call: calls.append(call) or "compiled")
    monkeypatch.setattr(kernel_call, "RepeatedLaunch", Driver)
    steps = Steps()
    steps.launch.run(torch.ones(4, dtype=torch.int32, device=DEVICE), steps.starts, 4)
    assert steps.launch.again.launched == []
    return steps, calls


def test_the_driver_is_given_what_differs(packed):
    """Numbers of requests, and where counts and first rows are; all else stays."""
    steps, calls = packed
    [first] = calls
    given = [each for name, each in first.arguments.items() if not name.isupper()]
    counts = torch.ones(8, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(12, dtype=torch.int32, device=DEVICE)
    steps.launch.run(counts, starts, 3)
    [(words, grid)] = steps.launch.again.launched
    assert len(calls) == 1
    assert grid == [first.grid[0], 3, 2]
    names = [name for name in first.arguments if not name.isupper()]
    assert words[names.index("count")] == counts.data_ptr()
    assert words[names.index("starts")] == starts.data_ptr()
    for name, word, each in zip(names, words, given, strict=True):
        if name not in ("count", "starts"):
            assert word == (each.data_ptr() if isinstance(each, torch.Tensor) else each), name


def test_triton_launches_what_was_compiled_for_other_addresses(packed):
    """An address that is no multiple of 16 wants another kernel; the packed one stays."""
    steps, calls = packed
    odd = torch.ones(9, dtype=torch.int32, device=DEVICE)[1:]
    driver = steps.launch.again
    steps.launch.run(odd, steps.starts, 4)
    assert len(calls) == 2
    assert calls[-1].arguments["count"] is odd
    assert steps.launch.again is driver
    assert driver.launched == []
