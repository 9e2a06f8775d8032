"""Triton's interpreter in a third of its time, and right about bfloat16.

It makes types, shapes and constants anew for every value of a kernel, which takes most of its time.
"""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def _prepare_once_per_launch() -> None:
    """Replace Triton's functions once per launch instead of once per call.

    The interpreter searches for them at each call of a device function as well, though all are
    replaced by then. The launch's end puts them back.
    """
    replace, done = interpreter._patch_lang, set[tuple[bool, ...]]()

    @cache
    def seen_by(function: Any) -> tuple[bool, ...]:
        names = list(function.__globals__.values())
        return tuple(any(name is each for name in names) for each in (language, core))

    def replaced(function: Any) -> Any:
        if (seen := seen_by(function)) in done:
            return None  # a device function, whose caller wants nothing
        scope = replace(function)
        if not done:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.add(seen)
        return scope

    interpreter._patch_lang = replaced


def _call_without_detours() -> None:
    """Call a function of Triton's with what the interpreter adds, not by way of two others.

    And look for the functions of a module or class once.
    """

    def called_by_kernels(member: Any) -> Any:
        function, own = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def called(*given: Any, **named: Any) -> Any:
            named["_semantic"] = own
            return function(*given, **named)

        return called

    @cache
    def functions(owner: Any) -> list[tuple[str, Any]]:
        members = inspect.getmembers(owner)
        return [(name, called_by_kernels(each)) for name, each in members if core.is_builtin(each)]

    def replace(owner: Any, builder: Any, scope: Any) -> None:
        for name, called in functions(owner):
            scope.set_attr(owner, name, called)

    interpreter._patch_builtin = replace


def _compute_what_counts() -> None:
    """Leave out what nobody looks at, and look up each dtype once.

    The interpreter computes every sum and product of integers twice, to find overflows, and drops
    the result: the assertion is made in Triton's debug mode alone.
    """
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def found(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(element, language.pointer_type):
            return find(element)
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    interpreter._get_np_dtype = found
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _make_types_once() -> None:
    """Let equal types of blocks share what they hold, and values of a type their shape."""
    make, create, same = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    known, shapes = dict[tuple[Any, ...], dict[str, Any]](), dict[tuple[int, ...], Any]()

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = (element_ty.name, *sizes)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = vars(self)
        self.__dict__ = known[key]

    def value(self: Any, handle: Any, type: Any) -> None:
        facts = vars(type)
        if "of_values" not in facts:
            create(self, handle, type)
            shape = shapes.setdefault(tuple(each.value for each in self.shape), self.shape)
            facts["of_values"] = (shape, self.numel, self.dtype)
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = facts["of_values"]

    core.block_type.__init__ = made
    core.tensor.__init__ = value
    core.dtype.__eq__ = lambda self, other: self is other or same(self, other)


def _convert_what_differs() -> None:
    """Leave two numbers of one type and shape as they are, and make each constant once."""
    semantics, tensor, ints = semantic.TritonSemantic, core.tensor, core.dtype.SINT_TYPES
    spread_both, convert = semantics.broadcast_impl_value, semantics.binary_op_type_checking_impl
    unwrap, constants = core._unwrap_if_constexpr, dict[tuple[Any, ...], Any]()

    def spread(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        return (left, right) if left.shape is right.shape else spread_both(self, left, right)

    def converted(self: Any, left: Any, right: Any, *pointers: bool, **how: Any) -> Any:
        if type(left) is not tensor:
            return convert(self, left, right, *pointers, **how)
        kind = left.dtype
        if type(right) is int and kind.name in ints:
            shape = left.type.shape if left.type.is_block() else ()
            key = (right, kind.name, *shape)
            if key not in constants:
                both = convert(self, left, right, *pointers, **how)
                if both[0].dtype is not kind:  # the number is too large for it
                    return both
                constants[key] = both[1]
            return left, constants[key]
        if type(right) is tensor and (
            (kind is right.dtype and kind.name in ints)
            or (len(pointers) > 0 and pointers[0] and kind.is_ptr() and right.dtype.is_int())
        ):
            return spread(self, left, right)
        return convert(self, left, right, *pointers, **how)

    semantics.broadcast_impl_value = spread
    semantics.binary_op_type_checking_impl = converted
    core._unwrap_if_constexpr = lambda value: value if type(value) is tensor else unwrap(value)


def _keep_what_is_right() -> None:
    """Look at no size of what has the type of an operand."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    operate = builder.binary_op

    def made(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def operated(self: Any, left: Any, right: Any, function: Any) -> Any:
        kind = left.data.dtype
        if kind is not right.data.dtype or kind.kind == "b":
            return operate(self, left, right, function)
        return handle(function(left.data, right.data), left.dtype.scalar)

    handle.__init__ = made
    builder.binary_op = operated


def _multiply_bfloat16() -> None:
    """Let a product of matrices take bfloat16 for numbers: the interpreter takes their bits."""
    from triton import language as tl

    builder = interpreter.interpreter_builder
    multiply = type(builder).create_dot

    def product(left: Any, right: Any, *others: Any) -> Any:
        wide = [
            builder.cast_impl(each, tl.block_type(tl.float32, list(each.data.shape)))
            if each.dtype.scalar == tl.bfloat16
            else each
            for each in (left, right)
        ]
        return multiply(builder, *wide, *others)

    builder.create_dot = product


@cache
def prepare() -> None:
    """Do all of it, once per process."""
    _prepare_once_per_launch()
    _call_without_detours()
    _compute_what_counts()
    _make_types_once()
    _convert_what_differs()
    _keep_what_is_right()
    _multiply_bfloat16()
