"""The conformance kit can fail: each known defect turns it red, a sound executor does not."""

import sys
from pathlib import Path

import pytest
import torch

import kvtxn.testing  # noqa: F401  (imported once here, and not by each run again)

sys.path.insert(0, str(Path(__file__).parent / "testing"))

import mutants

pytest_plugins = ["pytester"]

_MODULE = """
    import sys
    sys.path.insert(0, {folder!r})

    import mutants
    import pytest
    from hypothesis import HealthCheck, Phase, settings
    from kvtxn.testing import ExecutorConformance

    class TestMutant(ExecutorConformance):
        @pytest.fixture
        def backend(self):
            return mutants.{name}

        @pytest.fixture
        def device(self):
            return {device!r}

        @pytest.fixture
        def program_settings(self):
            return settings(
                max_examples=60, stateful_step_count=25, deadline=None, derandomize=True,
                database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )
"""


def run_kit(
    pytester: pytest.Pytester, executor: type, names: list[str], device: str = "cpu"
) -> pytest.RunResult:
    """The named tests of the kit for one executor, as its author would run them."""
    folder = str(Path(mutants.__file__).parent)
    path = pytester.makepyfile(_MODULE.format(folder=folder, name=executor.__name__, device=device))
    tests = [f"{path}::TestMutant::{name}" for name in names]
    return pytester.runpytest_inprocess("-q", "-x", "--tb=no", "-p", "no:cacheprovider", *tests)


@pytest.mark.parametrize(
    ("executor", "test"),
    mutants.CAUGHT_BY.items(),
    ids=[executor.__name__ for executor in mutants.CAUGHT_BY],
)
def test_a_defect_is_seen(pytester: pytest.Pytester, executor: type, test: str) -> None:
    """The kit goes red, by the test that is there for it."""
    result = run_kit(pytester, executor, [test])
    assert result.ret is pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes().get("failed") == 1
    assert f"TestMutant::{test}" in result.stdout.str()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="shows on a GPU only")
@pytest.mark.parametrize(
    ("executor", "test"),
    mutants.CAUGHT_ON_CUDA.items(),
    ids=[executor.__name__ for executor in mutants.CAUGHT_ON_CUDA],
)
def test_a_defect_is_seen_on_a_gpu(pytester: pytest.Pytester, executor: type, test: str) -> None:
    """Promise 6 can fail as well, in both directions."""
    assert run_kit(pytester, mutants.Sound, [test], "cuda").ret is pytest.ExitCode.OK
    result = run_kit(pytester, executor, [test], "cuda")
    assert result.parseoutcomes().get("failed") == 1


@pytest.mark.parametrize("executor", mutants.FOUND_BY_CHANCE, ids=lambda mutant: mutant.__name__)
def test_the_random_program_finds_defects(pytester: pytest.Pytester, executor: type) -> None:
    """Without being told what to look for."""
    result = run_kit(pytester, executor, ["test_random_program"])
    assert result.parseoutcomes().get("failed") == 1


def test_a_sound_executor_passes(pytester: pytest.Pytester) -> None:
    """By the same route: what turned the others red was their defect."""
    names = sorted({*mutants.CAUGHT_BY.values(), "test_random_program"})
    result = run_kit(pytester, mutants.Sound, names)
    assert result.ret is pytest.ExitCode.OK
    assert result.parseoutcomes()["passed"] > 400
