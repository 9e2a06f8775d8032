"""The kit's tests of replayed layers can fail: each known defect turns one of them red."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutants_replay
import torch

from kvtxn.lifecycle import Lifecycle
from kvtxn.recurrent import replay
from kvtxn.states import Event

_MODULE = """
    import sys
    sys.path.insert(0, {folder!r})

    import mutants_replay
    import pytest
    from kvtxn.testing import ReplayConformance

    class TestMutant(ReplayConformance):
        @pytest.fixture
        def backend(self):
            return mutants_replay.{name}
"""


class _Failures:
    """A pytest plugin that notes what failed, and how many tests passed."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each phase of each test."""
        if report.failed:
            self.failed.append(report.nodeid)
        self.passed += report.when == "call" and report.passed


def run_kit(folder: Path, executor: type, test: str = "") -> _Failures:
    """One test of the kit for one executor, or all, as its author would run them."""
    path = folder / f"test_{executor.__module__}_{executor.__name__}.py"
    here = str(Path(__file__).parent)
    path.write_text(dedent(_MODULE.format(folder=here, name=executor.__name__)))
    plugin = _Failures()
    options = ("-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"--rootdir={folder}")
    # This plug-in collects garbage five times when a run ends, among the objects of all tests here.
    options += ("-p", "no:unraisableexception")
    wanted = f"{path}::TestMutant" + (f"::{test}" if test else "")
    pytest.main([*options, "--import-mode=importlib", wanted], plugins=[plugin])
    return plugin


@pytest.mark.parametrize(
    ("executor", "test"),
    mutants_replay.CAUGHT.items(),
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_defect_is_seen(tmp_path: Path, executor: type, test: str) -> None:
    """The kit goes red, by the test that is there for it."""
    (failed,) = run_kit(tmp_path, executor, test).failed
    assert f"TestMutant::{test}" in failed


def _no_copies(txn):
    return {}


def _always_again(finish: Callable[..., None]) -> Callable[..., None]:
    def again(txn, accepted):
        txn.advanced = False
        txn.states_before = {}
        finish(txn, accepted)

    return again


def _never(txn, accepted=None):
    return None


@pytest.mark.parametrize(
    ("name", "wrong", "test"),
    [
        ("read_states", _no_copies, "test_a_fallback_replays_once"),
        ("finish", _always_again(replay.finish), "test_a_fallback_replays_once"),
        ("finish", _never, "test_a_fallback_replays_once"),
        ("put_back", _never, "test_an_error_takes_no_draft_in"),
        ("read_states", _no_copies, "test_an_error_takes_no_draft_in"),
    ],
)
def test_a_defect_of_the_repair_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: object, test: str
) -> None:
    """A library that repairs states twice, by halves or not at all does not pass, either."""
    monkeypatch.setattr(replay, name, wrong)
    (failed,) = run_kit(tmp_path, mutants_replay.Sound, test).failed
    assert f"TestMutant::{test}" in failed


def test_an_abort_that_takes_settled_rows_in_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library whose abort advances the states that were staged does not pass."""
    finish = Lifecycle.finish

    def settling(self: Lifecycle, event: Event, accepted=None) -> None:
        if event is Event.ABORT and self.txn is not None:
            none = torch.zeros(self.txn.layout.num_requests, dtype=torch.int64)
            replay.advance(self.txn, none)
        finish(self, event, accepted)

    monkeypatch.setattr(Lifecycle, "finish", settling)
    for test in ("test_an_abort_keeps_the_states", "test_the_body_raises"):
        (failed,) = run_kit(tmp_path, mutants_replay.Sound, test).failed
        assert f"TestMutant::{test}" in failed


def test_a_sound_executor_passes(tmp_path: Path) -> None:
    """By the same route: what turned the others red was their defect."""
    outcome = run_kit(tmp_path, mutants_replay.Sound)
    assert outcome.failed == []
    assert outcome.passed > 100
