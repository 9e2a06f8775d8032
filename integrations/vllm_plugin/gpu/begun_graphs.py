"""Launches that vLLM's graphs of whole forwards begin with, so that the host need not make them.

Where the V2 runner captures a forward as one graph, ``BegunGraphs`` lets the forward begin with
launches of kvtxn's. They read the runner's buffers in place, as the forward does. Each sort of
launch is told just before a replay whether the replay includes it; if not, the host makes it.

Whether *every* graph includes a launch is counted, not assumed. Of a model whose forward does not
call the hook of its beginning no graph does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import attrs

from ..internals import Foreign, whole_graphs
from ..internals.class_swaps import is_swapped, restore_class, swap_class


class Beginning(Protocol):
    """A sort of launch that graphs begin with."""

    def launch_in_forward(self, num_rows: int) -> Callable[[], None] | None:
        """Return a launch for the beginning of a forward, once it has compiled.

        Args:
            num_rows: rows of the forward.

        Returns:
            The launch; None: forwards of so many rows begin without.
        """

    def before_replay(self, *, included: bool | None) -> None:
        """Hear that a graph is replayed now.

        Args:
            included: the graph begins with the launch; False: no graph does, and the launch has to
                be made now; None: some do, and nobody knows which.
        """


@attrs.define(eq=False)
class _Counted:
    """A beginning, and the graphs that include it.

    Attributes:
        beginning: the beginning.
        launches: its launches, by rows of a forward that has run and was not captured yet.
        graphs: the number of graphs that include it.
    """

    beginning: Beginning
    launches: dict[int, Callable[[], None] | None] = attrs.field(factory=dict)
    graphs: int = 0

    def included(self, number: int) -> bool | None:
        """Tell whether each of so many graphs includes the launch, or none does; None: some do."""
        return self.graphs == number if self.graphs in (0, number) else None

    def begins(self, rows: int) -> None:
        """Note the launch of a forward that vLLM tries before its capture; then capture it."""
        if not whole_graphs.capturing():
            self.launches[rows] = self.beginning.launch_in_forward(rows)
        elif (launch := self.launches.get(rows)) is not None:
            launch()
            self.graphs += 1


class BegunGraphs:
    """A mixin of vLLM's graph manager.

    Attributes:
        kvtxn_beginnings: what the graphs begin with.
    """

    kvtxn_beginnings: list[_Counted]

    def capture(self, model: Any, *others: Any, **named: Any) -> None:
        """Capture each forward with its beginnings; vLLM runs each once beforehand."""
        with ExitStack() as undo:
            for each in self.kvtxn_beginnings:
                if not whole_graphs.count(self):
                    each.graphs = 0  # the graphs of an earlier time are gone
                undo.callback(each.launches.clear)
                undo.callback(whole_graphs.before_each(model, each.begins))
            super().capture(model, *others, **named)  # type: ignore[misc]

    def run_fullgraph(self, desc: Any) -> Any:
        """Tell the beginnings, then replay."""
        number = whole_graphs.count(self)
        for each in self.kvtxn_beginnings:
            each.beginning.before_replay(included=each.included(number))
        return super().run_fullgraph(desc)  # type: ignore[misc]


def let_graphs_begin(runner: Foreign, beginning: Beginning) -> Callable[[], None] | None:
    """Let a runner's graphs of whole forwards begin with launches, before any of them is captured.

    Returns:
        A function that undoes it, though graphs that are captured by then stay as they are; None if
        the runner has no such graphs, or if they are made in an unknown way.
    """
    manager = whole_graphs.manager(runner)
    if manager is None or whole_graphs.differs(manager) or whole_graphs.count(manager):
        return None
    if not is_swapped(manager):
        swap_class(manager, BegunGraphs)
        manager.kvtxn_beginnings = []
    counted = _Counted(beginning)
    manager.kvtxn_beginnings.append(counted)

    def undo() -> None:
        manager.kvtxn_beginnings.remove(counted)
        if not manager.kvtxn_beginnings:
            restore_class(manager)
            del manager.kvtxn_beginnings

    return undo
