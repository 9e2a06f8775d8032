"""Capture launches as a CUDA graph in the middle of serving, and keep a bounded number of graphs.

One wrapper of torch's capture, and the cache that an engine's graphs share.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import attrs
import torch

#: Bytes that the graph of one small launch takes on an H100, outside of torch's memory: 110 KiB
#: were measured. The driver allocates for several graphs at once, so that most of them seem to
#: take nothing: each counts as this at least.
GRAPH_BYTES: Final = 112 << 10

#: More bytes than a graph of some launches takes. If the device has so many more in use after a
#: capture, they are not the graph's: another process has taken them, or the driver has, which it
#: does once, at the first capture of a process.
_NO_GRAPH: Final = 8 << 20

#: Bytes that an engine's captured graphs may take, about 600 graphs. The layouts of steady traffic
#: have some dozens, and those of every batch of up to 256 requests alike have 256; and it is less
#: than a thousandth of a large GPU's memory, which the KV cache goes without.
MOST_BYTES: Final = 64 << 20

#: Replays the captured launches.
Replay = Callable[[], None]


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


@attrs.frozen(eq=False)
class _Kept:
    """A graph's bytes, and the function that tells its owner to forget it."""

    nbytes: int
    dropped: Callable[[], None]


class GraphCache:
    """The captured graphs that an engine's commits share, bounded in bytes.

    The graph that was not replayed for longest goes first. Its owner forgets it, makes the launches
    one by one again, and captures them anew when they recur. With the owner's reference the graph
    is destroyed. One that is on the device then is not terminated: the driver frees it when the
    device is done with it (``cuGraphExecDestroy`` of the CUDA driver API).

    Args:
        most_bytes: the bound.

    Attributes:
        most_bytes: as given.
        nbytes: bytes of the graphs that are kept, outside of torch's memory.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[object, _Kept] = OrderedDict()

    def __len__(self) -> int:
        """Count the graphs that are kept."""
        return len(self._kept)

    def add(self, make: Callable[[], Replay | None], dropped: Callable[[], None]) -> Replay | None:
        """Capture a graph and keep it, and drop others if there are too many bytes.

        Args:
            make: captures; returns what launches the graph again, or None if nothing was captured.
            dropped: called when the graph is to go: the caller forgets what ``add`` returned.

        Returns:
            A function that launches the graph, and counts as its use. None if ``make`` returned
            None, or if the one graph takes more than the bound.
        """
        before = _bytes_outside_torch()
        launch = make()
        if launch is None:
            return None
        nbytes = _bytes_outside_torch() - before
        if not GRAPH_BYTES < nbytes < _NO_GRAPH:
            nbytes = GRAPH_BYTES
        if nbytes > self.most_bytes:
            return None
        kept, key = self._kept, object()
        while self.nbytes + nbytes > self.most_bytes:
            _, oldest = kept.popitem(last=False)
            self.nbytes -= oldest.nbytes
            oldest.dropped()
        kept[key] = _Kept(nbytes, dropped)
        self.nbytes += nbytes

        def replay() -> None:
            """Launch the graph; as long as it is kept, this counts as its last use."""
            if key in kept:
                kept.move_to_end(key)
            launch()

        return replay


def _bytes_outside_torch() -> int:
    """Return the bytes in use on the current device, less those that torch has reserved.

    0 before CUDA is initialised.
    """
    if not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """Return a device's one stream for captures, since the default stream cannot be captured."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, if it runs, during a ``with`` block.

    Freeing a dead graph or event would spoil a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
