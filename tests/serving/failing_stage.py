"""Lets one stage of a step on a GPU fail once, beneath the steps' own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

#: By policy: the stages that a step goes through, and so the places where it can fail.
STAGES: Final = {
    "undo": ("plan", "save", "commit"),
    "deferred": ("plan", "show", "attend", "commit"),
}


class InjectedFault(Exception):
    """Not one of kvtxn's own errors."""


@contextmanager
def failing_stage(steps: Any, stage: str, after: int) -> Iterator[list[int]]:
    """Let one stage of a step fail once while the block runs.

    Args:
        steps: the ``GraphSteps`` of a runner.
        stage: one of ``STAGES``; the attention is called outside of graphs alone.
        after: calls of the stage that go well before.

    Yields:
        The number of calls so far, in a list of one.
    """
    calls = [0]

    def due() -> None:
        calls[0] += 1
        if calls[0] == after + 1:
            raise InjectedFault(stage)

    if stage in ("save", "commit"):
        replaced = _launches(steps.windows, stage, due)
    else:
        owner, name = {
            "plan": (steps, "_classify"),
            "show": (steps.windows, "mark"),
            "attend": (steps, "note_staged"),
        }[stage]
        replaced = _method(owner, name, due)
    if stage == "plan":
        steps._plans.clear()  # a batch that was planned before is not planned again
    with replaced:
        yield calls


@contextmanager
def _method(owner: Any, name: str, due: Callable[[], None]) -> Iterator[None]:
    """Call ``due`` before each call of a method."""
    real = getattr(owner, name)

    def failing(*args: Any) -> Any:
        due()
        return real(*args)

    setattr(owner, name, failing)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def _launches(windows: Any, stage: str, due: Callable[[], None]) -> Iterator[None]:
    """Call ``due`` before each launch of this kind, in every plan that a window begins with."""
    begin, plans = windows.begin, []

    def failing(plan: Any, forward_saves: bool = False) -> Any:
        plans.append((plan, plan.launches))
        plan.launches = _FailingLaunches(plan.launches, stage, due)
        return begin(plan, forward_saves and stage != "save")  # else no launch might save

    windows.begin = failing
    try:
        yield
    finally:
        del windows.begin
        for plan, launches in reversed(plans):
            plan.launches = launches


class _FailingLaunches:
    """A plan's launches, one of which fails when it is due; no captured commit takes its place."""

    replays: Final[dict[int, Callable[[], None]]] = {}

    def __init__(self, real: Any, name: str, due: Callable[[], None]) -> None:
        self._real, self._name, self._due = real, name, due

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name != self._name:
            return real

        def failing(*args: Any) -> Any:
            self._due()
            return real(*args)

        return failing
