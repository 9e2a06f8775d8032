"""Kernels run on the GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    import kvtxn.backends.fixed_window
    import kvtxn.backends.slot_tables  # noqa: F401
    from kvtxn.backends.triton_executor import TritonExecutor


class InterpretedTriton(TritonExecutor):
    """The same kernels, run by Triton's interpreter; for tests only."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """It runs anywhere."""
        return None


@pytest.fixture
def kernel_device() -> str:
    """Where the kernels run."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def triton_executor() -> type[TritonExecutor]:
    """The Triton executor that runs here."""
    return TritonExecutor if ON_GPU else InterpretedTriton


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


#: Without a GPU one case in so many is taken of the kit's tests, of those with fewer cases one.
SPARSE = {"TestTriton": 20, "TestPretendedGraphs": 5}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Interpreted, the whole kit takes half an hour: take every test of it, in a few cases each.

    With stand-ins for graphs, which are not interpreted, in more of them. A GPU runs all cases, and
    so does the CPU under ``--interpret-all``. Which ones are taken differs from test to test, so
    that policies, layouts and formats all have their turn.
    """
    if ON_GPU or config.getoption("--interpret-all"):
        return
    cases: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if item.cls is not None and item.cls.__name__ in SPARSE:
            cases.setdefault((item.cls.__name__, item.originalname), []).append(item)
    left_out = set()
    for number, ((kit, name), each) in enumerate(sorted(cases.items())):
        if name not in ("test_random_trees", "test_random_histories"):
            taken = range(number % min(len(each), SPARSE[kit]), len(each), SPARSE[kit])
            left_out |= {id(item) for index, item in enumerate(each) if index not in taken}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
