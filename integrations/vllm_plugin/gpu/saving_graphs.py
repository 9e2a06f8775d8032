"""Graphs of whole forwards that save the rows which drafts overwrite, before they overwrite them.

Under ``undo`` a step would cost the host two launches, one that saves and one that commits. Where
the forward is one captured graph, the first of them is captured as its beginning. It reads the
slots in place as the forward does, and writes into kvtxn's own memory alone: a replay without a
window saves for nobody. Forwards that are not one graph have their rows saved when a step begins.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ...serving.graph_steps import GraphSteps
from ..begun_graphs import let_graphs_begin
from ..internals import Foreign


@attrs.frozen(eq=False)
class _Saving:
    """The save as a beginning of graphs.

    Attributes:
        steps: the steps whose windows the forwards save rows for.
    """

    steps: GraphSteps

    def launch_in_forward(self, num_rows: int) -> Callable[[], None] | None:
        """Return the launch that saves; see ``Beginning``."""
        return self.steps.save_in_forward(num_rows)

    def before_replay(self, *, included: bool | None) -> None:
        """Tell the steps of a replay; see ``Beginning``. Rows may be saved twice."""
        self.steps.before_replay(saves=bool(included))


def let_graphs_save(runner: Foreign, steps: GraphSteps) -> Callable[[], None] | None:
    """Let a runner's graphs save rows; see ``let_graphs_begin``."""
    return let_graphs_begin(runner, _Saving(steps))
