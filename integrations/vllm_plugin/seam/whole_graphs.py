"""The V2 runner's graphs of whole forwards, which begin by saving the rows that drafts overwrite.

Where the V2 runner captures a forward as one graph, ``SavingGraphs`` lets the forward begin with
the launch that saves, so that the host need not make it. It reads the runner's buffers in place, as
the forward does. The steps are told just before a replay whether the replay includes the launch; if
not, the host makes it.

Whether *every* graph includes the launch is counted, not assumed: if a model's forward never calls
the hook of its beginning, none of its graphs includes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from ...serving.graph_steps import GraphSteps
from .hooks import mix_in

#: Methods of the runner's graph manager that a mixin overrides, with the parameters that it takes;
#: those behind ``model`` go through.
METHODS: Final = {"capture": "model", "run_fullgraph": "desc"}


def differs(owner: object) -> bool:
    """Tell whether a graph manager lacks a method of ``METHODS``, or its first parameter."""
    for name, first in METHODS.items():
        code = getattr(getattr(owner, name, None), "__code__", None)
        if code is None or code.co_varnames[1 : code.co_argcount][:1] != (first,):
            return True
    return False


@cache
def whole() -> object:
    """Return vLLM's mode of a step whose forward is one graph, to compare with ``mode``."""
    from vllm.config.compilation import CUDAGraphMode

    return CUDAGraphMode.FULL


def mode(batch_desc: Any) -> object:
    """Return vLLM's mode in which a step's forward runs.

    Args:
        batch_desc: the argument of ``prepare_inputs``.
    """
    return batch_desc.cg_mode


def before_each(model: nn.Module, call: Callable[[int], None]) -> Callable[[], None]:
    """Call a function at the beginning of each forward of a model, with its number of rows.

    Rows include padding. Left out are forwards in pieces, and forwards without slots.

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

    0 for a forward in pieces, and for one without slots. One that is captured whole is in no mode
    itself.
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


class SavingGraphs:
    """A mixin of vLLM's graph manager.

    Attributes:
        graphs: vLLM's captured forwards.
        kvtxn_steps: the steps whose windows the forwards save rows for.
        kvtxn_launches: the launches that save, by rows of a forward that was not captured yet.
        kvtxn_saving: the number of graphs that save.
    """

    graphs: Mapping[object, object]
    kvtxn_steps: GraphSteps
    kvtxn_launches: dict[int, Callable[[], None] | None]
    kvtxn_saving: int

    def capture(self, model: nn.Module, *others: Any, **named: Any) -> None:
        """Let vLLM capture the forwards, each with its save.

        vLLM runs each once beforehand; there the launch that saves is made. The count of graphs
        that save begins anew if there are no graphs yet.
        """
        if not self.graphs:
            self.kvtxn_saving = 0  # the graphs of an earlier time are gone
        undo = before_each(model, self.kvtxn_begins)
        try:
            super().capture(model, *others, **named)  # type: ignore[misc]
        finally:
            undo()
            self.kvtxn_launches.clear()

    def kvtxn_begins(self, rows: int) -> None:
        """At the beginning of a forward, make the launch that saves its rows, or capture it.

        It is made in the run before the capture, and counted when captured. A forward without such
        a launch saves nothing.
        """
        if not capturing():
            self.kvtxn_launches[rows] = self.kvtxn_steps.save_in_forward(rows)
        elif (launch := self.kvtxn_launches.get(rows)) is not None:
            launch()
            self.kvtxn_saving += 1

    def run_fullgraph(self, desc: object) -> object:
        """Say to the steps whether the replay saves rows, then replay, and return its output.

        It counts as saving only if all graphs do; if only some do, rows may be saved twice.
        """
        self.kvtxn_steps.before_replay(saves=self.kvtxn_saving == len(self.graphs))
        found: object = super().run_fullgraph(desc)  # type: ignore[misc]
        return found


def let_graphs_save(runner: object, steps: GraphSteps) -> Callable[[], None] | None:
    """Let a runner's graphs of whole forwards save rows, before any of them is captured.

    Returns:
        A function that undoes it, though graphs that are captured by then stay as they are; None if
        the runner has no such graphs, has captured some, or makes them in an unknown way.
    """
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None or differs(manager) or manager.graphs:
        return None
    return mix_in(manager, SavingGraphs, kvtxn_steps=steps, kvtxn_launches={}, kvtxn_saving=0)
