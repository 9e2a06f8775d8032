"""The torch executor passes the kit: it is the specification."""

import pytest
import torch

from kvtxn.testing import ExecutorConformance


class TestTorch(ExecutorConformance):
    """On the CPU."""

    @pytest.fixture
    def backend(self) -> str:
        return "torch"


if torch.cuda.is_available():

    class TestTorchOnCuda(TestTorch):
        """The same on a GPU; not even collected where there is none."""

        @pytest.fixture
        def device(self) -> str:
            return "cuda"
