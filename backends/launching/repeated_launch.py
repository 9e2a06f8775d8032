"""Launching a compiled Triton kernel again through CUDA's driver, its arguments packed once.

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

#: Triton compiles a kernel for addresses that are multiples of this, and one for others.
ALIGNED: Final = 16
#: Addresses of scratch memory behind the arguments; null, as these kernels use none.
SCRATCH: Final = 2
#: What a compiled kernel must not ask for: what a launch here does not arrange.
_UNUSUAL: Final = (
    *("global_scratch_size", "profile_scratch_size"),
    *("launch_cooperative_grid", "launch_pdl", "gsan"),
)


class RepeatedLaunch:
    """A compiled kernel with its arguments, launched again after some of them were set.

    It keeps no tensor alive: the caller must, as long as it launches.

    Args:
        compiled: what Triton compiled, launched at least once.
        grid: the sizes of the launch's grid.
        arguments: all arguments in the order of the kernel's signature, constants last.
        constants: the number of the constants.
        device: of the launch.
        trial: the launch by which ``works`` tries the driver.

    Attributes:
        compiled: as given.
        words: int64, the arguments without constants, then null for scratch memory; a word that is
            set counts from the next launch on.
        programs: the sizes of the grid; a ``value`` that is set counts likewise.
        by_driver: True as long as the driver takes the launch; Triton makes it otherwise.
    """

    __slots__ = (
        *("_arguments", "_at", "_constants", "_device", "_fixed", "_launch", "_stream"),
        *("_stream_of", "by_driver", "compiled", "programs", "words"),
    )

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: int,
        device: torch.device,
        *,
        trial: bool = False,
    ) -> None:
        self.compiled: Final = compiled  # as long as this lives, so does the driver's handle
        end = len(arguments) - constants
        self._constants: Final = tuple(arguments[end:])
        self.words: Final = (ctypes.c_int64 * (end + SCRATCH))(*map(address_of, arguments[:end]))
        self.programs: Final = tuple(map(ctypes.c_uint, grid))
        self.by_driver = all(grid) and _is_usual(compiled) and (trial or _drives(device))
        if self.by_driver:
            self._prepare(_number(device))

    def _prepare(self, device: int) -> None:
        """Make the arguments of the driver's call, which a launch passes as they are."""
        number, metadata = len(self.words), self.compiled.metadata
        begin = ctypes.addressof(self.words)
        self._at = (ctypes.c_void_p * number)(*range(begin, begin + 8 * number, 8))
        threads = metadata.num_warps * metadata.target.warp_size
        sizes = map(ctypes.c_uint, (threads, 1, 1, metadata.shared))
        self._fixed = (ctypes.c_void_p(self.compiled.function), *self.programs, *sizes)
        self._launch = _launcher()
        self._stream_of = triton.runtime.driver.active.get_current_stream
        self._device = device
        self._stream = self._stream_of(device)
        self._arguments = *self._fixed, ctypes.c_void_p(self._stream), self._at, None

    def run(self) -> None:
        """Launch on the current stream; does not wait. If the driver refuses, Triton launches.

        Triton does so from then on: ``by_driver`` becomes False.
        """
        if self.by_driver:
            stream = self._stream_of(self._device)
            if stream != self._stream:
                self._stream = stream
                self._arguments = *self._fixed, ctypes.c_void_p(stream), self._at, None
            if self._launch(*self._arguments) == 0:
                return
            self.by_driver = False  # Triton says what is wrong
        grid = tuple(size.value for size in self.programs)
        self.compiled[grid](*self.words[:-SCRATCH], *self._constants)


def _drives(device: torch.device) -> bool:
    """Tell whether a launch by the driver works on a device; the first call tries it and waits.

    False without CUDA and during a capture.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False  # to try the driver first would spoil a capture
    return works(_number(device))


def _number(device: torch.device) -> int:
    """Return the number of a CUDA device; the current one's if it has no index."""
    return torch.cuda.current_device() if device.index is None else device.index


def _is_usual(compiled: Any) -> bool:
    """Tell whether a compiled kernel needs no more than a plain launch of the driver.

    False for no compiled kernel of CUDA, for clusters, and for scratch memory or special launches.
    """
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
    """Tell whether a launch by the driver writes what it should on a device; waits for it, once.

    False, with the reason in the log, if anything raises.

    Args:
        device: its number.
    """
    try:
        where = torch.device("cuda", device)
        given = torch.arange(6, device=where)
        out, grid = torch.zeros_like(given), (3, 2, 1)
        compiled = _add[grid](given, 1, 0, out, 0, 3)
        once = out.tolist() == [number + 3 for number in range(6)]
        arguments = (given, -(1 << 40), -5, out, 9, 3)
        again = RepeatedLaunch(compiled, grid, arguments, 1, where, trial=True)
        again.run()
        right = out.tolist() == [number - 3 * (1 << 40) - 14 for number in range(6)]
        found, why = once and again.by_driver and right, "the result was another one"
    except Exception as error:
        found, why = False, repr(error)
    if not found:
        log.debug("driver.launched_by_triton", device=device, why=why)
    return found


def address_of(argument: Any) -> Any:
    """Return the address of a tensor, and anything else as it is."""
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def memoryview_of(numbers: Tensor) -> memoryview:
    """View the memory of an int64 tensor ``[n]`` on the host as int64 items; writes go through.

    The tensor is contiguous, and must stay alive.
    """
    memory = (ctypes.c_int64 * len(numbers)).from_address(numbers.data_ptr())
    return memoryview(memory).cast("B").cast("q")
