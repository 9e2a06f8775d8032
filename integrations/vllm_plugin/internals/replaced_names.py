"""Names in vLLM's code that stand for kvtxn's functions, and whether that code still uses them.

A replaced name that the code no longer uses changes nothing, and nobody notices. So each is looked
up in the code before anything is hooked.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from ....errors import LayerError


def method_of(layer: object, name: str) -> Callable[..., object]:
    """Return a method as a layer's class has it, without the layer."""
    method: Callable[..., object] = getattr(type(layer), name)
    return method


def with_globals(function: Any, **own: object) -> FunctionType:
    """Copy a function; in the copy some global names stand for other objects.

    Raises:
        LayerError: the function's code does not use one of the names.
    """
    for name in own:
        wrong = not_used(function, name)
        if wrong is not None:
            raise LayerError(
                "with_globals",
                wrong,
                expected=f"a use of the global name {name!r}",
                got="none",
                hint="report this with the version of vLLM: its function has changed",
            )
    names = {**function.__globals__, **own}
    parts = function.__name__, function.__defaults__, function.__closure__
    made = FunctionType(function.__code__, names, *parts)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def not_used(function: object, name: str) -> str | None:
    """Say in a sentence that a function's code does not use a global name; None if it does."""
    code = getattr(function, "__code__", None)
    if code is not None and name in _globals_of(code):
        return None
    return f"{getattr(function, '__qualname__', function)} does not use {name}"


@cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the global names that a function reads, by itself or in functions inside of it.

    ``co_names`` has the names of attributes as well, which are not looked up in the globals.
    """
    return frozenset(
        each.argval
        for part in _parts(code)
        for each in dis.get_instructions(part)
        if each.opname == "LOAD_GLOBAL"
    )


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)


def not_called(function: Any) -> str | None:
    """Say in a sentence that the module which defines a function never uses it; None if it does."""
    if function.__name__ in _used_in(function.__module__):
        return None
    return f"nothing in {function.__module__} uses {function.__qualname__}"


@cache
def _used_in(module: str) -> frozenset[str]:
    """Return the names and attributes that a module's source reads."""
    return frozenset(
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module])))
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    )
