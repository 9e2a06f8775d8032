"""The torch executor passes the kit: it is the specification."""

import pytest

from kvtxn.testing import ExecutorConformance


class TestTorch(ExecutorConformance):
    @pytest.fixture
    def backend(self) -> str:
        return "torch"
