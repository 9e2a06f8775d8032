"""Calls that ``torch.compile`` leaves as they are.

A window holds what it is given until commit. Inside a compiled graph a tensor may be gone
by then: the compiler reuses a buffer once it has seen its last use. So every call on a
window ends the graph before it, and what it is given is an output of that graph, which lives.
It also spares the compiler, and those who read its messages, the code behind the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
