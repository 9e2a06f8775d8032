"""The conformance kit for executors that launch kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels_here import ON_GPU

from kvtxn.testing import ExecutorConformance
from kvtxn.testing.kit import POLICIES, TRANSACTIONAL, Kit


class KernelKit:
    """The kernels' device, and as many examples as that allows; before parts of the kit."""

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
        super().test_atomic(kit, policy)  # type: ignore[misc]


class KernelConformance(KernelKit, ExecutorConformance):
    """The kit on the kernels' device; supply ``backend``."""

    @pytest.mark.parametrize("fmt", ["fp16", "bf16"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_half_precision_queries(
        self, kit: Kit, policy: str, dtype: torch.dtype, fmt: str
    ) -> None:
        if not ON_GPU and dtype is torch.bfloat16 and fmt == "bf16":
            pytest.skip("the interpreter multiplies bfloat16 matrices as if they were integers")
        super().test_half_precision_queries(kit, policy, dtype, fmt)
