"""A worker's clock and what it says of windows, over steps that only pretend."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from kvtxn.benchmarks.engines import host_timer
from kvtxn.benchmarks.engines.host_timer import clock
from kvtxn.benchmarks.engines.report import both


class Time:
    """Passes where a call says so, however busy the machine is."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


time = Time()


@pytest.fixture(autouse=True)
def passing(monkeypatch):
    """The clock under test reads this time."""
    monkeypatch.setattr(host_timer, "time", time)


class Steps:
    """Each call takes a known time."""

    def __init__(self):
        self.manager = SimpleNamespace(metrics=SimpleNamespace(windows=Counter()))

    def begin(self):
        time.sleep(0.002)

    def commit(self, outcome):
        time.sleep(0.005)
        if outcome:
            self.manager.metrics.windows[outcome] += 1


class Replayed(Steps):
    """A call more, right before the forward."""

    def before_replay(self, *, saves):
        time.sleep(0.001 if saves else 1.0)


class Packed(Steps):
    """Two more calls, which make those."""

    def begin_among(self):
        time.sleep(0.003)
        self.begin()

    def commit_ids(self, outcome):
        time.sleep(0.002)
        self.commit(outcome)


def worker(steps):
    return SimpleNamespace(model_runner=SimpleNamespace(kvtxn=steps))


@pytest.mark.parametrize(
    ("kind", "begin", "commit"),
    [(Steps, 2000, 5000), (Replayed, 3000, 5000), (Packed, 5000, 7000)],
    ids=str,
)
def test_a_step_is_all_its_calls(kind, begin, commit):
    """Those that others make count once."""
    steps = kind()
    timed = worker(steps)
    assert clock(timed, True) is None
    for _ in range(3):
        getattr(steps, "begin_among", steps.begin)()
        getattr(steps, "before_replay", lambda *, saves: None)(saves=True)
        getattr(steps, "commit_ids", steps.commit)("committed")
    found = clock(timed, False)
    assert found["steps"] == 3
    assert found["begin"] == pytest.approx(begin)
    assert found["commit"] == pytest.approx(commit)
    assert found["both"] == pytest.approx(begin + commit)


def quartiles(*times):
    """The clock's sums over steps of so many times the same calls."""
    steps = Steps()
    timed = worker(steps)
    clock(timed, True)
    for number in times:
        for _ in range(number):
            steps.begin()
        steps.commit("committed")
    found = clock(timed, False)
    return found, [round(found[name]) for name in ("lower", "both", "upper")]


def test_quartiles_show_the_steps_that_take_longer():
    """One step in four takes three times as long; a single step's time is all of them."""
    found, sums = quartiles(1, 1, 1, 3, 1, 1, 1, 3)
    assert sums == [7000, 7000, 8000]
    assert both(found) == "7000 (7000 to 8000)"
    assert quartiles(1)[1] == [7000] * 3
    assert both({"both": 41.3}) == "41"


class States:
    """Recurrent states of a GPU, which are told of a step by a call of their own."""

    def begin(self, metadata, batch=None, **how):
        time.sleep(0.0001)


def test_states_are_part_of_a_step():
    """A step without a window does not count."""
    steps, states = Steps(), States()
    timed = worker(steps)
    timed.model_runner.kvtxn_states = states
    clock(timed, True)
    for outcome in ("committed", None, "committed"):
        steps.begin()
        states.begin("metadata", captured=False)
        steps.commit(outcome)
    found = clock(timed, False)
    assert found["steps"] == 2
    assert found["begin"] == pytest.approx(2100)
    assert found["commit"] == pytest.approx(5000)
    assert "begin" not in vars(states)


class Watch:
    """An audit's calls, each of a known time."""

    def hear(self, tell):
        time.sleep(0.1)
        tell(self)

    def change(self):
        time.sleep(0.001)

    def step(self):
        time.sleep(0.002)

    def came_out(self):
        time.sleep(0.004)

    def sampled(self):
        time.sleep(0.008)

    def end_step(self):
        time.sleep(0.016)


class Runner:
    """Makes the calls of its watch; it has no windows."""

    def __init__(self):
        self.kvtxn_audit = Watch()

    def step(self, forward):
        watch = self.kvtxn_audit
        watch.hear(lambda watch: watch.change())
        if forward:
            watch.hear(lambda watch: watch.step())
            watch.hear(lambda watch: watch.came_out())
            watch.hear(Watch.sampled)  # no wrapper around the object's own method sees it
            watch.end_step()


def test_an_audits_step_is_all_its_calls():
    """With what the runner reads for them; a step without a forward has nothing to watch."""
    own = Runner()
    before, watched = dict(vars(own)), list(vars(own.kvtxn_audit))
    timed = SimpleNamespace(model_runner=own)
    assert clock(timed, True) is None
    for forward in (True, False, True, True):
        own.step(forward)
    found = clock(timed, False)
    assert found["steps"] == 3
    assert found["begin"] == pytest.approx(203000)
    assert found["commit"] == pytest.approx(228000)
    assert found["both"] == pytest.approx(431000)
    assert list(vars(own.kvtxn_audit)) == watched  # nothing stands in between any more
    assert vars(own) == before
    clock(timed, True)
    assert clock(timed, False) is None


def test_steps_without_a_window_do_not_count():
    """Their time is not the next step's either; and afterwards nothing stands in between."""
    steps = Steps()
    timed = worker(steps)
    clock(timed, True)
    for _ in range(5):
        steps.begin()
    steps.commit(None)
    steps.begin()
    steps.commit("committed")
    found = clock(timed, False)
    assert found["steps"] == 1
    assert found["begin"] == pytest.approx(2000)
    assert "begin" not in vars(steps)
    clock(timed, True)
    assert clock(timed, False) is None
