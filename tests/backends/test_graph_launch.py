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
from kvtxn.backends.launching.graph_launch import replay_of


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
    limit = (ctypes.c_long * 2)(int(time.time()) + 60, 0)
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
