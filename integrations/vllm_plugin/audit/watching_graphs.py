"""Graphs of whole forwards that write and check the steps that they are replayed for.

Two launches of the ledger's would cost the host more in each step than all else that the audit asks
of it. They read the runner's buffers in place, so a graph can begin with them. A replay that is for
no step, such as one that keeps a rank in step with others, finds padding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from ..begun_graphs import let_graphs_begin
from ..internals import audited_v2
from .device_watch import DeviceWatch
from .watch import Watch


@attrs.frozen(eq=False)
class _Watching:
    """The ledger's passes as a beginning of graphs; see ``Beginning``.

    Attributes:
        runner: the runner.
        watch: its watch.
        reader: reads its steps.
    """

    runner: Any
    watch: DeviceWatch
    reader: audited_v2.StepReader

    def launch_in_forward(self, num_rows: int) -> Callable[[], None] | None:
        """Return the launch that writes and checks; an error of it ends the audit."""
        number = min(num_rows, audited_v2.most_requests(self.runner))
        try:
            return self.watch.launch_of(self.reader.in_place(number))
        except Exception as error:
            self.watch.stop(error)
            return None

    def before_replay(self, *, included: bool | None) -> None:
        """Tell the watch of a replay, and of its step, if that has waited for the replay."""
        self.runner.kvtxn_tell(partial(self._replayed, included))

    def _replayed(self, included: bool | None, _: Watch) -> None:
        """Tell the watch.

        Raises:
            RuntimeError: nobody knows whether the graph checks the step.
        """
        if included is None:
            raise RuntimeError("some captured forwards check their steps, and some do not")
        if not (included and self.runner.kvtxn_goes_on()):
            self.runner.kvtxn_step_is_ready()
            self.watch.before_replay(included)


def let_graphs_watch(
    runner: Any, watch: DeviceWatch, reader: audited_v2.StepReader
) -> Callable[[], None] | None:
    """Let a runner's graphs write and check a watch's steps; see ``let_graphs_begin``."""
    return let_graphs_begin(runner, _Watching(runner, watch, reader))
