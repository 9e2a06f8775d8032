"""Windows in code that ``torch.compile`` compiles.

A window holds what it is given until commit. Inside a compiled graph a tensor may be gone
by then: the compiler reuses a buffer once it has seen its last use, and torch's version
counter does not notice. So every call on a window ends the graph before it, and what it is
given is an output of that graph, which lives. An operator (``torch.library``) hides the call
from the compiler; there rows are copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

#: By function: the compiler compares functions by identity, so each has one wrapper.
_outside: dict[Callable[..., object], Callable[..., object]] = {}


def outside_graphs(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """``function``, run by Python even where its caller is compiled.

    For a method that begins with ``if torch.compiler.is_compiling()``: that is true for the
    compiler alone, which looks into a function only where it names ``torch``. Asked for at
    import, this would import the compiler, which takes longer than all the rest.
    """
    if function not in _outside:
        _outside[function] = torch.compiler.disable(function)
    return _outside[function]  # type: ignore[return-value]


#: Where compiled graphs run: those of inductor, and of every compiler that takes AOTAutograd's.
_RUNNERS: Final = ("torch._inductor", "torch._functorch")


def within_graph() -> bool:
    """Whether a compiled graph is what called; without a compiler in the process it costs nothing.

    Nothing on the tensors tells: it is read off the stack.
    """
    if "torch._functorch.aot_autograd" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_RUNNERS):
            return True
        frame = frame.f_back
    return False
