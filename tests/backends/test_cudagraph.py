"""The CUDA-graph executor: the kit with graphs on a GPU, and with stand-ins for them elsewhere."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import KernelConformance, KernelKit
from kernels_here import ON_GPU

from kvtxn import SampledIds
from kvtxn.cuda_graphs import GRAPH_BYTES
from kvtxn.testing import Rig, registered
from kvtxn.testing.program import RandomProgram
from kvtxn.testing.promise_all_or_nothing import AllOrNothing, Isolation
from kvtxn.testing.promise_captured import CapturedWindows
from kvtxn.testing.promise_claims import Claims
from kvtxn.testing.promise_counts import Counts
from kvtxn.testing.promise_device import Device
from kvtxn.testing.promise_discipline import Discipline
from kvtxn.testing.promise_exactness import Exactness, Sizes
from kvtxn.testing.promise_fallback import Fallback
from kvtxn.testing.promise_histories import LongRuns
from kvtxn.testing.promise_hooks import Hooks
from kvtxn.testing.promise_overwriting import Overwriting
from kvtxn.testing.promise_trees import Trees

cudagraph = pytest.importorskip("kvtxn.backends.cudagraph_executor")


class Again:
    """Stands for a graph: runs again what was captured, over the same buffers."""

    def __init__(self, run) -> None:
        self.run = run

    def replay(self) -> None:
        self.run(False)


def pretending(triton_executor):
    """All of the executor but CUDA's own graphs, so that it runs anywhere; for tests only."""

    class Pretending(cudagraph.CudaGraphExecutor):
        inner = triton_executor

        @classmethod
        def unavailable(cls, device):
            return None

        def capture(self, run):
            run(True)
            self.captures += 1
            return Again(run)

    return Pretending


@pytest.fixture
def anywhere(monkeypatch):
    """Nothing is being captured, where torch has no CUDA to ask."""
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


@pytest.fixture
def rig_of(anywhere, triton_executor, kernel_device):
    """Makes a rig of the executor that runs here."""
    executor = cudagraph.CudaGraphExecutor if ON_GPU else pretending(triton_executor)
    with registered(executor) as name:
        yield lambda **config: Rig(name, "deferred", torch.device(kernel_device), **config)


if ON_GPU:

    class TestCudaGraph(KernelConformance):
        @pytest.fixture
        def backend(self):
            return cudagraph.CudaGraphExecutor

else:

    class TestPretendedGraphs(
        KernelKit, RandomProgram, LongRuns, Overwriting, Trees, CapturedWindows, Hooks, Fallback,
        Device, Discipline, Isolation, AllOrNothing, Sizes, Exactness, Counts, Claims,
    ):  # fmt: skip
        """Buckets, buffers and keys are the executor's own; only the graphs are not.

        Without the promises that the Triton executor keeps for it, and without any commit of its
        own: of attention alone, and of steps over captured forwards.
        """

        @pytest.fixture
        def backend(self, anywhere, triton_executor):
            return pretending(triton_executor)


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 8), (8, 8), (9, 16), (80, 128), (300, 320), (320, 320)]
)
def test_buckets_are_powers_of_two_up_to_max_rows(rows, bucket):
    assert cudagraph.bucket_of(rows, 320) == bucket


def test_it_says_why_it_cannot_run_on_a_cpu():
    assert "CUDA" in cudagraph.CudaGraphExecutor.unavailable(torch.device("cpu"))


def commit(rig, shape, accepted, kept):
    """A whole window, compared."""
    batch = rig.batch(shape)
    with rig.open(batch) as window:
        rig.stage(window, batch)
        window.commit(accepted)
    rig.expect_committed(batch, batch.kept(kept))
    rig.check("after a replay")


def test_a_bucket_is_captured_once_and_replayed(rig_of):
    """Other rows, slots, payload and counts of the same bucket need no other graph."""
    rig = rig_of()
    for shape, counts in (
        (((1, 1), (3, 2)), [3, 1]),
        (((1, 1), (2, 4)), [0, 4]),
        (((1,), (5,)), [2]),
    ):
        commit(rig, shape, rig.accepted(counts), counts)
    assert rig.manager.executor.replays == 3
    assert rig.manager.executor.captures <= 3


def test_many_places_of_the_counts_do_not_make_many_graphs(rig_of):
    """The counts are read in place a few times, then copied."""
    rig = rig_of()
    kept_alive = []
    for _ in range(9):
        kept_alive.append(SampledIds(torch.tensor([[7, 7, 7], [7, 7, -1]]).to(rig.device)))
        commit(rig, ((1, 1), (3, 2)), kept_alive[-1], [2, 1])
    assert rig.manager.executor.captures == 5


def test_one_place_may_hold_more_or_fewer_requests(rig_of):
    """A slice of an engine's buffer: the graph of a small batch must not serve a larger one."""
    rig = rig_of()
    ids = torch.tensor([[7, 7, -1]] * 3).to(rig.device)
    for _ in range(2):
        commit(rig, ((1, 1), (2, 1)), SampledIds(ids[:2]), [1, 1])
        commit(rig, ((1, 1, 1), (1, 1, 1)), SampledIds(ids), [1, 1, 1])
    executor = rig.manager.executor
    assert executor.captures == 1  # the counts are read by address alone
    assert executor.replays == 4


@pytest.mark.parametrize("form", ["places", "not contiguous", "ids", "mask"])
def test_a_batch_may_have_more_requests_than_rows(rig_of, form):
    """Most of them have no row; a smaller batch of as many rows comes in between."""
    rig = rig_of(on_error="raise")
    many = ((1,) + (0,) * 39, (0,) * 38 + (2, 0))
    few = ((1,), (2,))
    kept_alive = []

    def given(shape, counts):
        wide = torch.tensor([[n, 9] for n in counts], dtype=torch.int64, device=rig.device)
        forms = {
            "places": wide[:, 0].contiguous(),
            "not contiguous": wide[:, 0],
            "ids": SampledIds(torch.tensor([[7] * (n + 1) + [-1] * (2 - n) for n in counts])),
            "mask": torch.tensor(
                [number < count for settled, drafts, count in zip(*shape, counts, strict=True)
                 for number in [9] * settled + list(range(drafts))]
            ),
        }  # fmt: skip
        kept_alive.append(forms[form])
        return forms[form]

    for _ in range(6):  # in place at first, then copied
        commit(rig, many, given(many, [0] * 38 + [1, 0]), [0] * 38 + [1, 0])
        commit(rig, few, given(few, [2]), [2])
    executor = rig.manager.executor
    assert executor.replays == 12
    assert rig.manager.snapshot()["kvtxn_fallbacks_total"] == 0


def test_the_graph_not_used_for_longest_is_dropped(rig_of):
    """And one that is used again and again stays."""
    rig = rig_of(max_rows=64)
    rig.manager.executor.graphs.most_bytes = 2 * GRAPH_BYTES
    buckets = {drafts: torch.tensor([[7] * drafts]).to(rig.device) for drafts in (4, 12, 20)}
    for drafts in (4, 12, 4, 20, 4):
        commit(rig, ((1,), (drafts,)), SampledIds(buckets[drafts]), [drafts - 1])
    executor = rig.manager.executor
    assert executor.captures == 3
    commit(rig, ((1,), (12,)), SampledIds(buckets[12]), [11])
    assert executor.captures == 4


@pytest.mark.parametrize("plane", [0, -1])
def test_a_cache_that_moved_is_an_error(rig_of, plane):
    """A replay writes to addresses; the executor compares them every time."""
    rig = rig_of()
    batch = rig.batch(((1,), (2,)))
    window = rig.open(batch)
    rig.stage(window, batch)
    cells = list(rig.manager.layers.values())[plane].planes[plane].cells
    storage, before = cells.untyped_storage(), cells.data_ptr()
    storage.resize_(2 * storage.nbytes())  # memory elsewhere, with the same rows in it
    assert cells.data_ptr() != before
    with pytest.raises(RuntimeError, match=r"moved.*make a new manager"):
        window.commit(rig.accepted([1]))
    rig.expect_settled(batch)
    rig.check("nothing was written")
