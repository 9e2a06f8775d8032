"""Kernels run on the GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch

ON_GPU = torch.cuda.is_available()

if not ON_GPU:  # must be set when Triton and the kernels are imported, and only then
    os.environ["TRITON_INTERPRET"] = "1"
try:
    pytest.importorskip("triton", reason="the kernels need Triton")
    if not ON_GPU:
        pytest.importorskip("triton.experimental.gluon")  # else imported later, uninterpreted
    import kvtxn.backends.fixed_window  # noqa: F401
    from kvtxn.backends.triton_executor import TritonExecutor
finally:
    os.environ.pop("TRITON_INTERPRET", None)


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
    return hypothesis.settings(kernel_program_settings, max_examples=1000 if ON_GPU else 10)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Interpreted, the whole kit takes half an hour: take every 25th test, random trees, histories.

    A GPU runs all of it, and so does the CPU where KVTXN_INTERPRET_ALL is set.
    """
    if ON_GPU or os.environ.get("KVTXN_INTERPRET_ALL"):
        return
    kit = [item for item in items if item.cls is not None and item.cls.__name__ == "TestTriton"]
    left_out = {
        id(item)
        for index, item in enumerate(kit)
        if index % 25 and not item.name.startswith(("test_random_trees", "test_random_histories"))
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
