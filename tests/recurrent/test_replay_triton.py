"""The Triton executor replays states as the kit asks."""

from __future__ import annotations

import pytest

from kvtxn.testing import ReplayConformance


class TestTritonReplays(ReplayConformance):
    @pytest.fixture
    def backend(self, triton_executor):
        return triton_executor

    @pytest.fixture
    def device(self, kernel_device):
        return kernel_device
