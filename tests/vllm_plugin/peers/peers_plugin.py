"""A pytest plug-in for vLLM's own tests: kvtxn active wherever an engine is built.

python -m pytest -p peers_plugin --kvtxn-policy undo tests/...
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvtxn-policy``: the policy of every engine."""
    parser.addoption("--kvtxn-policy", default="stock", help="stock: none")


def pytest_configure(config: pytest.Config) -> None:
    """Every engine's arguments ask for kvtxn; a failure of kvtxn's is a failure of the test."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    policy = config.getoption("--kvtxn-policy")
    original = EngineArgs.__post_init__

    def asking(self: Any) -> None:
        if current_platform.is_cuda():  # engines of several tests share one GPU
            self.gpu_memory_utilization, self.kv_cache_memory_bytes = 0.02, 1 << 30
        if policy != "stock":
            asked = {"policy": policy, "on_error": "raise"}
            self.additional_config = {**(self.additional_config or {}), "kvtxn": asked}
        original(self)

    EngineArgs.__post_init__ = asking
    if policy != "stock" or config.getoption("--kvtxn-audit"):
        load_general_plugins()  # hooks for the tests without an engine, too
    if current_platform.is_cpu():
        replace_kernels_once()
        current_platform.register_triton_kernel_overrides()  # samplers need them without an engine


def replace_kernels_once() -> None:
    """Let vLLM do this for the process's first engine only.

    It scans every module for Triton kernels; the second time, in 0.32, it trips over an object
    of torch's. Older releases do not scan.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not hasattr(platform, "register_triton_kernel_overrides"):
        return
    replace = cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = classmethod(lambda _: replace())
