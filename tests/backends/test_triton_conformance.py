"""The Triton executor keeps every promise of the kit."""

from __future__ import annotations

import pytest

from kvtxn.testing import ExecutorConformance


class TestTriton(ExecutorConformance):
    @pytest.fixture
    def backend(self, triton_executor):
        return triton_executor

    @pytest.fixture
    def device(self, kernel_device):
        return kernel_device

    @pytest.fixture
    def program_settings(self, kernel_program_settings):
        return kernel_program_settings

    @pytest.fixture
    def tree_settings(self, kernel_tree_settings):
        return kernel_tree_settings

    @pytest.fixture
    def history_settings(self, kernel_tree_settings):
        return kernel_tree_settings
