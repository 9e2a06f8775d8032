"""Kernels run on the GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from kernels_here import ON_GPU
from kit_cases import take_some
from triton_here import kernel_device, triton_executor

__all__ = ["kernel_device", "triton_executor"]


@pytest.fixture
def kernel_program_settings() -> Any:
    """A short random program: an interpreted launch takes a tenth of a second."""
    return hypothesis.settings(
        max_examples=30 if ON_GPU else 2,
        stateful_step_count=20 if ON_GPU else 8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.fixture
def kernel_tree_settings(kernel_program_settings: Any) -> Any:
    """Fewer random trees and histories where they are interpreted."""
    return hypothesis.settings(kernel_program_settings, max_examples=1000 if ON_GPU else 4)


#: Tests of the kit of which every case runs: random programs, and what most cases would not show.
WHOLE = (
    *("test_random_trees", "test_random_histories"),
    *("test_a_window_that_was_looked_at", "test_chains_that_lap_a_ring"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take some cases of each test where they are interpreted, but all of those in ``WHOLE``.

    Graphs that are pretended make the Triton executor's launches again: fewer cases show that.
    """
    kits = {"TestTriton": 20, "TestPretendedGraphs": 60}
    take_some(config, items, kits, whole=WHOLE)
