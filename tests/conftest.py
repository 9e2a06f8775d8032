"""Fixtures for every test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import hypothesis
import pytest
import torch
from kernels_here import importing_kernels
from kit_cases import take_pairs
from small_caches import make_layers, rows
from torch import Tensor

from kvtxn import LayerRef

pytest_plugins = ["engine_session"]

# Before any test imports Triton, by way of vLLM for one: it decides then how kernels run.
with suppress(pytest.skip.Exception), importing_kernels():
    import kvtxn.backends.graphs.slot_block_table
    import kvtxn.integrations.serving.graph_steps  # noqa: F401

# Examples are tiny, and a loaded machine is slow: time says nothing about them.
hypothesis.settings.register_profile(
    "kvtxn", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvtxn")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--interpret-all``: every case of the kit, through Triton's interpreter too."""
    parser.addoption(
        "--interpret-all",
        action="store_true",
        help="without a GPU, run all cases of the conformance kit, interpreted ones too (slow)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take of the torch executor's kit each value, and each two together, once."""
    take_pairs(config, items, "TestTorch")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the collector pass over what is there now: ten thousand tests, and all modules."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the collector back what it passed over."""
    gc.unfreeze()


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
