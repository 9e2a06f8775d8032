"""The Triton executor that runs here, and the cases of its kits: some, where it is interpreted."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch
from kernels_here import ON_GPU, importing_kernels

with importing_kernels():
    from kvtxn.backends.triton_executor import TritonExecutor


class InterpretedTriton(TritonExecutor):
    """The same kernels, run by Triton's interpreter; for tests only."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """It runs anywhere."""
        return None


@pytest.fixture
def kernel_device() -> str:
    """The device that kernels run on."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def triton_executor() -> type[TritonExecutor]:
    """The Triton executor that runs here."""
    return TritonExecutor if ON_GPU else InterpretedTriton


def take_some(
    config: pytest.Config,
    items: list[pytest.Item],
    sparse: Mapping[str, int],
    whole: Collection[str] = (),
) -> None:
    """Take every test of some kits, in a few cases each: interpreted, all take half an hour.

    A GPU runs all cases, and so does the CPU under ``--interpret-all``. The cases taken differ from
    test to test, so that policies, layouts and formats all have their turn.

    Args:
        config: pytest's.
        items: the collected tests; those that are left out are removed.
        sparse: by the name of a kit's class: one case in so many is taken of each test; of tests
            with fewer cases one.
        whole: tests of which all cases are taken.
    """
    if ON_GPU or config.getoption("--interpret-all"):
        return
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        kit = getattr(item, "cls", None)
        if isinstance(item, pytest.Function) and kit is not None and kit.__name__ in sparse:
            cases.setdefault((kit.__name__, item.originalname), []).append(item)
    left_out = set()
    for number, ((kit_name, name), each) in enumerate(sorted(cases.items())):
        if name not in whole:
            every = sparse[kit_name]
            taken = range(number % min(len(each), every), len(each), every)
            left_out |= {id(item) for index, item in enumerate(each) if index not in taken}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]
