"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch
from small_caches import make_layers, rows
from torch import Tensor

from kvtxn import LayerRef

# Examples are tiny, and a loaded machine is slow: time says nothing about them.
hypothesis.settings.register_profile("kvtxn", deadline=None)
hypothesis.settings.load_profile("kvtxn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--interpret-all``: every case of the kit through Triton's interpreter."""
    parser.addoption(
        "--interpret-all",
        action="store_true",
        help="without a GPU, run all cases of the conformance kit on interpreted kernels (slow)",
    )


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors here are tiny: a second thread only adds waiting


@pytest.fixture
def layers() -> list[LayerRef]:
    """Three fp32 layers in one group."""
    return make_layers()


@pytest.fixture
def stage_all() -> Callable[..., list[tuple[Tensor, Tensor]]]:
    """Stage fresh random rows for every layer of a window; returns them."""

    def stage(window, layers, slots=None):
        staged = []
        for ref in layers:
            key, value = rows(window.num_rows)
            window.stage(ref, key, value, slots)
            staged.append((key, value))
        return staged

    return stage
