"""Capture launches as a CUDA graph in the middle of serving: one wrapper of torch's capture."""

from __future__ import annotations

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
    """Return what replays a graph: torch's method in C, without the one in Python around it.

    It keeps the graph. Of a stand-in without a GPU it is ``replay``.
    """
    if isinstance(graph, torch.cuda.CUDAGraph):
        found: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
        return found
    return graph.replay


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
