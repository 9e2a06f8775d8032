"""A launch that recurs: looked up once, then called with what was noted down."""

from __future__ import annotations

import torch
from kvtxn.backends.move_rows.launch import CachedLaunch, KernelCall


class Kernel:
    """Stands for a Triton function: notes how it is launched; compiled, likewise."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.launched: list[tuple[object, ...]] = []
        self.again: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launched.append((grid, num_warps, *arguments))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    """Stands for what a launch returns."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.again.append((grid, *arguments))


def cached(*, compiles: bool) -> tuple[Kernel, dict[str, object], CachedLaunch]:
    """A kernel, the arguments of its first launch, and the launch."""
    kernel = Kernel(compiles=compiles)
    arguments: dict[str, object] = {
        "planes": torch.zeros(2),
        "first_address": 16,
        "accepted": torch.zeros(3, dtype=torch.int32),
        "counters": torch.ones(2),
        "num_rows": 7,
        "A": True,
        "B": 16,
    }
    return kernel, arguments, CachedLaunch(KernelCall(kernel, (2, 3, 1), arguments, 4))


def test_the_first_launch_is_an_ordinary_one():
    """It is what compiles; only the acceptance is another's."""
    kernel, arguments, again = cached(compiles=True)
    accepted = torch.ones(3, dtype=torch.int32)
    again.run(accepted)
    [(grid, warps, *given)] = kernel.launched
    assert (grid, warps) == ((2, 3, 1), 4)
    wanted = arguments | {"accepted": accepted}
    assert all(got is value for got, value in zip(given, wanted.values(), strict=True))


def test_later_ones_go_by_address():
    """Arguments and constants by position, tensors by address, the acceptance as it is."""
    kernel, arguments, again = cached(compiles=True)
    again.run(torch.ones(3, dtype=torch.int32))
    accepted = torch.ones(5, dtype=torch.int32)
    again.run(accepted)
    assert len(kernel.launched) == 1
    [(grid, *given)] = kernel.again
    assert grid == (2, 3, 1)
    at = list(arguments).index("accepted")
    assert given.pop(at) is accepted
    others = [value for name, value in arguments.items() if name != "accepted"]
    assert given == [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in others]


def test_another_dtype_is_another_kernel():
    """A kernel that was compiled does not fit it, before or after."""
    kernel, _, again = cached(compiles=True)
    again.run(torch.ones(3, dtype=torch.int64))
    again.run(torch.ones(3, dtype=torch.int32))
    again.run(torch.ones(3, dtype=torch.int64))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)
    again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 1)


def test_interpreted_kernels_have_nothing_compiled():
    """Each launch is an ordinary one."""
    kernel, _, again = cached(compiles=False)
    for _ in range(3):
        again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)
