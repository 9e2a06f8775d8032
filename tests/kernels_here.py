"""Kernels run on the GPU where there is one, else through Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ON_GPU = torch.cuda.is_available()


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
            import quick_interpreter

            quick_interpreter.prepare()
        yield
    finally:
        os.environ.pop("TRITON_INTERPRET", None)
