"""The kit of recurrent layers through Triton's interpreter, where there is no GPU."""

from __future__ import annotations

import pytest
from kit_cases import take_some
from triton_here import kernel_device, triton_executor

__all__ = ["kernel_device", "triton_executor"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take one in nine cases of each test where they are interpreted."""
    take_some(config, items, {"TestTritonReplays": 9})
