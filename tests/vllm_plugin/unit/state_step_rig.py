"""Host time of a step's two commits, without a GPU; run this file to see it.

The steps and the states are kvtxn's; every launch is a recorder's. In an engine all that a step
touches is out of the processor's caches by the next step, so what counts is the time *cold*: a lot
of other memory and code comes before each call. Times are microseconds, medians.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch

HERE = Path(__file__).resolve().parent
for folder in ("../..", "../../serving", "../grid", "../serve"):
    sys.path.insert(0, str(HERE / folder))

import held_rig as held  # noqa: E402
import pytest  # noqa: E402
from held_layers import DRAFTS, REQUESTS  # noqa: E402
from kernels_here import importing_kernels  # noqa: E402
from kvtxn.integrations.vllm_plugin.policy.engine import GATED_DELTA  # noqa: E402

from kvtxn import LayerRef, TransactionManager, TxnConfig  # noqa: E402
from kvtxn.captured_launches import LayoutLaunches  # noqa: E402

with importing_kernels():
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.vllm_plugin.gpu import states as gpu_states

#: Bytes that are written before a call whose time is wanted cold.
OTHERS = 48 << 20


class Recorder(LayoutLaunches):
    """Stands for all launches of a layout."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def save(self) -> None:
        self.made.append("save")

    def commit(self, sampled: torch.Tensor) -> None:
        self.made.append("rows")

    def capture_with(self, sampled: Any, beside: Any, make: Any = None) -> Callable[[], None]:
        return lambda: self.made.append("both")


class StateSteps:
    """Steps of one kind of batch, whose forwards are replayed graphs.

    Args:
        monkeypatch: pytest's.
        joined: rows and states have one launch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, joined: bool) -> None:
        monkeypatch.setattr(held.Rig, "fast", True)
        self.states = held.Rig(GATED_DELTA, torch.float32, monkeypatch).states
        self.launches = Recorder()
        self.states._alone.commit_sampled = lambda *_: self.launches.made.append("states")
        shape = 8, 4, 2, 8
        layers = [
            LayerRef(f"layer.{number}", torch.zeros(shape), torch.zeros(shape))
            for number in range(4)
        ]
        rows = REQUESTS * (DRAFTS + 1)
        settings = TxnConfig(policy="deferred", max_rows=rows)
        self.steps = GraphSteps(
            TransactionManager(layers, settings), torch.arange(rows).view(1, -1), DRAFTS + 1
        )
        self.steps.windows._launches = SimpleNamespace(prepare=lambda _: self.launches)
        if joined:
            self.steps.beside = gpu_states.JointCommits(
                self.states, self.steps.manager.executor.graphs
            )
        starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * (DRAFTS + 1)
        table = torch.ones(REQUESTS, 1, dtype=torch.int32)
        self.sampled = torch.ones(REQUESTS, dtype=torch.int32)
        lengths = [DRAFTS + 1] * REQUESTS
        given = held.metadata(GATED_DELTA, table, lengths, self.sampled)
        given.spec_query_start_loc = starts
        self.metadata, self.batch = {"it": given}, SimpleNamespace(num_reqs=REQUESTS)
        count = numpy.full(REQUESTS, 1, dtype=numpy.int32)
        self.rows = DRAFTS * count, (DRAFTS + 1) * count, count < 0

    def begin(self) -> None:
        """Do all that comes before a forward."""
        self.steps.begin(*self.rows, True, REQUESTS)
        self.states.begin(self.metadata, self.batch, replayed=True)
        self.steps.before_replay(saves=True)

    def commit(self) -> None:
        """Do all that comes after the sampler."""
        if self.steps.beside is None:
            self.states.commit(self.sampled)
        self.steps.commit(self.sampled)

    def times(self, number: int, *, cold: bool) -> dict[str, float]:
        """Take so many steps; return the median times of their parts."""
        others, found = numpy.zeros(OTHERS, numpy.uint8), dict[str, list[float]]()
        for _ in range(number):
            for part in (self.begin, self.commit):
                if cold:
                    others += 1
                    sorted(map(str, range(3000)))
                start = time.perf_counter()
                part()
                found.setdefault(part.__name__, []).append(time.perf_counter() - start)
        return {name: 1e6 * statistics.median(each[20:]) for name, each in found.items()}


def main() -> None:
    """Print a line for each way to commit."""
    with pytest.MonkeyPatch.context() as monkeypatch, torch.inference_mode():
        for name, joined in (("two launches", False), ("one launch", True)) * 2:
            steps = StateSteps(monkeypatch, joined=joined)
            for cold in (False, True):
                found = steps.times(150 if cold else 600, cold=cold)
                parts = ", ".join(f"{part} {each:.1f}" for part, each in found.items())
                print(f"{name}, {'cold' if cold else 'warm'}: {parts}", set(steps.launches.made))


if __name__ == "__main__":
    main()
