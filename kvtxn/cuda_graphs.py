"""Capture launches as a CUDA graph in the middle of serving: one wrapper of torch's capture."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def capture(run: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture the launches of a function on the current device.

    Unlike ``torch.cuda.graph``, this neither waits for the device nor empties torch's memory cache,
    so it may happen between two steps of an engine. Other threads may go on using CUDA meanwhile.

    Args:
        run: launches kernels and does not wait for any of them. Call it once before the capture, so
            that every kernel is compiled and every buffer allocated by then.
        pool: from ``torch.cuda.graph_pool_handle``: graphs of one pool share the memory that their
            functions allocate, so none of them may run while another one does.

    Returns:
        The graph. It owns the memory that ``run`` allocates, and keeps the kernels' addresses.
    """
    graph = torch.cuda.CUDAGraph()
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with _no_garbage_collection(), torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    return graph


def replay_of(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """Return what replays a graph on the current stream, in as little of the host's time as can be.

    It keeps the graph, which must draw no random numbers: torch tells those apart in its own
    ``replay``. Of a stand-in without a GPU it is ``replay``.
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


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Give the stream that captures on a device use: the default stream cannot be captured."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: freeing a dead graph or event would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
