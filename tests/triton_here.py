"""The Triton executor that runs here."""

from __future__ import annotations

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    from kvtxn.backends.triton_executor import TritonExecutor


class InterpretedTriton(TritonExecutor):
    """The same kernels, run by Triton's interpreter; for tests only."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """It runs anywhere."""
        return None


@pytest.fixture
def kernel_device() -> str:
    """The device that kernels run on."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def triton_executor() -> type[TritonExecutor]:
    """The Triton executor that runs here."""
    return TritonExecutor if ON_GPU else InterpretedTriton
