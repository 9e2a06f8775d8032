"""The torch executor passes the kit: it is the specification."""

import hypothesis
import pytest
import torch

from kvtxn.testing import ExecutorConformance


class TestTorch(ExecutorConformance):
    """On the CPU; of random trees and histories as many as find every mutant in test_mutations."""

    @pytest.fixture
    def tree_settings(self, tree_settings, pytestconfig) -> hypothesis.settings:
        few = {} if pytestconfig.getoption("--interpret-all") else {"max_examples": 300}
        return hypothesis.settings(tree_settings, **few)

    @pytest.fixture
    def history_settings(self, tree_settings, history_settings) -> hypothesis.settings:
        most = min(tree_settings.max_examples, history_settings.max_examples)
        return hypothesis.settings(history_settings, max_examples=most)

    @pytest.fixture
    def backend(self) -> str:
        return "torch"


if torch.cuda.is_available():

    class TestTorchOnCuda(TestTorch):
        """The same on a GPU; not even collected where there is none."""

        @pytest.fixture
        def device(self) -> str:
            return "cuda"
