"""What recurs is captured once; what the cache drops is captured again as late."""

from __future__ import annotations

from kvtxn.backends.graphs.static_window import RecurringGraphs

from kvtxn.cuda_graphs import GRAPH_BYTES, GraphCache


def nothing() -> None:
    """Stands for a graph's launch."""


def times_until_captured(graphs: RecurringGraphs, replays: dict, key: str) -> int:
    """How often a launch comes before it is captured."""
    for number in range(1, 100):
        if graphs.recurs(key, 3):
            graphs.capture(key, lambda: nothing, replays)
            return number
    return 0


def test_a_launch_is_captured_when_it_came_often_enough():
    graphs, replays = RecurringGraphs(GraphCache(), 10), {}
    assert times_until_captured(graphs, replays, "a") == 3
    assert [*replays] == ["a"]
    assert times_until_captured(graphs, replays, "a") == 0


def test_a_graph_that_had_to_go_is_captured_again():
    graphs, replays = RecurringGraphs(GraphCache(GRAPH_BYTES), 10), {}
    assert times_until_captured(graphs, replays, "a") == 3
    assert times_until_captured(graphs, replays, "b") == 3
    assert [*replays] == ["b"]
    assert times_until_captured(graphs, replays, "a") == 3
    assert [*replays] == ["a"]


def test_too_many_launches_are_forgotten():
    graphs = RecurringGraphs(GraphCache(), 2)
    assert not any(graphs.recurs(key, 2) for key in "abc")
    assert not graphs.recurs("a", 2)  # its first again
    assert graphs.recurs("a", 2)


def test_nothing_is_kept_of_a_capture_that_makes_nothing():
    graphs, replays = RecurringGraphs(GraphCache(), 2), {}
    graphs.capture("a", lambda: None, replays)
    assert not replays
