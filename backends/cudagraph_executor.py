"""The CUDA-graph executor: a commit is one graph launch, over fixed buffers.

It wraps any capture-safe executor and captures its commit once per *bucket* of rows. What a
replay reads lies in buffers of its own: slots (padded with -1), layout, acceptance; what it
writes are the caches. Every address that a graph has baked in is compared before each
replay, always: for staged rows that moved another graph is captured, and a cache that moved is
an error, never a wild write. Draft trees are not replayed: their commit is an ordinary launch.

Windows over captured rows need no buffers: everything but the acceptance is where it was, so
their graphs read it all in place.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, Protocol

import attrs
import torch
from torch import Tensor

from ..config import TxnConfig
from ..executor import (
    AttentionArgs,
    Capabilities,
    Executor,
    SampledIds,
    StagedLayer,
    Standing,
    Txn,
)
from ..layers import LayerRef
from ..layout import RowLayout
from ..rows import LayerRows
from .graph_recipes import commit_by, recipe_for
from .triton_executor import TritonExecutor

#: Graphs of buckets that are kept; beyond, the one not used for longest is dropped.
_MAX_GRAPHS: Final = 64

#: Graphs of one shape that read the acceptance where the caller has it; beyond, it is copied.
_MAX_IN_PLACE: Final = 4

#: In place of an acceptance's address and length: it is copied into a buffer of the graph's own.
_COPIED: Final = (0, 0)

#: Smallest bucket of rows.
_MIN_BUCKET: Final = 8


class Graph(Protocol):
    """What a capture gives: a ``torch.cuda.CUDAGraph``, or what stands in for one."""

    def replay(self) -> None:
        """Run what was captured, over the same buffers."""


@attrs.define(eq=False)
class _Captured:
    """One graph and the buffers that it reads.

    Attributes:
        graph: the captured commit.
        layout: over buffers of ``bucket`` rows, position -1 beyond the rows of the window.
        accepted: a buffer of its own, or what was committed at capture.
        held: keeps alive what else the graph reads.
        filled: the layout that the buffers hold now.
    """

    graph: Graph
    layout: RowLayout
    accepted: Tensor
    held: object
    filled: RowLayout | None = None


class CudaGraphExecutor(Executor):
    """Replays the commit of the Triton executor; ``replaying`` makes one of any other.

    Not replayed, but handed to the inner executor as they are: commits of windows with a draft
    tree or without rows, and every commit while the caller captures a graph itself.
    """

    name: ClassVar[str] = "cudagraph"
    inner: ClassVar[type[Executor]] = TritonExecutor
    capabilities: ClassVar[Capabilities] = TritonExecutor.capabilities

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        super().__init__(layers, config)
        self._inner = self.inner(layers, config)
        self._recipe = recipe_for(self._inner)
        self._device = self.layers[0].device
        cells = (plane.cells for ref in self.layers for plane in ref.planes)
        # Planes of one storage move together: one of them is enough.
        self._caches = tuple({c.untyped_storage().data_ptr(): c for c in cells}.values())
        self._addresses = [cache.data_ptr() for cache in self._caches]
        self._graphs: OrderedDict[tuple[Hashable, tuple[int, int]], _Captured] = OrderedDict()
        self._in_place: Counter[Hashable] = Counter()
        groups = {ref.group for ref in self.layers}
        self._reads_slots_in_place = len(groups) == 1 or not isinstance(self._inner, TritonExecutor)
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

    def stage_all(self, txn: Txn, layers: Sequence[StagedLayer]) -> None:
        """As the inner executor does."""
        self._inner.stage_all(txn, layers)

    def restore(self, txn: Txn) -> None:
        """As the inner executor does."""
        self._inner.restore(txn)

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """As the inner executor does."""
        return self._inner.attend(txn, layer, query, attention)

    # -- commit -------------------------------------------------------------------

    def commit(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Replay the graph of this window's bucket; capture it the first time.

        Raises:
            RuntimeError: a cache is no longer where it was when the executor was made.
        """
        self._check_caches()
        source = accepted.ids if isinstance(accepted, SampledIds) else accepted
        # A bucket has no buffers for a tree's table and path, so its commit is launched directly.
        plain = txn.layout.num_rows > 0 and txn.layout.tree is None
        if not plain or torch.cuda.is_current_stream_capturing():
            commit_by(self._inner, txn, accepted)
        elif txn.standing is not None and self._reads_slots_in_place and source.is_contiguous():
            self._commit_standing(txn.standing, txn, accepted, source)
        else:
            self._commit_bucket(txn, accepted, source)

    def _check_caches(self) -> None:
        """Always, not only when debugging: a replay writes to addresses, not to tensors."""
        if list(map(Tensor.data_ptr, self._caches)) != self._addresses:
            raise RuntimeError("a KV cache moved since this executor was made; make a new manager")

    def _commit_standing(
        self, standing: Standing, txn: Txn, accepted: Tensor | SampledIds, source: Tensor
    ) -> None:
        """Nothing moved since the last such window, unless the acceptance did."""
        graphs: dict[Hashable, _Captured] = standing.kept.setdefault((self, "graphs"), {})
        kind = _kind(accepted, source)
        key: Hashable = (source.data_ptr(), kind)
        captured = graphs.get(key)
        in_place = captured is not None or len(graphs) < _MAX_IN_PLACE
        if captured is None and not in_place:
            key = (0, kind)
            captured = graphs.get(key)
        if captured is None:
            fixed = source if in_place else torch.empty_like(source)
            nothing = _like(accepted, torch.full_like(source, _nothing(accepted)))
            dry = attrs.evolve(txn, counters=torch.zeros_like(txn.counters))

            def run(dry_run: bool) -> None:
                if dry_run:
                    commit_by(self._inner, dry, nothing)
                else:
                    commit_by(self._inner, txn, _like(accepted, fixed))

            captured = graphs[key] = _Captured(self.capture(run), txn.layout, fixed, txn)
        if not in_place:
            captured.accepted.copy_(source)
        captured.graph.replay()
        self.replays += 1

    def _commit_bucket(self, txn: Txn, accepted: Tensor | SampledIds, source: Tensor) -> None:
        """Load the window into its bucket's buffers, and replay the bucket's graph."""
        bucket = bucket_of(txn.layout.num_rows, self.config.max_rows)
        baked = self._recipe.key(txn, bucket)
        shared = (bucket, baked, txn.counters.data_ptr(), _kind(accepted, source))
        # A mask ends with the rows of the window, and the graph reads as many as the bucket has.
        in_place = source.is_contiguous() and source.dtype is not torch.bool
        length = 0 if self._recipe.reads_by_address else source.shape[0]
        place = (source.data_ptr(), length) if in_place else _COPIED
        captured = self._graphs.get((shared, place))
        if captured is None and in_place and self._in_place[shared] >= _MAX_IN_PLACE:
            place, in_place = _COPIED, False
            captured = self._graphs.get((shared, place))
        if captured is None:
            captured = self._capture_bucket(txn, bucket, accepted, source if in_place else None)
            self._keep(shared, place, captured)
        self._graphs.move_to_end((shared, place))
        self._recipe.load(txn)
        self._fill(captured, txn.layout)
        if not in_place:
            captured.accepted[: source.shape[0]].copy_(source)
        captured.graph.replay()
        self.replays += 1

    def _keep(self, shared: Hashable, place: tuple[int, int], captured: _Captured) -> None:
        """Remember a graph; where there are too many, forget the one not used for longest."""
        self._graphs[shared, place] = captured
        self._in_place[shared] += place != _COPIED
        if len(self._graphs) > _MAX_GRAPHS:
            (shared, place), _ = self._graphs.popitem(last=False)
            self._in_place[shared] -= place != _COPIED
            if not self._in_place[shared]:
                del self._in_place[shared]

    def _capture_bucket(
        self, txn: Txn, bucket: int, accepted: Tensor | SampledIds, source: Tensor | None
    ) -> _Captured:
        """Capture the commit over fixed buffers; every position is -1, so nothing moves now."""
        if source is None:
            like = as_tensor(accepted)
            source = torch.zeros(bucket, *like.shape[1:], dtype=like.dtype, device=self._device)
        request = torch.zeros(bucket, dtype=torch.int64, device=self._device)
        position = torch.full_like(request, -1)
        none = (0,) * bucket
        layout = RowLayout(
            none, none, tuple(range(bucket + 1)), request, position, torch.zeros_like(request) > 0
        )
        fixed, scratch = _like(accepted, source), torch.zeros_like(txn.counters)

        def run(dry_run: bool) -> None:
            self._recipe.run(layout, scratch if dry_run else txn.counters, fixed)

        return _Captured(self.capture(run), layout, source, self._recipe.held())

    def capture(self, run: Callable[[bool], None]) -> Graph:
        """The graph of ``run(False)``, after ``run(True)`` compiled what it needs.

        Where there are no CUDA graphs, a subclass may return something that runs it again.
        """
        run(True)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run(False)
        self.captures += 1
        return graph

    def _fill(self, captured: _Captured, layout: RowLayout) -> None:
        """Put this window's layout where the graph reads it, unless it is there."""
        if captured.filled is layout:
            return
        rows, into = layout.num_rows, captured.layout
        into.position[rows:].fill_(-1)
        into.is_draft[rows:].fill_(False)
        into.position[:rows].copy_(layout.position)
        into.is_draft[:rows].copy_(layout.is_draft)
        into.request[:rows].copy_(layout.request)
        captured.filled = layout


def replaying(executor: type[Executor]) -> type[CudaGraphExecutor]:
    """``CudaGraphExecutor`` over another capture-safe executor, ready to be registered.

    Args:
        executor: declares ``capturable``.

    Raises:
        ValueError: it does not.
    """
    if not executor.capabilities.capturable:
        raise ValueError(f"the {executor.name} executor does not declare that it is capturable")
    known = {"inner": executor, "capabilities": attrs.evolve(executor.capabilities, takes_ids=True)}
    return type(f"Replaying{executor.__name__}", (CudaGraphExecutor,), known)


def as_tensor(accepted: Tensor | SampledIds) -> Tensor:
    """Counts, mask or ids."""
    return accepted.ids if isinstance(accepted, SampledIds) else accepted


def _like(accepted: Tensor | SampledIds, source: Tensor) -> Tensor | SampledIds:
    """``source`` as what ``accepted`` is."""
    return attrs.evolve(accepted, ids=source) if isinstance(accepted, SampledIds) else source


def _nothing(accepted: Tensor | SampledIds) -> int:
    """A value that accepts nothing wherever it stands."""
    return accepted.placeholder if isinstance(accepted, SampledIds) else 0


def _kind(accepted: Tensor | SampledIds, source: Tensor) -> Hashable:
    """What a graph bakes in of the acceptance, its address aside."""
    if isinstance(accepted, SampledIds):
        return source.dtype, source.shape[1], accepted.placeholder, accepted.vocab_size
    return source.dtype


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
