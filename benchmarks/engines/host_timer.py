"""Host time that windows and audits take in a worker, read inside a running engine.

Whole engines scatter by more than what a window costs the host. So the plug-in's own calls in a
step are timed where they happen, in a run that is not measured otherwise: all that it does before
the forward (``begin``), and after it (``commit``). The time of the GPU itself, and the host's other
work for it, are not included. On a CPU an audit's comparisons are the host's work, too.
"""

from __future__ import annotations

import abc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...integrations.vllm_plugin.seam import workers

#: The calls of a window's step, in the order in which they come; the runners have some of them
#: each. Of two that do the same, the first makes the other's call.
_CALLS: Final = {
    "begin": ("plan", "begin_among", "begin", "before_replay"),
    "commit": ("commit_ids", "commit"),
}
#: The watch's calls that are made within no other one: ``hear`` reads vLLM's step and makes most.
_OUTER: Final = ("hear", "end_step")
#: The watch's calls by which a step and its forward begin; ``hear`` makes them.
_BEGINS: Final = ("change", "step")


def clock(worker: Any, on: bool) -> dict[str, float] | None:
    """Begin to time a worker's steps; or stop timing, and return the times.

    Args:
        worker: vLLM's worker, with kvtxn active in it: its windows are timed, or without windows
            its audit.
        on: True begins, False stops.

    Returns:
        At the end: how many steps had a window (or were audited), and the medians over them of
        ``begin``, ``commit`` and their sum, in microseconds; of the sum the quartiles, too, since
        steps in which a request comes or leaves take longer. None where there were none.
    """
    runner = workers.runner_of_worker(worker)
    if on:
        steps, watch = getattr(runner, "kvtxn", None), getattr(runner, "kvtxn_audit", None)
        states = getattr(runner, "kvtxn_states", None)
        made = _OfAudit(watch) if steps is None else _OfWindows(steps, states)
        worker.kvtxn_clock = made
        return None
    found: _Clock = worker.__dict__.pop("kvtxn_clock")
    return found.stop()


class _Clock(abc.ABC):
    """Wraps calls of a worker, and times the outermost ones, step by step.

    Args:
        calls: pairs of an object and the name of a method of it.
    """

    def __init__(self, calls: Sequence[tuple[Any, str]]) -> None:
        self._calls = calls
        self._inside = False
        self._now = dict.fromkeys(_CALLS, 0.0)
        self._seen: list[dict[str, float]] = []
        for owner, name in calls:
            setattr(owner, name, self._timed(getattr(owner, name), name))

    def stop(self) -> dict[str, float] | None:
        """Remove the wrappers, and return the times as ``clock`` does; None if no step was seen."""
        for owner, name in self._calls:
            delattr(owner, name)
        if not self._seen:
            return None
        sums = [1e6 * sum(each.values()) for each in self._seen]
        found = {part: statistics.median(each[part] for each in self._seen) for part in _CALLS}
        found = {part: 1e6 * seconds for part, seconds in found.items()}
        lower, both, upper = (
            statistics.quantiles(sums, method="inclusive") if len(sums) > 1 else 3 * sums
        )
        return {"steps": len(sums), **found, "both": both, "lower": lower, "upper": upper}

    def _timed(self, own: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a wrapper of a method that times its calls which no other timed call makes."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Make the call, and note its time, also if it raises."""
            before = self._state()
            self._comes(name)
            if self._inside:  # from another of these calls
                return own(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self._inside = False
                self._took(name, before, seconds)

        return call

    @abc.abstractmethod
    def _state(self) -> int:
        """Return a number that ``_took`` compares with the number after the call."""

    def _comes(self, name: str) -> None:  # noqa: B027 - nothing, where steps end with a call
        """Note that a call begins, be it from another one."""

    @abc.abstractmethod
    def _took(self, name: str, before: int, seconds: float) -> None:
        """Note the time of a call that no other one made."""

    def _step_ends(self, *, counts: bool) -> None:
        """Begin the next step's times; the last ones are kept if they count."""
        if counts:
            self._seen.append(self._now)
        self._now = dict.fromkeys(_CALLS, 0.0)


class _OfWindows(_Clock):
    """Times steps that have a window; a step ends with its commit.

    Recurrent states on a GPU hear of a step by a call of their own; its commit includes theirs.
    """

    def __init__(self, steps: Any, states: Any = None) -> None:
        self._steps = steps
        self._parts = {
            name: part for part, names in _CALLS.items() for name in names if hasattr(steps, name)
        }
        calls = [(steps, name) for name in self._parts]
        if states is not None:
            calls.append((states, "begin"))
        self._ended = self._windows()
        super().__init__(calls)

    def _state(self) -> int:
        """Return any number: to count windows before a call would bring its data into caches."""
        return 0

    def _windows(self) -> int:
        """Count the windows that have ended."""
        return int(sum(self._steps.manager.metrics.windows.values()))

    def _took(self, name: str, before: int, seconds: float) -> None:
        """Add a call's time to its part.

        With a commit the step ends, and counts if a window has ended.
        """
        part = self._parts[name]
        self._now[part] += seconds
        if part == "commit":
            before, self._ended = self._ended, self._windows()
            self._step_ends(counts=self._ended > before)


class _OfAudit(_Clock):
    """Times steps with a forward that the audit watches; a step ends where the next one begins."""

    def __init__(self, watch: Any) -> None:
        self._begun = 0  # how many times a step or a forward was heard to begin
        self._had_forward = False
        super().__init__([(watch, name) for name in (*_OUTER, *_BEGINS)])

    def stop(self) -> dict[str, float] | None:
        """Remove the wrappers, and return the times, the last step's included.

        None without a step.
        """
        self._step_ends(counts=self._had_forward)
        return super().stop()

    def _state(self) -> int:
        """Return how many times a step or a forward was heard to begin."""
        return self._begun

    def _comes(self, name: str) -> None:
        """Note that a step or a forward begins.

        The step before it ends, and counts if it had a forward.
        """
        if name not in _BEGINS:
            return
        if name == "change" or self._had_forward:
            self._step_ends(counts=self._had_forward)
        self._had_forward = name != "change"
        self._begun += 1

    def _took(self, name: str, before: int, seconds: float) -> None:
        """Add a call's time to ``commit`` if it came after the forward began, else to ``begin``."""
        after = self._had_forward and self._begun == before
        self._now["commit" if after else "begin"] += seconds
