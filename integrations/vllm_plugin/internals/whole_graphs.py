"""The V2 runner's graphs of whole forwards: when one is captured, and when one is replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch

from . import Foreign

#: Methods of the runner's graph manager that a mixin overrides, with the parameters that it takes;
#: those behind ``model`` go through.
METHODS: Final = {"capture": "model", "run_fullgraph": "desc"}


def manager(runner: Any) -> Foreign | None:
    """Return the object that captures and replays a runner's forwards; None without any."""
    return getattr(runner, "cudagraph_manager", None)


def differs(owner: Any) -> bool:
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


def count(owner: Any) -> int:
    """Return how many graphs of whole forwards a graph manager has."""
    return len(owner.graphs)


def before_each(model: Any, call: Callable[[int], None]) -> Callable[[], None]:
    """Call a function at the beginning of each forward of a model, with the forward's rows.

    Forwards that are captured in pieces are left out.

    Returns:
        A function that undoes it.
    """

    def begins(module: Any, given: Any) -> None:
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
