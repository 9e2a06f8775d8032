"""The CUDA-graph executor: a commit is one graph launch, over fixed buffers.

It wraps a capture-safe executor and captures its commit once per *bucket* of rows. What a
replay reads lies in buffers of its own: slots (padded with -1), layout, acceptance; what it
writes are the caches. Every address that a graph has baked in is compared before each
replay, always: a cache or a staged row that moved means another graph, never a wild write.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

import attrs
import torch
from torch import Tensor

from ..config import TxnConfig
from ..executor import AttentionArgs, Capabilities, Executor, StagedLayer, Txn
from ..layers import LayerRef
from ..layout import RowLayout
from ..rows import LayerRows
from .jobs import Job
from .triton_executor import TritonExecutor

#: Graphs kept; the one not used for longest is dropped.
_MAX_GRAPHS: Final = 64

#: Graphs of one shape that read the acceptance where the caller has it; beyond, it is copied.
_MAX_IN_PLACE: Final = 4

#: Smallest bucket of rows.
_MIN_BUCKET: Final = 8


@attrs.define(eq=False)
class _Captured:
    """One graph and the buffers that it reads.

    Attributes:
        graph: the captured launch.
        request: int64 ``[bucket]``.
        position: int64 ``[bucket]``, -1 beyond the rows of the window.
        accepted: counts or mask: a buffer of its own, or what was committed at capture.
        job: holds the tables that the graph reads.
        filled: the layout that the buffers hold now.
    """

    graph: torch.cuda.CUDAGraph
    request: Tensor
    position: Tensor
    accepted: Tensor
    job: Job
    filled: RowLayout | None = None


class CudaGraphExecutor(Executor):
    """Replays the commit of ``TritonExecutor`` (or a subclass's ``inner``)."""

    name: ClassVar[str] = "cudagraph"
    inner: ClassVar[type[TritonExecutor]] = TritonExecutor
    capabilities: ClassVar[Capabilities] = TritonExecutor.capabilities

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        super().__init__(layers, config)
        self._inner = self.inner(layers, config)
        self._device = self.layers[0].device
        cells = (plane.cells for ref in self.layers for plane in ref.planes)
        # Planes of one storage move together: one of them is enough.
        self._caches = tuple({c.untyped_storage().data_ptr(): c for c in cells}.values())
        self._addresses = [cache.data_ptr() for cache in self._caches]
        self._graphs: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._in_place: dict[tuple[object, ...], int] = {}
        #: Graphs captured and replayed so far.
        self.captures = self.replays = 0

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """It needs CUDA graphs, and what its inner executor needs."""
        if device.type != "cuda":
            return "CUDA graphs need a CUDA device"
        return cls.inner.unavailable(device)

    # -- passed on ------------------------------------------------------------------

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """In the inner executor's fixed buffer, so that replays find them."""
        return self._inner.own_slots(group, slots)

    def save(self, txn: Txn, group: str) -> LayerRows:
        """As the inner executor does."""
        return self._inner.save(txn, group)

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """As the inner executor does."""
        self._inner.stage(txn, layer)

    def restore(self, txn: Txn) -> None:
        """As the inner executor does."""
        self._inner.restore(txn)

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """As the inner executor does."""
        return self._inner.attend(txn, layer, query, attention)

    # -- commit -------------------------------------------------------------------

    def commit(self, txn: Txn, accepted: Tensor) -> None:
        """Replay the graph of this window's bucket; capture it the first time.

        Raises:
            RuntimeError: a cache is no longer where it was when the executor was made.
        """
        self._check_caches()
        inner = self._inner
        if txn.layout.num_rows == 0 or torch.cuda.is_current_stream_capturing():
            inner.commit(txn, accepted)
            return
        bucket = bucket_of(txn.layout.num_rows, self.config.max_rows)
        known = inner.known_slots(txn)
        job = inner.prepare(txn)
        shared = (bucket, known, id(job.plan), job.select, txn.counters.data_ptr(), accepted.dtype)
        in_place = accepted.is_contiguous()
        key = (*shared, accepted.data_ptr() if in_place else 0)
        captured = self._graphs.get(key)
        if captured is None and in_place and self._in_place.get(shared, 0) >= _MAX_IN_PLACE:
            key, in_place = (*shared, 0), False
            captured = self._graphs.get(key)
        if captured is None:
            source = accepted if in_place else self._buffer(bucket, accepted.dtype)
            captured = self._capture(job, known, bucket, txn.counters, source)
            self._remember(key, shared, captured, in_place)
        self._fill(captured, txn.layout)
        if not in_place:
            captured.accepted[: accepted.shape[0]].copy_(accepted)
        captured.graph.replay()
        self.replays += 1

    def _check_caches(self) -> None:
        """Always, not only when debugging: a replay writes to addresses, not to tensors."""
        if [cache.data_ptr() for cache in self._caches] != self._addresses:
            raise RuntimeError("a KV cache moved since this executor was made; make a new manager")

    def _buffer(self, bucket: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(bucket, dtype=dtype, device=self._device)

    def _fill(self, captured: _Captured, layout: RowLayout) -> None:
        """Put this window's layout where the graph reads it, unless it is there."""
        if captured.filled is layout:
            return
        rows = layout.num_rows
        captured.position[rows:].fill_(-1)
        captured.position[:rows].copy_(layout.position)
        captured.request[:rows].copy_(layout.request)
        captured.filled = layout

    def _capture(
        self, job: Job, known: int, bucket: int, counters: Tensor, accepted: Tensor
    ) -> _Captured:
        """Capture the launch over fixed buffers; it moves and counts nothing now."""
        request = self._buffer(bucket, torch.int64)
        position = torch.full_like(request, -1)
        nothing = (0,) * bucket
        layout = RowLayout(
            nothing, nothing, tuple(range(bucket + 1)), request, position, position >= 0
        )
        # Compiles what is not compiled: every position is -1, so that no row is a draft.
        self._inner.launch(job, known, layout, counters, accepted)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._inner.launch(job, known, layout, counters, accepted)
        self.captures += 1
        return _Captured(graph, request, position, accepted, job)

    def _remember(
        self,
        key: tuple[object, ...],
        shared: tuple[object, ...],
        captured: _Captured,
        in_place: bool,
    ) -> None:
        self._graphs[key] = captured
        self._in_place[shared] = self._in_place.get(shared, 0) + in_place
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing somebody's dead graph or event in the middle would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bucket_of(rows: int, max_rows: int) -> int:
    """Rows that a graph for ``rows`` has room for: a power of two, at most ``max_rows``."""
    return min(max_rows, max(_MIN_BUCKET, 1 << (rows - 1).bit_length()))
