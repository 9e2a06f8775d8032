"""A stand-in for a kernel's launch that recurs: it notes what the driver would be given."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Driver:
    """Stands for ``RepeatedLaunch``, and notes what would be launched."""

    def __init__(self, compiled, grid, arguments, constants, device):
        self.words = [
            each.data_ptr() if isinstance(each, torch.Tensor) else each
            for each in arguments[: len(arguments) - constants]
        ]
        self.programs = [SimpleNamespace(value=size) for size in grid]
        self.launched = []

    def run(self) -> None:
        self.launched.append((list(self.words), [each.value for each in self.programs]))
