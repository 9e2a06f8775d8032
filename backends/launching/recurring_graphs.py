"""Capturing launches that recur, in the middle of serving."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from ...cuda_graphs import GraphCache, Replay

Place = TypeVar("Place", bound=Hashable)


class RecurringGraphs:
    """Counts launches, and captures a launch that recurs as a graph.

    A capture costs a step many launches' time, so it is worth it only for what comes often. A graph
    that the cache drops is forgotten, and captured again once its launch came as often anew.

    Args:
        graphs: keeps what is captured.
        most_seen: launches that are counted; when there are more, all counts are forgotten.
    """

    def __init__(self, graphs: GraphCache, most_seen: int) -> None:
        self._graphs: Final = graphs
        self._most_seen: Final = most_seen
        self._seen: Counter[Hashable] = Counter()

    def recurs(self, key: Hashable, often: int) -> bool:
        """Count a launch; tell whether it came so often now that it is to be captured."""
        if len(self._seen) > self._most_seen:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] == often

    def capture(
        self,
        key: Hashable,
        make: Callable[[], Replay | None],
        replays: dict[Place, Replay],
        place: Place,
    ) -> None:
        """Capture a launch.

        Args:
            key: names the launch, as in ``recurs``.
            make: captures; as for ``GraphCache.add``.
            replays: gets what launches the graph, and loses it when the cache drops the graph.
            place: the launch's key in ``replays``.
        """

        def dropped() -> None:
            del replays[place]
            self._seen[key] = 0

        replay = self._graphs.add(make, dropped)
        if replay is not None:
            replays[place] = replay
