"""Launching a captured graph through CUDA's driver; torch's own replay takes the host longer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """A captured launch: a ``torch.cuda.CUDAGraph``, or a stand-in of one without a GPU."""

    def replay(self) -> None:
        """Launch the captured graph; its kernels read and write the buffers of the capture."""


def replay_of(graph: Graph) -> Callable[[], None]:
    """Return a function that replays a graph on the current stream in as little time as can be.

    It keeps the graph, which must draw no random numbers: torch tells those apart in its own
    ``replay``. It raises RuntimeError if the driver refuses. If this torch or driver has no such
    way, it is torch's replay without Python around it; of a stand-in without a GPU it is
    ``replay``.
    """
    if not isinstance(graph, torch.cuda.CUDAGraph):
        return graph.replay
    try:
        return _launch_of(graph)
    except (AttributeError, OSError, RuntimeError):  # torch or the driver is another one
        found: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
        return found


def _launch_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Return the driver's launch of a graph; what torch does around it takes the host longer.

    The launch gives Python's lock away, since it waits while the device's queue is full: the queue
    may wait for a host function that needs the lock. The driver launches in the thread's own
    context: where that is of another device, torch launches.
    """
    by_torch: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
    stream_of = torch._C._cuda_getCurrentRawStream
    device_of, device = torch._C._cuda_getDevice, torch.cuda.current_device()
    handle = ctypes.c_void_p(graph.raw_cuda_graph_exec())
    launch = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
    known = stream_of(device)
    given = handle, ctypes.c_void_p(known)

    def replay() -> None:
        """Launch the graph on the current stream; by torch where another device is current."""
        nonlocal known, given
        if device_of() != device:
            by_torch()
            return
        stream = stream_of(device)
        if stream != known:
            known, given = stream, (handle, ctypes.c_void_p(stream))
        error = launch(*given)
        if error:
            raise RuntimeError(f"the driver did not launch {graph}: error {error}")

    return replay
