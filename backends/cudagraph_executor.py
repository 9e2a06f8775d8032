"""The CUDA-graph executor: a commit is one graph launch, over fixed buffers.

It wraps the Triton executor and captures its commit once per *bucket* of rows; if the acceptance is
copied, it also captures once per bucket of the acceptance's length, since a request may have no
row. A replay reads slots (padded with -1), layout and acceptance from fixed buffers and the staged
rows through a table of addresses; it writes the caches. Before each replay every address that a
graph holds is compared,
always: a cache that moved is an error, never a wild write. The graphs are in the executor's
``GraphCache``.

Not replayed, but launched as they are: commits of windows with a draft tree or without rows, and
every commit while the caller captures a graph itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import ClassVar, Final, Protocol

import attrs
import torch
from torch import Tensor

from ..captured_launches import CapturedLaunches, CapturedPlaces
from ..config import TxnConfig
from ..cuda_graphs import Replay, capture
from ..executor import AttentionArgs, Capabilities, Executor, SampledIds, StagedLayer, Txn
from ..layers import LayerRef
from ..layout import RowLayout
from ..row_io import LayerRows
from .move_rows.acceptance import acceptance_arg
from .move_rows.launch import MovePlan
from .triton_executor import TritonExecutor

#: Graphs of one shape that read the acceptance in place; for further places it is copied.
_MAX_IN_PLACE: Final = 4

#: Rows of the smallest bucket, and entries of the smallest one of acceptances.
_MIN_BUCKET: Final = 8


class Graph(Protocol):
    """A captured launch: a ``torch.cuda.CUDAGraph``, or a stand-in of one without a GPU."""

    def replay(self) -> None:
        """Launch the captured graph; its kernels read and write the buffers of the capture."""


@attrs.define(eq=False)
class _Captured:
    """A captured graph and the buffers that the graph reads.

    Attributes:
        replay: launches the captured commit.
        layout: over buffers of a bucket's rows; position is -1 for rows that the window lacks.
        accepted: the acceptance that the graph reads: the caller's, or a buffer for copies.
        held: keeps everything else alive that the graph reads.
        filled: the layout that the buffers hold now.
    """

    replay: Replay
    layout: RowLayout
    accepted: Tensor
    held: object
    filled: RowLayout | None = None


class CudaGraphExecutor(Executor):
    """Replays the commit of the Triton executor.

    Attributes:
        captures: graphs captured so far.
        replays: commits replayed so far.
    """

    name: ClassVar[str] = "cudagraph"
    inner: ClassVar[type[TritonExecutor]] = TritonExecutor
    capabilities: ClassVar[Capabilities] = TritonExecutor.capabilities

    def __init__(self, layers: Sequence[LayerRef], config: TxnConfig) -> None:
        super().__init__(layers, config)
        self._inner = self.inner(layers, config)
        self._device = self.layers[0].device
        cells = (plane.cells for ref in self.layers for plane in ref.planes)
        # Planes of one storage move together, so one of them is enough.
        self._caches = tuple({c.untyped_storage().data_ptr(): c for c in cells}.values())
        self._addresses = [cache.data_ptr() for cache in self._caches]
        self.graphs = self._inner.graphs
        self._captured: dict[tuple[Hashable, int], _Captured] = {}
        self._in_place: Counter[Hashable] = Counter()
        self.captures = self.replays = 0

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why this device has no CUDA graphs or no Triton; None if it has both."""
        if device.type != "cuda":
            return "CUDA graphs need a CUDA device"
        return cls.inner.unavailable(device)

    # -- passed on ------------------------------------------------------------------

    def own_slots(self, group: str, slots: Tensor) -> Tensor:
        """Copy a mapping into the Triton executor's fixed buffer, where replays find it."""
        return self._inner.own_slots(group, slots)

    def save(self, txn: Txn, group: str) -> LayerRows:
        """Copy the draft rows that the caches hold now into buffers, by the Triton executor."""
        return self._inner.save(txn, group)

    def stage(self, txn: Txn, layer: StagedLayer) -> None:
        """Write one layer's settled rows (``deferred``) or all rows (else), by Triton."""
        self._inner.stage(txn, layer)

    def advance(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Advance states by the Triton executor, whose launches a caller's graph may capture."""
        self._inner.advance(txn, accepted)

    def restore(self, txn: Txn) -> None:
        """Put back the saved bytes under every draft row, by the Triton executor."""
        self._inner.restore(txn)

    def attend(
        self, txn: Txn, layer: StagedLayer, query: Tensor, attention: AttentionArgs
    ) -> Tensor:
        """Attend to cached and staged rows by the Triton executor."""
        return self._inner.attend(txn, layer, query, attention)

    def captured_launches(self, places: CapturedPlaces) -> CapturedLaunches | None:
        """Return the Triton executor's launches, which capture themselves in graphs; or None."""
        return self._inner.captured_launches(places)

    # -- commit -------------------------------------------------------------------

    def commit(self, txn: Txn, accepted: Tensor | SampledIds) -> None:
        """Replay the graph of this window's bucket; capture it the first time.

        A window without rows or with a tree, one that is being captured itself, or one whose graph
        has no room in the ``GraphCache``, commits without a graph.

        Raises:
            RuntimeError: a cache is no longer where it was when the executor was made.
        """
        self._check_caches()
        source = accepted.ids if isinstance(accepted, SampledIds) else accepted
        # A bucket has no buffers for a tree's table and path, so its commit is launched directly.
        plain = txn.layout.num_rows > 0 and txn.layout.tree is None
        if not plain or torch.cuda.is_current_stream_capturing():
            self._inner.commit(txn, accepted)
        else:
            self._commit_bucket(txn, accepted, source)

    def _check_caches(self) -> None:
        """Raise a RuntimeError if a cache is not where it was when the executor was made."""
        if list(map(Tensor.data_ptr, self._caches)) != self._addresses:
            raise RuntimeError("a KV cache moved since this executor was made; make a new manager")

    def _commit_bucket(self, txn: Txn, accepted: Tensor | SampledIds, source: Tensor) -> None:
        """Load the window into its bucket's buffers, and replay the bucket's graph.

        A missing graph is captured first; if it cannot be kept, Triton launches. The graph reads
        the acceptance in place, except a mask, one that is not contiguous, and further places than
        ``_MAX_IN_PLACE``: these are copied.
        """
        bucket = bucket_of(txn.layout.num_rows, self.config.max_rows)
        plan = self._inner.plan_commit(txn)
        fixed = (plan.planes, plan.select, plan.known, plan.addresses.data_ptr())
        shared = (bucket, fixed, txn.counters.data_ptr(), _kind(accepted, source))
        # A mask ends with the window's rows, but the graph reads as many as the bucket has.
        in_place = source.is_contiguous() and source.dtype is not torch.bool
        entries = bucket if source.dtype is torch.bool else power_of_two(source.shape[0])
        copied = -entries  # the length of the buffer for copies, in the place of an address
        place = source.data_ptr() if in_place else copied
        captured = self._captured.get((shared, place))
        if captured is None and in_place and self._in_place[shared] >= _MAX_IN_PLACE:
            place, in_place = copied, False
            captured = self._captured.get((shared, place))
        if captured is None:
            own = source if in_place else source.new_zeros(entries, *source.shape[1:])
            given = _like(accepted, own)
            dropped = partial(self._drop, shared, place)
            captured = self._capture_bucket(plan, bucket, txn.counters, given, dropped)
            if captured is None:
                self._inner.commit(txn, accepted)
                return
            self._captured[shared, place] = captured
            self._in_place[shared] += place > 0
        self._fill(captured, txn.layout)
        if not in_place:
            captured.accepted[: source.shape[0]].copy_(source)
        captured.replay()
        self.replays += 1

    def _drop(self, shared: Hashable, place: int) -> None:
        """Forget a graph and its buffers, and free its place among graphs that read in place."""
        del self._captured[shared, place]
        self._in_place[shared] -= place > 0
        if not self._in_place[shared]:
            del self._in_place[shared]

    def _capture_bucket(
        self,
        plan: MovePlan,
        bucket: int,
        counters: Tensor,
        accepted: Tensor | SampledIds,
        dropped: Callable[[], None],
    ) -> _Captured | None:
        """Capture a commit over buffers of ``bucket`` rows; None if graphs have no room for it.

        Every position is -1, so nothing moves now; the launch that compiles counts in a spare
        tensor.
        """
        request = torch.zeros(bucket, dtype=torch.int64, device=self._device)
        position = torch.full_like(request, -1)
        none = (0,) * bucket
        layout = RowLayout(
            none, none, tuple(range(bucket + 1)), request, position, torch.zeros_like(request) > 0
        )
        given = acceptance_arg(accepted, layout)
        scratch = torch.zeros_like(counters)

        def run(dry_run: bool) -> None:
            """Launch the commit, which counts in a spare tensor if it is a ``dry_run``."""
            self._inner.kernel_call(plan, layout, scratch if dry_run else counters, given).run()

        source = accepted.ids if isinstance(accepted, SampledIds) else accepted
        replay = self.graphs.add(lambda: self.capture(run).replay, dropped)
        return None if replay is None else _Captured(replay, layout, source, plan)

    def capture(self, run: Callable[[bool], None]) -> Graph:
        """Call ``run(True)``, which compiles every kernel.

        Capture ``run(False)``, and count the capture. Where there are no CUDA graphs, a subclass
        may return something that runs it again.
        """
        run(True)
        self.captures += 1
        return capture(lambda: run(False))

    def _fill(self, captured: _Captured, layout: RowLayout) -> None:
        """Copy this window's layout into the buffers that the graph reads, unless it is there.

        The rows of the bucket beyond the window's become settled rows of request 0.
        """
        if captured.filled is layout:
            return
        rows, into = layout.num_rows, captured.layout
        into.position[rows:].fill_(-1)
        into.is_draft[rows:].fill_(False)
        into.request[rows:].fill_(0)  # the acceptance may have no entry of an earlier one
        into.position[:rows].copy_(layout.position)
        into.is_draft[:rows].copy_(layout.is_draft)
        into.request[:rows].copy_(layout.request)
        captured.filled = layout


def _like(accepted: Tensor | SampledIds, source: Tensor) -> Tensor | SampledIds:
    """Return an acceptance of the same form, with ``source`` as its tensor."""
    return attrs.evolve(accepted, ids=source) if isinstance(accepted, SampledIds) else source


def _kind(accepted: Tensor | SampledIds, source: Tensor) -> Hashable:
    """Return all facts of an acceptance that a graph holds, except its address."""
    if isinstance(accepted, SampledIds):
        return source.dtype, source.shape[1], accepted.placeholder, accepted.vocab_size
    return source.dtype


def bucket_of(rows: int, max_rows: int) -> int:
    """Return the size of the bucket for ``rows`` rows.

    As ``power_of_two``, but at most ``max_rows``.
    """
    return min(max_rows, power_of_two(rows))


def power_of_two(number: int) -> int:
    """Return the least power of two that is at least ``number`` and at least ``_MIN_BUCKET``."""
    return max(_MIN_BUCKET, 1 << (number - 1).bit_length())
