"""Memory of the host as numbers that Python may write."""

from __future__ import annotations

import ctypes

from torch import Tensor


def memoryview_of(numbers: Tensor) -> memoryview:
    """Return the memory of int64 ``[n]`` on the host, contiguous, which must stay alive."""
    memory = (ctypes.c_int64 * len(numbers)).from_address(numbers.data_ptr())
    return memoryview(memory).cast("B").cast("q")
