"""Autotuned kernels of engines under test: the first configuration that runs is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from first_configs import take_first_configs
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    import triton
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    @triton.jit
    def note_width(out, length, WIDTH: tl.constexpr):
        """Write the width that was chosen, once for each launch."""
        tl.store(out, WIDTH)
        tl.store(out + 1, tl.load(out + 1) + 1)


DEVICE = "cuda" if ON_GPU else "cpu"


class TooWide:
    """A kernel of which wide configurations do not fit the GPU."""

    def __init__(self, limit: int) -> None:
        self.fn, self.widest, self.asked = note_width, limit, list[int]()

    def run(self, *args: Any, WIDTH: int, **options: Any) -> None:
        """Launch, or fail as Triton does."""
        self.asked.append(WIDTH)
        width = WIDTH
        if width > self.widest:
            raise OutOfResources(width, self.widest, "shared memory")
        note_width.run(*args, WIDTH=WIDTH, grid=options["grid"], warmup=False)


def tuned(limit: int, restored: list[str] | None = None, **options: Any) -> tuple[TooWide, Any]:
    """A kernel with four configurations, and its tuner, which takes the first that runs."""

    class Tuner(Autotuner):
        pass

    take_first_configs(Tuner)
    take_first_configs(Tuner)  # a second call changes nothing
    kernel = TooWide(limit)
    configs = [triton.Config({"WIDTH": width}) for width in (64, 32, 16, 8)]
    names = ["out", "length", "WIDTH"]
    return kernel, Tuner(kernel, names, configs, ["length"], [], restored, **options)


@pytest.mark.parametrize(
    ("limit", "options", "asked"),
    [
        (64, {}, [64]),
        (32, {}, [64, 32]),
        (64, {"prune_configs_by": {"early_config_prune": lambda all, *_, **__: all[2:]}}, [16]),
        (64, {"cache_results": True}, [64]),
    ],
    ids=["first", "fits", "pruned", "results-on-disk"],
)
def test_the_first_configuration_that_runs_is_chosen(
    limit: int, options: Any, asked: list[int]
) -> None:
    """Those after it are not tried, and the choice is kept for each key."""
    kernel, tuner = tuned(limit, **options)
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for length, launches in ((5, 2), (5, 3), (7, 5)):
        tuner[1,](out, length)
        assert out.tolist() == [asked[-1], launches]
    assert kernel.asked == [*asked, asked[-1], asked[-1], *asked, asked[-1]]


def test_a_kernel_without_a_configuration_that_runs_fails_as_it_does_without_this() -> None:
    """Triton launches one of them, and so its error is seen."""
    _, tuner = tuned(4)
    with pytest.raises(OutOfResources):
        tuner[1,](torch.zeros(2, dtype=torch.int32, device=DEVICE), 5)


def test_restored_values_are_as_before_the_choice() -> None:
    """Tensors that a kernel writes in place are put back after the trial, as Triton does it."""
    _, tuner = tuned(64, ["out"])
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    tuner[1,](out, 5)
    assert out.tolist() == [64, 1]
