"""The torch executor passes the kit: it is the specification."""

import hypothesis
import pytest
import torch

from kvtxn.testing import ExecutorConformance


class TestTorch(ExecutorConformance):
    """On the CPU; of random trees and histories as many as find every mutant in test_mutations."""

    @pytest.fixture
    def tree_settings(self, program_settings, pytestconfig) -> hypothesis.settings:
        every = 1000 if pytestconfig.getoption("--interpret-all") else 300
        return hypothesis.settings(program_settings, max_examples=every)

    @pytest.fixture
    def history_settings(self, tree_settings) -> hypothesis.settings:
        return tree_settings

    @pytest.fixture
    def backend(self) -> str:
        return "torch"


if torch.cuda.is_available():

    class TestTorchOnCuda(TestTorch):
        """The same on a GPU; not even collected where there is none."""

        @pytest.fixture
        def device(self) -> str:
            return "cuda"
