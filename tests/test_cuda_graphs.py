"""A captured graph is launched by the driver, and by torch wherever that is not right."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from kvtxn import cuda_graphs
from kvtxn.cuda_graphs import GRAPH_BYTES, GraphCache, replay_of


class Base:
    """Stands for torch's own graph, below its Python class."""

    replayed = 0

    def replay(self):
        self.replayed += 1


class Graph(Base):
    """Stands for ``torch.cuda.CUDAGraph``."""

    def replay(self):
        raise AssertionError("tells random numbers apart, which takes long")

    def raw_cuda_graph_exec(self):
        return 1 << 40


@pytest.fixture
def driver(monkeypatch):
    """A driver and a thread, with what was launched."""
    made = SimpleNamespace(launched=[], error=0, device=1, stream=7)

    def launch(graph, stream):
        made.launched.append((graph.value, stream.value))
        return made.error

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: made.stream + device, raising=False
    )
    made.library = SimpleNamespace(cuGraphLaunch=launch)
    monkeypatch.setattr("ctypes.CDLL", lambda _: made.library)
    return made


def test_a_graph_is_launched_on_the_stream_of_the_moment(driver):
    graph = Graph()
    replay = replay_of(graph)
    replay()
    driver.stream = 20
    replay()
    replay()
    assert driver.launched == [(1 << 40, 8), (1 << 40, 21), (1 << 40, 21)]
    assert graph.replayed == 0


def test_in_a_thread_with_another_device_torch_launches(driver):
    graph = Graph()
    replay = replay_of(graph)
    driver.device = 0
    replay()
    assert (driver.launched, graph.replayed) == ([], 1)


def test_a_launch_that_the_driver_refuses_raises(driver):
    replay = replay_of(Graph())
    driver.error = 719
    with pytest.raises(RuntimeError, match="error 719"):
        replay()
    driver.error = 0
    replay()
    assert len(driver.launched) == 2


def test_the_launch_keeps_the_graph(driver):
    graph = Graph()
    replay, seen = replay_of(graph), weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is not None
    del replay
    gc.collect()
    assert seen() is None


def test_a_launch_that_waits_for_a_full_queue_lets_python_go_on(driver, monkeypatch):
    """The queue may wait for a host function in Python; here the launch waits for a thread."""
    queue = ctypes.create_string_buffer(64)  # longer than any sem_t
    limit = (ctypes.c_long * 2)(int(time.time()) + 3, 0)
    monkeypatch.undo()
    for loader in ("CDLL", "PyDLL"):
        libc = getattr(ctypes, loader)(None)
        made = SimpleNamespace(cuGraphLaunch=libc.sem_timedwait)
        monkeypatch.setattr(f"ctypes.{loader}", lambda _, made=made: made)
    assert libc.sem_init(queue, 0, 0) == 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, found in (("_cuda_getDevice", 0), ("_cuda_getCurrentRawStream", limit)):
        at = ctypes.addressof(found) if found else 0
        monkeypatch.setattr(torch._C, name, lambda *_, at=at: at, raising=False)
    monkeypatch.setattr(Graph, "raw_cuda_graph_exec", lambda _: ctypes.addressof(queue))
    replay = replay_of(Graph())
    host_function = threading.Timer(0.1, lambda: libc.sem_post(queue))
    host_function.start()
    replay()  # raises at the limit if the thread could not run
    host_function.join()


@pytest.mark.parametrize("lacks", ["call", "handle"])
def test_without_the_drivers_call_torch_launches(driver, monkeypatch, lacks):
    if lacks == "call":
        driver.library = SimpleNamespace()
    else:
        monkeypatch.delattr(Graph, "raw_cuda_graph_exec")
    graph = Graph()
    replay_of(graph)()
    assert (driver.launched, graph.replayed) == ([], 1)


def test_a_stand_in_is_replayed():
    made = SimpleNamespace(replay=lambda: "replayed")
    assert replay_of(made)() == "replayed"


class Owner:
    """Has graphs by name, and captures one that it has not."""

    def __init__(self, graphs: GraphCache) -> None:
        self.graphs, self.known, self.captured, self.seen = graphs, {}, [], []

    def run(self, name):
        if name not in self.known:
            self.captured.append(name)
            launch = self.graphs.add(
                lambda: lambda: self.seen.append(name), lambda: self.known.pop(name)
            )
            if launch is None:
                return
            self.known[name] = launch
        self.known[name]()


def test_the_graph_that_was_not_replayed_for_longest_goes_first():
    """Whoever owns it; it is captured again when it recurs."""
    graphs = GraphCache(3 * GRAPH_BYTES)
    one, other = Owner(graphs), Owner(graphs)
    for owner, name in ((one, "a"), (other, "b"), (one, "c"), (one, "a"), (other, "d")):
        owner.run(name)
    assert (sorted(one.known), sorted(other.known)) == (["a", "c"], ["d"])
    other.run("b")
    assert (sorted(one.known), sorted(other.known)) == (["a"], ["b", "d"])
    assert (one.captured, other.captured) == (["a", "c"], ["b", "d", "b"])
    assert (len(graphs), graphs.nbytes) == (3, 3 * GRAPH_BYTES)


def test_a_graph_counts_as_the_memory_that_it_took(monkeypatch):
    """Many graphs seem to take none, as the driver allocates for several at once."""
    graphs, taken = GraphCache(10 * GRAPH_BYTES), [0]
    monkeypatch.setattr(cuda_graphs, "_bytes_outside_torch", lambda: taken[0])

    def add(nbytes):
        def make():
            taken[0] += nbytes
            return print

        return graphs.add(make, lambda: gone.append(nbytes))

    gone = []
    assert add(0) is not None
    assert add(5 * GRAPH_BYTES) is not None
    assert graphs.nbytes == 6 * GRAPH_BYTES
    assert add(7 * GRAPH_BYTES) is not None
    assert (gone, graphs.nbytes) == ([0, 5 * GRAPH_BYTES], 7 * GRAPH_BYTES)
    assert add(11 * GRAPH_BYTES) is None  # more than all may take: the launches stay as they are
    assert (len(gone), len(graphs)) == (2, 1)


def test_nothing_is_kept_of_a_capture_that_fails():
    graphs = GraphCache()
    assert graphs.add(lambda: None, print) is None
    with pytest.raises(RuntimeError, match="no capture"):
        graphs.add(lambda: (_ for _ in ()).throw(RuntimeError("no capture")), print)
    assert (len(graphs), graphs.nbytes) == (0, 0)


def test_a_graph_is_let_go_with_its_last_use():
    """What was captured is not kept alive by the cache; a step that holds it may still replay."""
    graphs, owner = GraphCache(GRAPH_BYTES), {}
    graph = Base()
    seen = weakref.ref(graph)
    owner["it"] = graphs.add(lambda graph=graph: graph.replay, lambda: owner.pop("it"))
    held = owner["it"]
    del graph
    graphs.add(lambda: print, lambda: None)
    assert not owner
    held()
    assert len(graphs) == 1
    assert seen() is not None
    del held
    gc.collect()
    assert seen() is None
