"""The conformance kit can fail: each known defect turns it red, a sound executor does not."""

import itertools
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "testing"))

import mutants
import mutants_captured
import mutants_given
import mutants_overwriting
import mutants_sizes
import mutants_states

from kvtxn.testing.promise_captured_endings import StepEndings
from kvtxn.testing.promise_saving import SavingForwards
from kvtxn.testing.promise_steps import CapturedSteps
from kvtxn.testing.promise_supplied import SuppliedStates

_number = itertools.count()

CAUGHT_BY = {
    **mutants.CAUGHT_BY,
    **mutants_given.CAUGHT_BY,
    **mutants_overwriting.CAUGHT,
    **mutants_sizes.CAUGHT_BY,
    **mutants_states.CAUGHT,
}

_MODULE = """
    import sys
    sys.path.insert(0, {folder!r})

    import {module}
    import pytest
    from hypothesis import HealthCheck, Phase, settings
    from kvtxn.testing import ExecutorConformance, ReplayConformance

    class TestMutant(ReplayConformance, ExecutorConformance):
        @pytest.fixture
        def backend(self):
            return {module}.{name}

        @pytest.fixture
        def device(self):
            return {device!r}

        @pytest.fixture
        def program_settings(self):
            return settings(
                max_examples=150, stateful_step_count=25, deadline=None, derandomize=True,
                database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )

        @pytest.fixture
        def tree_settings(self, program_settings):
            return settings(program_settings, max_examples=300)

        @pytest.fixture
        def history_settings(self, tree_settings):
            return tree_settings

    for other in dir(TestMutant):  # pytest would make all cases of each test
        if other.startswith("test_") and other not in {tests!r}:
            setattr(TestMutant, other, None)
"""


class Outcomes:
    """A pytest plugin that notes which tests passed and which failed.

    Args:
        every: run one in so many cases of each test.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Called by pytest when it knows all cases."""
        seen: Counter[str] = Counter()
        taken = []
        for item in items:
            if seen[item.originalname] % self.every == 0:
                taken.append(item)
            seen[item.originalname] += 1
        items[:] = taken

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of each test."""
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)


def run_kit(
    folder: Path, executor: type, tests: list[str], device: str = "cpu", every: int = 1
) -> Outcomes:
    """The named tests of the kit for one executor, as its author would run them."""
    here = str(Path(mutants.__file__).parent)
    # Unlike any other: pytest takes a module of this name that another test has imported.
    path = folder / f"test_kit_{next(_number)}.py"
    names = {"module": executor.__module__, "name": executor.__name__}
    path.write_text(dedent(_MODULE.format(folder=here, device=device, tests=tests, **names)))
    outcomes = Outcomes(every)
    options = ("-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"--rootdir={folder}")
    # This plug-in collects garbage five times when a run ends, among the objects of all tests here.
    options += ("-p", "no:unraisableexception")
    pytest.main([*options, "--import-mode=importlib", str(path)], plugins=[outcomes])
    return outcomes


CASES = [
    *CAUGHT_BY.items(),
    *mutants_captured.CAPTURED_CAUGHT_BY.items(),  # of launches over a captured forward
    # Random tests find these without being told what to look for.
    *((executor, "test_random_program") for executor in mutants.FOUND_BY_CHANCE),
    *((executor, "test_random_histories") for executor in mutants_overwriting.BY_CHANCE),
]


@pytest.mark.parametrize(
    ("executor", "test"), CASES, ids=[f"{executor.__name__}-{test}" for executor, test in CASES]
)
def test_a_defect_is_seen(tmp_path: Path, executor: type, test: str) -> None:
    """The kit goes red, by the test that is there for it."""
    (failed,) = run_kit(tmp_path, executor, [test]).failed
    assert f"TestMutant::{test}" in failed


CORE_CAUGHT_BY = {
    **mutants_captured.CORE_CAUGHT_BY,
    **mutants_overwriting.CORE_CAUGHT_BY,
    **mutants_states.CORE_CAUGHT_BY,
}


@pytest.mark.parametrize(
    ("defect", "test"),
    CORE_CAUGHT_BY.items(),
    ids=[defect.__name__ for defect in CORE_CAUGHT_BY],
)
def test_a_defect_of_the_library_is_seen(tmp_path: Path, defect, test: str) -> None:
    """Of the library's own code, with an executor and launches that are sound."""
    with defect():
        (failed,) = run_kit(tmp_path, mutants_captured.Prepared, [test]).failed
    assert f"TestMutant::{test}" in failed


def test_sound_launches_pass(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every promise of steps, with prepared launches that stand for a GPU's graphs.

    In some cases of each, or all under ``--interpret-all``.
    """
    kits = (CapturedSteps, StepEndings, SavingForwards, SuppliedStates)
    tests = [name for kit in kits for name in vars(kit) if "test_" in name]
    every = 1 if pytestconfig.getoption("--interpret-all") else 5
    outcomes = run_kit(tmp_path, mutants_captured.Capturing, tests, every=every)
    assert outcomes.failed == []
    assert len(outcomes.passed) > 180 // every


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shows on a GPU only")
def test_launches_that_wait_are_seen_on_a_gpu(tmp_path: Path) -> None:
    """Promise 6 can fail here as well."""
    for executor, test in mutants_captured.CAPTURED_ON_CUDA.items():
        assert run_kit(tmp_path, mutants_captured.Prepared, [test], "cuda").failed == []
        (failed,) = run_kit(tmp_path, executor, [test], "cuda").failed
        assert f"TestMutant::{test}" in failed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shows on a GPU only")
@pytest.mark.parametrize(
    ("executor", "test"),
    mutants.CAUGHT_ON_CUDA.items(),
    ids=[executor.__name__ for executor in mutants.CAUGHT_ON_CUDA],
)
def test_a_defect_is_seen_on_a_gpu(tmp_path: Path, executor: type, test: str) -> None:
    """Promise 6 can fail as well, in both directions."""
    assert run_kit(tmp_path, mutants.Sound, [test], "cuda").failed == []
    (failed,) = run_kit(tmp_path, executor, [test], "cuda").failed
    assert f"TestMutant::{test}" in failed


def test_a_sound_executor_passes(tmp_path: Path) -> None:
    """By the same route: what turned the others red was their defect.

    In some cases of each test; the torch executor, which this is, passes all of them elsewhere.
    """
    tests = {*CAUGHT_BY.values(), "test_random_program"} - {"test_random_trees"}  # more elsewhere
    outcomes = run_kit(tmp_path, mutants.Sound, sorted(tests), every=15)
    assert outcomes.failed == []
    assert len(outcomes.passed) > 100
