"""Launching a compiled Triton kernel through CUDA's driver, its arguments packed once.

Triton's launcher takes every argument apart in every launch, which costs the host several times
what the driver's own call does. The driver wants the address of each argument. Here the arguments
are words of 64 bits, one after the other, so a launch that recurs writes only those that differ. Of
a shorter one's word the lower part counts.

This relies on three things of Triton: a kernel's parameters are its arguments without constants, in
their order; behind them come at most two addresses of scratch memory; and a compiled kernel has the
driver's handle. ``works`` tries it once for each device. Where it fails, and for a kernel that
needs more than this, Triton launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...log import get_logger

log = get_logger()

#: Addresses of scratch memory behind the arguments; null, as these kernels use none.
SCRATCH: Final = 2
#: What a compiled kernel must not ask for: what a launch here does not arrange.
_UNUSUAL: Final = (
    *("global_scratch_size", "profile_scratch_size"),
    *("launch_cooperative_grid", "launch_pdl", "gsan"),
)


class PackedLaunch:
    """A launch whose arguments are packed.

    Args:
        compiled: what Triton compiled, launched at least once.
        grid: the sizes of the launch's grid.
        arguments: addresses and numbers, without constants.
        device: the number of the launch's device.

    Attributes:
        words: int64, the arguments; a word that is set counts from the next launch on.
        programs: the sizes of the grid; a ``value`` that is set counts likewise.
    """

    __slots__ = (
        *("_arguments", "_at", "_compiled", "_device", "_fixed", "_launch", "_stream"),
        *("_stream_of", "programs", "words"),
    )

    def __init__(
        self, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[int], device: int
    ) -> None:
        self._compiled: Final = compiled  # as long as this lives, so does the driver's handle
        number, metadata = len(arguments) + SCRATCH, compiled.metadata
        self.words: Final = (ctypes.c_int64 * number)(*arguments)
        begin = ctypes.addressof(self.words)
        self._at: Final = (ctypes.c_void_p * number)(*range(begin, begin + 8 * number, 8))
        threads = metadata.num_warps * metadata.target.warp_size
        self.programs: Final = tuple(map(ctypes.c_uint, grid))
        sizes = map(ctypes.c_uint, (threads, 1, 1, metadata.shared))
        self._fixed: Final = (ctypes.c_void_p(compiled.function), *self.programs, *sizes)
        self._launch: Final = _launcher()
        self._stream_of: Final = triton.runtime.driver.active.get_current_stream
        self._device: Final = device
        self._stream = self._stream_of(device)
        self._arguments = *self._fixed, ctypes.c_void_p(self._stream), self._at, None

    def run(self) -> bool:
        """Launch on the current stream; tells whether the driver took it."""
        stream = self._stream_of(self._device)
        if stream != self._stream:
            self._stream = stream
            self._arguments = *self._fixed, ctypes.c_void_p(stream), self._at, None
        return bool(self._launch(*self._arguments) == 0)


def pack(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[int], device: torch.device
) -> PackedLaunch | None:
    """Pack a launch; None where Triton has to launch.

    Args:
        compiled: what Triton compiled, launched at least once.
        grid: the sizes of the launch's grid.
        arguments: addresses and numbers, without constants.
        device: of the launch.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None  # to try the driver first would spoil a capture
    if not works(_number(device)) or not _is_usual(compiled):
        return None
    return PackedLaunch(compiled, grid, arguments, _number(device))


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _is_usual(compiled: Any) -> bool:
    """Tell whether a launch as it is made here is all that a kernel needs."""
    metadata = getattr(compiled, "metadata", None)
    if metadata is None or metadata.target.backend != "cuda":
        return False
    clusters = getattr(metadata, "num_ctas", 1)
    return clusters == 1 and not any(getattr(metadata, name, 0) for name in _UNUSUAL)


@cache
def _launcher() -> Any:
    """Return the driver's call.

    Raises:
        OSError: there is no driver.
        AttributeError: the driver has no such call.
    """
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernel


@triton.jit(do_not_specialize=["first", "short", "second"])
def _add(
    given: tl.tensor,
    first: tl.int64,
    short: tl.int32,
    out: tl.tensor,
    second: tl.int64,
    FACTOR: tl.constexpr,
) -> None:
    """Write ``given + first * FACTOR - second + short``, one number for each program.

    An argument of 32 bits stands between longer ones: of its word the lower half counts.
    """
    index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + index, tl.load(given + index) + first * FACTOR - second + short)


@cache
def works(device: int) -> bool:
    """Try a launch on a device and compare what it wrote. Waits for the device, once.

    Args:
        device: its number.
    """
    try:
        given = torch.arange(6, device=f"cuda:{device}")
        out, grid = torch.zeros_like(given), (3, 2, 1)
        compiled = _add[grid](given, 1, 0, out, 0, 3)
        once = out.tolist() == [number + 3 for number in range(6)]
        arguments = (given.data_ptr(), -(1 << 40), -5, out.data_ptr(), 9)
        again = _is_usual(compiled) and PackedLaunch(compiled, grid, arguments, device).run()
        right = out.tolist() == [number - 3 * (1 << 40) - 14 for number in range(6)]
        found, why = once and again and right, "the result was another one"
    except Exception as error:
        found, why = False, repr(error)
    if not found:
        log.debug("driver.launched_by_triton", device=device, why=why)
    return found


def address_of(argument: Any) -> Any:
    """Return the address of a tensor, and anything else as it is."""
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
