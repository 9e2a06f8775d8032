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

from ..internals import audited_v2
from ..internals.protocols.engine import SchedulerOutput
from ..internals.protocols.runners import InputBatchV2
from .graph_watch import GraphWatch
from .watch import Watch


@attrs.define(eq=False, slots=False)  # benchmarks wrap a call of it
class WatchingGraphs:
    """The ledger's passes as a beginning of graphs; see ``Beginning``.

    Attributes:
        runner: the runner.
        watch: its watch.
        reader: reads its steps.
    """

    runner: Any
    watch: GraphWatch
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
        """Tell the watch of a replay, and of its step, if that has waited for the replay.

        Where the step goes on with the one before, with its requests or without some of them, that
        is one call. An error of the audit's own ends the audit, as in ``kvtxn_tell``.
        """
        runner, watch = self.runner, self.watch
        changes, prepared = runner.kvtxn_changes, runner.kvtxn_prepared
        if included and watch.outcome is not None and changes is not None and prepared is not None:
            try:
                grown = self.reader.goes_on(prepared[0], changes)
                if (grown is not None and watch.repeat(grown)) or (
                    grown is None and self._goes_on_without(prepared[0], changes)
                ):
                    runner.kvtxn_changes = runner.kvtxn_prepared = None
                    return
            except Exception as error:
                watch.stop(error)
        runner.kvtxn_tell(partial(self._replayed, included))

    def _goes_on_without(self, batch: InputBatchV2, changes: SchedulerOutput) -> bool:
        """Tell the watch of a step without some of the last one's requests, if it is one."""
        grown = self.reader.lacks_requests(batch, changes)
        if grown is None:
            return False
        if not self.watch.repeat_without(*audited_v2.gone_and_left(batch, changes), grown):
            return False
        self.reader.went_on(batch)
        return True

    def _replayed(self, included: bool | None, _: Watch) -> None:
        """Tell the watch.

        Raises:
            RuntimeError: nobody knows whether the graph checks the step.
        """
        if included is None:
            raise RuntimeError("some captured forwards check their steps, and some do not")
        self.runner.kvtxn_step_is_ready()
        self.watch.before_replay(included)
