"""Graphs of whole forwards that save the rows which drafts overwrite, before they overwrite them.

Under ``undo`` a step would cost the host two launches, one that saves and one that commits. Where
the forward is one captured graph, the first of them is captured as its beginning. It reads the
slots in place as the forward does, and writes into kvtxn's own memory alone: a replay without a
window saves for nobody. Forwards that are not one graph have their rows saved when a step begins.

Whether *every* graph saves is counted, not assumed. Of a model whose forward does not call the hook
of its beginning no graph saves, and rows are saved by a launch just before each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...serving.graph_steps import GraphSteps
from ..attach import mix_in
from ..internals import Foreign, whole_graphs


class SavingGraphs:
    """A mixin of vLLM's graph manager.

    Attributes:
        kvtxn_steps: the steps whose windows the forwards save rows for.
        kvtxn_saving: how many graphs begin with a save.
    """

    kvtxn_steps: GraphSteps
    kvtxn_saving: int = 0

    def capture(self, model: Any, *others: Any, **named: Any) -> None:
        """Capture each forward with a save as its beginning; vLLM runs each once beforehand."""
        launches: dict[int, Callable[[], None] | None] = {}
        if not whole_graphs.count(self):
            self.kvtxn_saving = 0  # the graphs of an earlier time are gone

        def begins(rows: int) -> None:
            if not whole_graphs.capturing():
                launches[rows] = self.kvtxn_steps.save_in_forward(rows)
            elif (save := launches.get(rows)) is not None:
                save()
                self.kvtxn_saving += 1

        undo = whole_graphs.before_each(model, begins)
        try:
            super().capture(model, *others, **named)  # type: ignore[misc]
        finally:
            undo()

    def run_fullgraph(self, desc: Any) -> Any:
        """Tell the steps, then replay."""
        saves = whole_graphs.count(self) == self.kvtxn_saving
        self.kvtxn_steps.before_replay(saves=saves)
        return super().run_fullgraph(desc)  # type: ignore[misc]


def let_graphs_save(runner: Foreign, steps: GraphSteps) -> Callable[[], None] | None:
    """Let a runner's graphs of whole forwards save rows, before any of them is captured.

    Returns:
        A function that undoes it, though graphs that are captured by then go on saving; None if the
        runner has no such graphs, or if they are made in an unknown way.
    """
    manager = whole_graphs.manager(runner)
    if manager is None or whole_graphs.differs(manager) or whole_graphs.count(manager):
        return None
    return mix_in(manager, SavingGraphs, kvtxn_steps=steps, kvtxn_saving=0)
