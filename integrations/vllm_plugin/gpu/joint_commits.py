"""One launch for a step's two commits: of the rows of attention, and of recurrent states.

In a usual step each launch takes the host longer than all else that a commit does. Where the
forward is a captured graph, all that both commits read is at fixed addresses but the counts, whose
addresses recur. So both are captured as one graph for each kind of batch. Every other step commits
its states by themselves, and then its rows; so does one whose graph had to go, see ``GraphCache``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

from ....backends.launching.recurring_graphs import RecurringGraphs
from ....captured.launches import LayoutLaunches
from ....captured.shared import StepPlan
from ....captured.window import CapturedWindow
from ....cuda_graphs import GraphCache, Replay
from ....log import get_logger
from ...serving.beside import lies_as_captured
from ..internals.held_states import HeldStates

log = get_logger()

#: Capture both commits once a plan came at the same places this often: a capture is done in the
#: middle of serving.
_OFTEN: Final = 8
#: Places that are counted; when there are more, all are forgotten.
_MOST_SEEN: Final = 4096


class JointCommits:
    """The states of a runner's steps, committed with the rows of its windows.

    Args:
        states: the states.
        graphs: the captured commits of the runner's windows, of which these are a part.

    Attributes:
        noted: the states, which are told of each step.
    """

    def __init__(self, states: HeldStates, graphs: GraphCache) -> None:
        self._states = self.noted = states
        self._recurring = RecurringGraphs(graphs, _MOST_SEEN)

    def commit(self, window: CapturedWindow | None, sampled: Tensor) -> Callable[[], None] | None:
        """Commit the states, or return the launch that commits both; see ``Beside``.

        Raises:
            KVTxnError: a state could not be written. The engine must not go on.
        """
        states = self._states
        if window is None or states.replays != window.plan.num_requests:
            states.commit(sampled)
            return None
        place = sampled.data_ptr()
        found = window.plan.together.get(place)
        if not lies_as_captured(sampled, states.replays):
            states.commit(sampled)
            return None
        if found is None:
            self._by_themselves(window, place, sampled)
        return found

    def repeat(self, sampled: Tensor) -> None:
        """Commit the states of a step whose launch failed, or was not made.

        Raises:
            KVTxnError: a state could not be written. The engine must not go on.
        """
        self._states.commit(sampled)

    def _by_themselves(self, window: CapturedWindow, place: int, sampled: Tensor) -> None:
        """Commit the states; capture both commits if this kind of step recurs."""
        states, plan = self._states, window.plan
        launches = None
        known = window.to_launch() is not None
        if known and self._recurring.recurs((id(plan), place), _OFTEN):
            launches = states.launches(sampled, plan.num_requests)
        states.commit(sampled)
        if launches is not None and plan.launches is not None:
            self._capture(plan, plan.launches, sampled, launches)

    def _capture(
        self, plan: StepPlan, rows: LayoutLaunches, sampled: Tensor, launches: Callable[[], None]
    ) -> None:
        """Capture both commits; the step's own rows are committed after this."""
        place = sampled.data_ptr()

        def make() -> Replay | None:
            return rows.capture_with(sampled, launches, self._states.make)

        try:
            self._recurring.capture((id(plan), place), make, plan.together, place)
        except Exception as error:  # both commits still work, one after the other
            log.debug("joint_commits.not_captured", error=repr(error))
