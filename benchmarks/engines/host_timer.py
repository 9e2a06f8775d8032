"""Host time that windows take in a worker, read inside a running engine.

Whole engines scatter by more than what a window costs the host. So the plug-in's own calls in a
step are timed where they happen, in a run that is not measured otherwise: all that it does before
the forward (``begin``), and after sampling (``commit``). What the host does for the GPU alone, and
the GPU's own time, is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from ...integrations.vllm_plugin.internals import workers

#: The calls of a step, in the order in which they come; the runners have some of them each.
#: Of two that do the same, the first makes the other's call.
_CALLS: Final = {
    "begin": ("plan", "begin_among", "begin"),
    "commit": ("commit_ids", "commit"),
}


def clock(worker: Any, on: bool) -> dict[str, float] | None:
    """Begin to time a worker's steps; or stop timing, and return the times.

    Args:
        worker: vLLM's worker, with kvtxn active in it.
        on: True begins, False stops.

    Returns:
        At the end: how many steps had a window, and the medians over them of ``begin``, ``commit``
        and their sum, in microseconds. None where there were none.
    """
    steps = workers.runner_of_worker(worker).kvtxn
    if on:
        worker.kvtxn_clock = _Clock(steps)
        return None
    found: _Clock = worker.__dict__.pop("kvtxn_clock")
    return found.stop()


class _Clock:
    """Wraps the calls of a worker's steps, and times them."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self._inside = False
        self._now = dict.fromkeys(_CALLS, 0.0)
        self._seen: list[dict[str, float]] = []
        self._names = {
            name: part for part, names in _CALLS.items() for name in names if hasattr(steps, name)
        }
        for name, part in self._names.items():
            setattr(steps, name, self._timed(getattr(steps, name), part))

    def stop(self) -> dict[str, float] | None:
        """Remove the wrappers, and return the times."""
        for name in self._names:
            delattr(self._steps, name)
        if not self._seen:
            return None
        sums = [sum(each.values()) for each in self._seen]
        found = {part: statistics.median(each[part] for each in self._seen) for part in _CALLS}
        found = {part: 1e6 * seconds for part, seconds in found.items()}
        return {"steps": len(sums), **found, "both": 1e6 * statistics.median(sums)}

    def _timed(self, own: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # from another of these calls
                return own(*args, **kwargs)
            before, self._inside = self._windows(), True
            start = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self._now[part] += time.perf_counter() - start
                self._inside = False
                if part == "commit":
                    self._step_ends(self._windows() > before)

        return call

    def _windows(self) -> int:
        return int(sum(self._steps.manager.metrics.windows.values()))

    def _step_ends(self, had_a_window: bool) -> None:
        if had_a_window:
            self._seen.append(self._now)
        self._now = dict.fromkeys(_CALLS, 0.0)
