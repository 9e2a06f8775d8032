"""The CUDA-graph executor: the kit on a GPU; buckets and refusals anywhere."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import KernelConformance
from kvtxn.backends.torch_executor import TorchExecutor

from kvtxn.testing import Rig, registered

cudagraph = pytest.importorskip("kvtxn.backends.cudagraph_executor")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


if torch.cuda.is_available():

    class TestCudaGraph(KernelConformance):
        @pytest.fixture
        def backend(self):
            return cudagraph.CudaGraphExecutor

    class TestReplayingTorch(KernelConformance):
        """Any capturable executor, over copies of a window's rows."""

        @pytest.fixture
        def backend(self):
            return cudagraph.replaying(TorchExecutor)


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 8), (8, 8), (9, 16), (80, 128), (300, 320), (320, 320)]
)
def test_buckets_are_powers_of_two_up_to_max_rows(rows, bucket):
    assert cudagraph.bucket_of(rows, 320) == bucket


def test_it_says_why_it_cannot_run_on_a_cpu():
    assert "CUDA" in cudagraph.CudaGraphExecutor.unavailable(torch.device("cpu"))


@needs_gpu
def test_a_bucket_is_captured_once_and_replayed():
    """Other rows, slots, payload and counts of the same bucket need no other graph."""
    with registered(cudagraph.CudaGraphExecutor) as name:
        rig = Rig(name, "deferred", torch.device("cuda"))
        for shape, counts in (
            (((1, 1), (3, 2)), [3, 1]),
            (((1, 1), (2, 4)), [0, 4]),
            (((1,), (5,)), [2]),
        ):
            batch = rig.batch(shape)
            rig.run(batch, counts)
            rig.expect_committed(batch, batch.kept(counts))
            rig.check("after a replay")
        executor = rig.manager.executor
        assert executor.replays == 3
        assert executor.captures <= 3


@needs_gpu
def test_many_places_of_the_counts_do_not_make_many_graphs():
    """The counts are read in place a few times, then copied."""
    with registered(cudagraph.CudaGraphExecutor) as name:
        rig = Rig(name, "deferred", torch.device("cuda"))
        kept_alive = []
        for _ in range(9):
            batch = rig.batch(((1, 1), (3, 2)))
            counts = rig.accepted([2, 1])
            kept_alive.append(counts)
            with rig.open(batch) as window:
                rig.stage(window, batch)
                window.commit(counts)
            rig.expect_committed(batch, batch.kept([2, 1]))
            rig.check("after a replay")
        assert rig.manager.executor.captures == 5


class ReplayingAnywhere(cudagraph.replaying(TorchExecutor)):
    """What comes before a graph is captured needs no GPU; for tests only."""

    @classmethod
    def unavailable(cls, device):
        return None


@pytest.mark.parametrize("plane", [0, -1])
def test_a_cache_that_moved_is_an_error(kernel_device, plane):
    """A replay writes to addresses; the executor compares them every time."""
    with registered(ReplayingAnywhere) as name:
        rig = Rig(name, "deferred", torch.device(kernel_device), on_error="raise")
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
