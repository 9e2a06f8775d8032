"""The torch executor replays states as the kit asks: it is the specification."""

from __future__ import annotations

import pytest

from kvtxn.testing import ReplayConformance


class TestTorchReplays(ReplayConformance):
    @pytest.fixture
    def backend(self) -> str:
        return "torch"
