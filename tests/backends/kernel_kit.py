"""The conformance kit for executors that launch kernels."""

from __future__ import annotations

from typing import Any

import pytest
from kernels_here import ON_GPU

from kvtxn.testing import ExecutorConformance
from kvtxn.testing.kit import TRANSACTIONAL, Kit


class KernelConformance(ExecutorConformance):
    """Where the kernels run, with as many random examples as that allows; supply ``backend``."""

    @pytest.fixture
    def device(self, kernel_device: str) -> str:
        return kernel_device

    @pytest.fixture
    def program_settings(self, kernel_program_settings: Any) -> Any:
        return kernel_program_settings

    @pytest.fixture
    def tree_settings(self, kernel_tree_settings: Any) -> Any:
        return kernel_tree_settings

    @pytest.fixture
    def history_settings(self, kernel_tree_settings: Any) -> Any:
        return kernel_tree_settings

    @pytest.mark.skipif(not ON_GPU, reason="an interpreted launch copies its arguments back")
    @pytest.mark.parametrize("policy", TRANSACTIONAL)
    def test_atomic(self, kit: Kit, policy: str) -> None:
        super().test_atomic(kit, policy)
