"""A launch that recurs: looked up once, then called with what was written down."""

from __future__ import annotations

import torch
from kvtxn.backends.jobs import ACCEPTED, Launch, Repeated


class Kernel:
    """Stands for a Triton function: notes how it is launched; compiled, likewise."""

    def __init__(self, *, compiles: bool) -> None:
        self.compiles = compiles
        self.launched: list[tuple[object, ...]] = []
        self.again: list[tuple[object, ...]] = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.launched.append((grid, *arguments, constants))
            return Compiled(self) if self.compiles else None

        return launch


class Compiled:
    """Stands for what a launch returns."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.again.append((grid, *arguments))


def repeated(*, compiles: bool) -> tuple[Kernel, list[object], Repeated]:
    """A kernel, the arguments of its first launch, and the launch."""
    kernel = Kernel(compiles=compiles)
    arguments: list[object] = [torch.zeros(2), *range(1, ACCEPTED)]
    arguments += [torch.zeros(3, dtype=torch.int32), torch.ones(2), 7]
    launch = Launch(kernel, (2, 3, 1), tuple(arguments), {"A": True, "B": 16}, 4)
    return kernel, arguments, Repeated(launch)


def test_the_first_launch_is_an_ordinary_one():
    """It is what compiles; only the acceptance is another's."""
    kernel, arguments, again = repeated(compiles=True)
    accepted = torch.ones(3, dtype=torch.int32)
    again.run(accepted)
    grid, *given, constants = kernel.launched[0]
    assert grid == (2, 3, 1)
    assert constants == {"A": True, "B": 16, "num_warps": 4}
    assert given[ACCEPTED] is accepted
    others = [*range(ACCEPTED), *range(ACCEPTED + 1, len(arguments))]
    assert all(given[place] is arguments[place] for place in others)


def test_later_ones_go_by_address():
    """Arguments and constants by position, tensors by address, the acceptance as it is."""
    kernel, arguments, again = repeated(compiles=True)
    again.run(torch.ones(3, dtype=torch.int32))
    accepted = torch.ones(5, dtype=torch.int32)
    again.run(accepted)
    assert len(kernel.launched) == 1
    [(grid, *given)] = kernel.again
    assert grid == (2, 3, 1)
    assert given[ACCEPTED] is accepted
    wanted = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in (*arguments, True, 16)]
    assert [*given[:ACCEPTED], *given[ACCEPTED + 1 :]] == [
        *wanted[:ACCEPTED],
        *wanted[ACCEPTED + 1 :],
    ]


def test_another_dtype_is_another_kernel():
    """What was compiled does not fit it, before or after."""
    kernel, _, again = repeated(compiles=True)
    again.run(torch.ones(3, dtype=torch.int64))
    again.run(torch.ones(3, dtype=torch.int32))
    again.run(torch.ones(3, dtype=torch.int64))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)
    again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 1)


def test_interpreted_kernels_have_nothing_compiled():
    """Each launch is an ordinary one."""
    kernel, _, again = repeated(compiles=False)
    for _ in range(3):
        again.run(torch.ones(3, dtype=torch.int32))
    assert (len(kernel.launched), len(kernel.again)) == (3, 0)
