"""What every test of the kit is handed: the backend under test, and rigs that run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, settings

from .. import registry
from ..executor import Capabilities, Executor
from .caches import LayerSpec
from .faults import Faults, faulty
from .rig import VARIED, Backend, Rig, registered

#: Every policy; a test skips those that the backend does not declare.
POLICIES: Final = ("deferred", "undo", "direct")

#: Policies that keep rejected rows out of the cache.
TRANSACTIONAL: Final = ("deferred", "undo")


class Kit:
    """One backend on one device, for one test.

    Args:
        backend: a registered name, or an executor class.
        device: where to run it.
        stack: closed after the test.

    Attributes:
        executor: the class under test.
        device: where it runs.
        capabilities: what it says of itself.
        name: what it is registered as while the test runs.
    """

    def __init__(self, backend: Backend, device: torch.device, stack: ExitStack) -> None:
        self._stack = stack
        self.device = device
        self.name = stack.enter_context(registered(backend))
        self.executor: type[Executor] = registry.load(self.name)
        self.capabilities: Capabilities = self.executor.capabilities
        reason = self.executor.unavailable(device)
        if reason is not None:
            pytest.skip(f"{self.name} cannot run on {device}: {reason}")

    def rig(
        self,
        policy: str,
        specs: Sequence[LayerSpec] = VARIED,
        *,
        executor: type[Executor] | None = None,
        **config: Any,
    ) -> Rig:
        """A manager under test; skips where the backend does not declare the policy.

        Args:
            policy: the policy.
            specs: the layers.
            executor: instead of the class under test, one derived from it.
            config: ``seed``, and fields of ``TxnConfig``.
        """
        name = self.name if executor is None else self._stack.enter_context(registered(executor))
        declared = (executor or self.executor).capabilities.policies
        if policy not in declared:
            pytest.skip(f"{self.name} declares the policies {sorted(declared)}, not {policy!r}")
        return Rig(name, policy, self.device, specs, **config)

    def faulty_rig(
        self, policy: str, specs: Sequence[LayerSpec] = VARIED, **config: Any
    ) -> tuple[Rig, Faults]:
        """A rig whose executor fails on command, and the command."""
        executor = faulty(self.executor)
        return self.rig(policy, specs, executor=executor, **config), executor.faults

    def need_cuda(self) -> None:
        """Skip the test anywhere else."""
        if self.device.type != "cuda":
            pytest.skip(f"a CUDA device is needed; {self.device} has no streams to wait for")

    def need_attention(self) -> None:
        """Skip the test for executors that declare no attention."""
        if not self.capabilities.attention:
            pytest.skip(f"{self.name} declares no attention")

    def need_trees(self) -> None:
        """Skip the test for executors that declare no draft trees."""
        if not self.capabilities.trees:
            pytest.skip(f"{self.name} declares no draft trees")


class KitBase:
    """Fixtures; a subclass supplies ``backend`` and may override the others."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test: a registered name, or an ``Executor`` subclass."""
        raise NotImplementedError(
            f"{type(self).__name__} must define a pytest fixture `backend` that returns the name "
            "of a registered backend, or an Executor subclass"
        )

    @pytest.fixture
    def device(self) -> str:
        """The device to test on."""
        return "cpu"

    @pytest.fixture
    def attention_tolerance(self) -> float:
        """How far float32 attention may be from sums in double, relative to the values."""
        return 1e-4

    @pytest.fixture
    def program_settings(self) -> settings:
        """How long the random program runs; the same examples each time."""
        return settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )

    @pytest.fixture
    def tree_settings(self) -> settings:
        """How many random trees are tried; the same ones each time."""
        return settings(
            max_examples=1000,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )

    @pytest.fixture
    def history_settings(self) -> settings:
        """How many random histories of rings and states are tried; the same ones each time."""
        return settings(
            max_examples=600,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )

    @pytest.fixture
    def kit(self, backend: Backend, device: str) -> Iterator[Kit]:
        """The backend, ready to be built into rigs; unregistered after the test."""
        with ExitStack() as stack:
            yield Kit(backend, torch.device(device), stack)
