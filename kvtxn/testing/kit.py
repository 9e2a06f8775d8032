"""``Kit``: the backend under test, and the rigs that run it; every test is given one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, settings

from .. import registry
from ..executor import Capabilities, Executor
from .faults import Faults, faulty
from .rig import VARIED, AnySpec, Backend, Rig, registered

#: Every policy; a test skips policies that the backend does not declare.
POLICIES: Final = ("deferred", "undo", "direct")

#: Policies that keep rejected rows out of the cache.
TRANSACTIONAL: Final = ("deferred", "undo")


#: The same random examples each time, however long they take.
_REPEATABLE: Final = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


class Kit:
    """A backend on one device, for one test.

    Args:
        backend: a registered name, or an executor class.
        device: the device to run it on.
        stack: closed after the test.

    Attributes:
        executor: the class under test.
        device: the device it runs on.
        capabilities: the capabilities that it declares.
        name: the name under which it is registered while the test runs.
    """

    def __init__(self, backend: Backend, device: torch.device, stack: ExitStack) -> None:
        self._stack = stack
        self.device = device
        self.name = stack.enter_context(registered(backend))
        self.executor: type[Executor] = registry.load(self.name)
        self.capabilities: Capabilities = self.executor.capabilities
        reason = registry.ask(self.name, device)
        if reason is not None:
            pytest.skip(f"{self.name} cannot run on {device}: {reason}")

    def rig(
        self,
        policy: str,
        specs: Sequence[AnySpec] = VARIED,
        *,
        executor: type[Executor] | None = None,
        **config: Any,
    ) -> Rig:
        """Make a manager under test; skip the test if the backend does not declare the policy.

        Args:
            policy: the policy.
            specs: the layers.
            executor: a class derived from the one under test, to be used in its place.
            config: ``seed``, and fields of ``TxnConfig``.
        """
        name = self.name if executor is None else self._stack.enter_context(registered(executor))
        declared = (executor or self.executor).capabilities.policies
        if policy not in declared:
            pytest.skip(f"{self.name} declares the policies {sorted(declared)}, not {policy!r}")
        return Rig(name, policy, self.device, specs, **config)

    def faulty_rig(
        self, policy: str, specs: Sequence[AnySpec] = VARIED, **config: Any
    ) -> tuple[Rig, Faults]:
        """Make a rig whose executor fails on command.

        Return it with its ``Faults``, of which none is armed.
        """
        executor = faulty(self.executor)
        return self.rig(policy, specs, executor=executor, **config), executor.faults

    def need_cuda(self) -> None:
        """Skip the test unless the kit's device is a CUDA device."""
        if self.device.type != "cuda":
            pytest.skip(f"a CUDA device is needed; {self.device} has no streams to wait for")

    def need(self, *names: str) -> None:
        """Skip the test for executors that do not declare these capabilities.

        That commit can be captured is promised for CUDA devices alone.
        """
        if "capturable" in names:
            self.need_cuda()
        for name in names:
            if not getattr(self.capabilities, name):
                pytest.skip(f"{self.name} does not declare {name}")


class KitBase:
    """Fixtures; a subclass supplies ``backend`` and may override the others."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Supply the backend under test: a registered name, or an ``Executor`` subclass.

        Raises:
            NotImplementedError: a subclass does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define a pytest fixture `backend` that returns the name "
            "of a registered backend, or an Executor subclass"
        )

    @pytest.fixture
    def device(self) -> str:
        """Supply the name of the device to test on: "cpu"."""
        return "cpu"

    @pytest.fixture(params=POLICIES)
    def policy(self, request: pytest.FixtureRequest) -> str:
        """Supply each policy in turn, to tests that are not for some of them alone."""
        policy: str = request.param
        return policy

    @pytest.fixture
    def rig(self, kit: Kit, policy: str) -> Rig:
        """Make a rig over layers of different kinds, for tests that want nothing else of it."""
        return kit.rig(policy)

    @pytest.fixture
    def attention_tolerance(self) -> float:
        """Bound the error of float32 attention against sums in double, relative to the values.

        1e-4.
        """
        return 1e-4

    @pytest.fixture
    def program_settings(self) -> settings:
        """Set the number and length of the random programs.

        60 of at most 25 steps, always the same.
        """
        return settings(
            _REPEATABLE, max_examples=60, stateful_step_count=25, report_multiple_bugs=False
        )

    @pytest.fixture
    def tree_settings(self) -> settings:
        """Set the number of random trees: 1000, always the same."""
        return settings(_REPEATABLE, max_examples=1000)

    @pytest.fixture
    def history_settings(self) -> settings:
        """Set the number of random histories of rings and states: 600, always the same."""
        return settings(_REPEATABLE, max_examples=600)

    @pytest.fixture
    def kit(self, backend: Backend, device: str) -> Iterator[Kit]:
        """Register the backend for one test.

        Skip the test if the backend cannot run on the device.
        """
        with ExitStack() as stack:
            yield Kit(backend, torch.device(device), stack)
