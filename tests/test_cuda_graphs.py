"""Captured graphs are kept up to a bound in bytes."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvtxn import cuda_graphs
from kvtxn.cuda_graphs import GRAPH_BYTES, GraphCache


class Graph:
    """Stands for a captured graph."""

    def replay(self):
        """Launch nothing."""


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


@pytest.mark.parametrize("nbytes", [8 << 20, 1 << 30, -(1 << 30)])
def test_memory_of_others_counts_for_no_graph(monkeypatch, nbytes):
    """Another process allocates or frees meanwhile, or the driver does, at the first capture."""
    graphs, taken = GraphCache(), [1 << 31]
    monkeypatch.setattr(cuda_graphs, "_bytes_outside_torch", lambda: taken[0])

    def make():
        taken[0] += nbytes
        return print

    for number in range(3):
        assert graphs.add(make, pytest.fail) is not None
        assert graphs.nbytes == (number + 1) * GRAPH_BYTES


def test_nothing_is_kept_of_a_capture_that_fails():
    graphs = GraphCache()
    assert graphs.add(lambda: None, print) is None
    with pytest.raises(RuntimeError, match="no capture"):
        graphs.add(lambda: (_ for _ in ()).throw(RuntimeError("no capture")), print)
    assert (len(graphs), graphs.nbytes) == (0, 0)


def test_a_graph_is_let_go_with_its_last_use():
    """What was captured is not kept alive by the cache; a step that holds it may still replay."""
    graphs, owner = GraphCache(GRAPH_BYTES), {}
    graph = Graph()
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
