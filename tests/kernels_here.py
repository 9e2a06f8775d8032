"""Kernels run on the GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()


def _prepare_once_per_launch() -> None:
    """Let the interpreter replace Triton's functions once per launch instead of once per call.

    It searches for them at each call of a device function as well, though all are replaced by then,
    and that takes a third of a launch's time. The launch's end puts them back.
    """
    from triton import language
    from triton.runtime import interpreter

    replace, done = interpreter._patch_lang, set[tuple[bool, ...]]()
    if replace.__module__ != interpreter.__name__:
        return

    def replaced(function: Any) -> Any:
        names = list(function.__globals__.values())
        seen = tuple(any(name is each for name in names) for each in (language, language.core))
        if seen in done:
            return None  # a device function, whose caller wants nothing
        scope = replace(function)
        if not done:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.add(seen)
        return scope

    interpreter._patch_lang = replaced


def _compute_what_counts() -> None:
    """Let the interpreter leave out what nobody looks at, and look up each dtype once.

    It computes every sum and product of integers twice, to find overflows, and drops the result:
    the assertion is made in Triton's debug mode alone. That takes a third of a launch's time.
    """
    from triton import language
    from triton.runtime import interpreter

    find, known = interpreter._get_np_dtype, dict[str, Any]()
    if find.__module__ != interpreter.__name__:
        return

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


def _multiply_bfloat16() -> None:
    """Let the interpreter's matrix product take bfloat16 for numbers: it takes their bits."""
    from triton import language as tl
    from triton.runtime import interpreter

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


@contextmanager
def importing_kernels() -> Iterator[None]:
    """Import modules with kernels in here: it is then that Triton decides how to run them.

    Skips the importing test module where there is no Triton.
    """
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton", reason="the kernels need Triton")
        if not ON_GPU:
            pytest.importorskip("triton.experimental.gluon")  # else imported later, uninterpreted
            _prepare_once_per_launch()
            _compute_what_counts()
            _multiply_bfloat16()
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
