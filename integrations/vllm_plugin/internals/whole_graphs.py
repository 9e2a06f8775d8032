"""The V2 runner's graphs of whole forwards, and launches that they begin with.

Where the V2 runner captures a forward as one graph, ``BegunGraphs`` lets the forward begin with
launches of kvtxn's, so that the host need not make them. They read the runner's buffers in place,
as the forward does. Each sort of launch is told just before a replay whether the replay includes
it; if not, the host makes it.

Whether *every* graph includes a launch is counted, not assumed: if a model's forward never calls
the hook of its beginning, none of its graphs includes the launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, Final, Protocol

import attrs
import torch
from torch import nn

from .hooks import is_swapped, restore_class, swap_class

#: Methods of the runner's graph manager that a mixin overrides, with the parameters that it takes;
#: those behind ``model`` go through.
METHODS: Final = {"capture": "model", "run_fullgraph": "desc"}


def differs(owner: object) -> bool:
    """Tell whether a graph manager's methods are not those of ``METHODS``."""
    for name, first in METHODS.items():
        code = getattr(getattr(owner, name, None), "__code__", None)
        if code is None or code.co_varnames[1 : code.co_argcount][:1] != (first,):
            return True
    return False


@cache
def whole() -> object:
    """Return the mode of a step whose forward is one graph; see ``mode``."""
    from vllm.config.compilation import CUDAGraphMode

    return CUDAGraphMode.FULL


def mode(batch_desc: Any) -> object:
    """Return the mode in which a step's forward runs, of the argument of ``prepare_inputs``."""
    return batch_desc.cg_mode


def before_each(model: nn.Module, call: Callable[[int], None]) -> Callable[[], None]:
    """Call a function at the beginning of each forward of a model, with the forward's rows.

    Forwards that are captured in pieces are left out.

    Returns:
        A function that undoes it.
    """

    def begins(module: nn.Module, given: object) -> None:
        rows = _rows()
        if rows:
            call(rows)

    undo: Callable[[], None] = model.register_forward_pre_hook(begins).remove
    return undo


def _rows() -> int:
    """Count the rows, padding included, whose slots the forward that begins is given.

    A forward in pieces has none. One that is captured whole is in no mode itself.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    context = get_forward_context()
    if context.cudagraph_runtime_mode is not CUDAGraphMode.NONE:
        return 0
    slots = context.slot_mapping
    given = slots.values() if isinstance(slots, dict) else ()
    return max((int(each.shape[0]) for each in given), default=0)


def capturing() -> bool:
    """Tell whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
        if not capturing():
            self.launches[rows] = self.beginning.launch_in_forward(rows)
        elif (launch := self.launches.get(rows)) is not None:
            launch()
            self.graphs += 1


class BegunGraphs:
    """A mixin of vLLM's graph manager.

    Attributes:
        graphs: vLLM's captured forwards.
        kvtxn_beginnings: what the graphs begin with.
    """

    graphs: Mapping[object, object]
    kvtxn_beginnings: list[_Counted]

    def capture(self, model: nn.Module, *others: Any, **named: Any) -> None:
        """Capture each forward with its beginnings; vLLM runs each once beforehand."""
        with ExitStack() as undo:
            for each in self.kvtxn_beginnings:
                if not self.graphs:
                    each.graphs = 0  # the graphs of an earlier time are gone
                undo.callback(each.launches.clear)
                undo.callback(before_each(model, each.begins))
            super().capture(model, *others, **named)  # type: ignore[misc]

    def run_fullgraph(self, desc: object) -> object:
        """Tell the beginnings, then replay."""
        for each in self.kvtxn_beginnings:
            each.beginning.before_replay(included=each.included(len(self.graphs)))
        found: object = super().run_fullgraph(desc)  # type: ignore[misc]
        return found


def let_graphs_begin(runner: object, beginning: Beginning) -> Callable[[], None] | None:
    """Let a runner's graphs of whole forwards begin with launches, before any of them is captured.

    Returns:
        A function that undoes it, though graphs that are captured by then stay as they are; None if
        the runner has no such graphs, or if they are made in an unknown way.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None or differs(manager) or manager.graphs:
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
