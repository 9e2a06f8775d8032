"""Windows in code that ``torch.compile`` compiles.

A window holds the tensors it is given until commit. Inside a compiled graph such a tensor may be
gone by then: the compiler reuses a buffer after its last use in the graph, and torch's version
counter does not notice. So every call on a window ends the compiled graph before it. Its tensors
are then outputs of that graph, which stay alive. A call from a custom operator
(``torch.library``) is hidden from the compiler; there the rows are copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Final, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

#: The wrapper of each function: the compiler compares functions by identity, so one wrapper each.
_outside: dict[Callable[..., object], Callable[..., object]] = {}


def outside_graphs(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Return ``function`` in a wrapper that Python runs even if its caller is compiled.

    Use it in a method that begins with ``if torch.compiler.is_compiling()``. The condition is true
    only for the compiler, which traces only functions that name ``torch``. The wrapper is made at
    the first call, since making it at import would import the compiler, which takes long.
    """
    if function not in _outside:
        _outside[function] = torch.compiler.disable(function)
    return _outside[function]  # type: ignore[return-value]


def never_compiled(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Decorate a function that Python runs even where its caller is compiled."""

    @wraps(function)
    def guarded(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Call the function; where the compiler traces the call, it breaks its graph there."""
        if torch.compiler.is_compiling():
            return outside_graphs(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return guarded


#: Modules that run compiled graphs: inductor's, and those of every compiler behind AOTAutograd.
_RUNNERS: Final = ("torch._inductor", "torch._functorch")


def within_graph() -> bool:
    """Return whether a compiled graph is among the callers; cheap if no compiler was imported.

    A tensor does not show that it comes from a compiled graph, so the call stack is searched.
    """
    if "torch._functorch.aot_autograd" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_RUNNERS):
            return True
        frame = frame.f_back
    return False
