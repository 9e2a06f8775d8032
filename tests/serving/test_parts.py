"""Parts hear an engine's events in the order of one list."""

from __future__ import annotations

import inspect

import pytest
from kvtxn.integrations.serving.parts import Part, Parts

from kvtxn import ConfigError

#: No events: by these the list joins a ledger with windows.
JOINING = ("windows_manager", "follow_windows")
EVENTS = [name for name, _ in inspect.getmembers(Part, inspect.isfunction) if name not in JOINING]
#: The part that hears these first is the last one.
REVERSED = ("caches_dropped", "released")
#: Every part hears these, whichever part raises.
REACH_ALL = ("failed", "outcomes_arrived", "released", "step_failed")


class Heard(Part):
    """Notes its name and each event that it hears; raises in some."""

    def __init__(self, name: str, log: list[tuple[str, str]], raises: str = "") -> None:
        self.name, self.log, self.raises = name, log, raises

    def __getattribute__(self, event):
        own = object.__getattribute__(self, event)
        if event not in EVENTS:
            return own

        def hear(*args):
            self.log.append((self.name, event))
            if event == self.raises:
                raise RuntimeError(f"{self.name} raised")
            return own(*args)

        return hear


def tell(parts: Part, event: str, *args: object) -> object:
    """Tell an event, with as many arguments as it takes."""
    count = len(inspect.signature(getattr(Part(), event)).parameters)
    return getattr(parts, event)(*args or [KeyError("the engine's")] * count)


@pytest.mark.parametrize("event", EVENTS)
def test_parts_hear_an_event_in_order(event):
    log: list[tuple[str, str]] = []
    tell(Parts([Heard("windows", log), Heard("ledger", log)]), event)
    names = ["windows", "ledger"]
    assert log == [(name, event) for name in (names[::-1] if event in REVERSED else names)]


@pytest.mark.parametrize("event", EVENTS)
def test_a_list_of_parts_that_need_nothing_does_nothing(event):
    """And returns what a part returns that overrides nothing."""
    error = [KeyError("the engine's")] * len(inspect.signature(getattr(Part(), event)).parameters)
    expected = tell(Part(), event, *error)
    assert tell(Parts([Part()]), event, *error) == tell(Parts(), event, *error) == expected


def test_a_list_in_a_list_hears_for_its_own_parts():
    log: list[tuple[str, str]] = []
    tell(Parts([Parts([Heard("windows", log)]), Part()]), "planned")
    assert log == [("windows", "planned")]


@pytest.mark.parametrize("event", EVENTS)
def test_a_part_that_raises(event):
    """The parts behind it hear of it only where something is taken back."""
    log: list[tuple[str, str]] = []
    names = ["b", "a"] if event in REVERSED else ["a", "b"]
    parts = Parts(Heard(name, log, event if name == names[0] else "") for name in ("a", "b"))
    if event == "failed":
        error = KeyError("the engine's")
        parts.failed(error)
        assert "a raised" in error.__notes__[0]
        assert error.__notes__[0].startswith("kvtxn:")
    else:
        with pytest.raises(RuntimeError, match=f"{names[0]} raised"):
            tell(parts, event)
    assert [name for name, _ in log] == (names if event in REACH_ALL else names[:1])


def test_caches_go_through_the_hands_of_all_parts():
    class Adds(Part):
        def __init__(self, what):
            self.what = what

        def caches_planned(self, config):
            return [*config, self.what]

    assert Parts([Adds("b"), Adds("c")]).caches_planned(["a"]) == ["a", "b", "c"]


def test_one_part_that_wants_one_state_per_request_is_enough():
    class Wants(Part):
        def wants_one_state(self):
            return True

    assert Parts([Part(), Wants()]).wants_one_state()
    assert not Parts([Part()]).wants_one_state()


# -- windows and a ledger ----------------------------------------------------------------------


class Opens(Part):
    """Has a manager, or none; notes when it commits."""

    def __init__(self, manager=None, log=None):
        self.made, self.log = manager, log

    def windows_manager(self):
        return self.made

    def sampled(self, ids, counts):
        self.log.append("committed")


class Follows(Part):
    """Takes the way to a manager, and notes what it hears of an outcome."""

    found = None

    def __init__(self, log=None):
        self.log = log

    def follow_windows(self, manager):
        self.found = manager

    def commit_nears(self, ids, counts):
        self.log.append(f"{ids} come")

    def sampled(self, ids, counts):
        self.log.append(f"{ids} came")


@pytest.mark.parametrize("nest", [lambda *parts: [*parts], lambda one, two: [Parts([one]), two]])
def test_a_list_joins_a_ledger_with_the_windows_before_it(nest):
    """It finds the manager anew each time: new caches have another one, or none."""
    windows, ledger = Opens(), Follows()
    Parts(nest(windows, ledger))
    for manager in (None, "of the first caches", "of new caches", None):
        windows.made = manager
        assert ledger.found() == manager


def test_a_list_of_lists_joins_across_them():
    windows, ledger = Opens("a manager"), Follows()
    Parts([Parts([windows]), Parts([ledger])])
    assert ledger.found() == "a manager"


def test_a_ledger_hears_the_tokens_before_windows_commit_them():
    log: list[str] = []
    Parts([Opens(log=log), Follows(log)]).sampled("ids", None)
    assert log == ["ids come", "committed", "ids came"]


def test_one_of_the_two_alone_joins_nothing():
    log: list[str] = []
    ledger = Follows(log)
    Parts([Part(), ledger]).sampled("ids", None)
    Parts([Opens("a manager", log)]).sampled("ids", None)
    assert ledger.found is None
    assert log == ["ids came", "committed"]


def test_windows_behind_their_ledger_are_refused():
    """They would commit after the ledger has heard the outcome of the engine."""
    for windows in (Opens("a manager"), Parts([Opens("a manager")])):
        with pytest.raises(ConfigError, match="Opens before Follows"):
            Parts([Follows(), windows])


def test_a_list_without_windows_may_come_behind_a_ledger():
    ledger = Follows()
    Parts([ledger, Parts([Part()])])
    assert ledger.found is None


def test_two_managers_are_refused():
    """A ledger follows one."""
    ledger = Follows()
    Parts([Opens("one"), Opens("two"), ledger])
    with pytest.raises(ConfigError, match="several parts have windows"):
        ledger.found()
