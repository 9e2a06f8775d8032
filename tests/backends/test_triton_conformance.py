"""The Triton executor keeps every promise of the kit."""

from __future__ import annotations

import pytest
from kernel_kit import KernelConformance


class TestTriton(KernelConformance):
    @pytest.fixture
    def backend(self, triton_executor):
        return triton_executor
