"""A usual step with recurrent states asks torch for nothing, and makes one launch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import pytest
import torch
from engine_jobs import missing
from held_layers import DRAFTS, REQUESTS
from kernels_here import importing_kernels

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    import held_rig as held
    from kvtxn.integrations.serving.graph_steps import GraphSteps
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA
    from step_rig import Calls

    from kvtxn import LayerRef, TransactionManager, TxnConfig
    from kvtxn.captured_launches import LayoutLaunches


class Recorder(LayoutLaunches):
    """Stands for all launches of a layout."""

    def __init__(self, often: int | None) -> None:
        self.made: list[str] = []
        self.with_states, self.seen, self.often = {}, 0, often

    def save(self) -> None:
        self.made.append("save")

    def commit(self, sampled) -> None:
        self.made.append("rows")

    def recurs_with_states(self, sampled) -> bool:
        self.seen += 1
        return self.seen == self.often

    def capture_with(self, sampled, states, capture) -> None:
        self.with_states[sampled.data_ptr()] = lambda: self.made.append("both")


class StateSteps:
    """Steps of one kind of batch, whose forwards are replayed graphs; every launch is recorded.

    Args:
        monkeypatch: pytest's.
        joined: rows and states have one launch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, joined: bool) -> None:
        monkeypatch.setattr(held.Rig, "fast", True)
        self.states = held.Rig(GATED_DELTA, torch.float32, monkeypatch).states
        self.launches = Recorder(8 if joined else None)
        self.states._alone.commit_sampled = lambda *_: self.launches.made.append("states")
        shape = 8, 4, 2, 8
        layers = [
            LayerRef(f"layer.{number}", torch.zeros(shape), torch.zeros(shape))
            for number in range(4)
        ]
        rows = REQUESTS * (DRAFTS + 1)
        settings = TxnConfig(policy="deferred", max_rows=rows)
        self.steps = GraphSteps(
            TransactionManager(layers, settings),
            torch.arange(rows).view(1, -1),
            DRAFTS + 1,
            states=self.states,
        )
        self.steps.windows._launches = SimpleNamespace(prepare=lambda _: self.launches)
        table = torch.ones(REQUESTS, 1, dtype=torch.int32)
        self.sampled = torch.ones(REQUESTS, dtype=torch.int32)
        given = held.metadata(GATED_DELTA, table, [DRAFTS + 1] * REQUESTS, self.sampled)
        given.spec_query_start_loc = torch.arange(REQUESTS + 1, dtype=torch.int32) * (DRAFTS + 1)
        self.metadata, self.batch = {"it": given}, SimpleNamespace(num_reqs=REQUESTS)
        count = numpy.full(REQUESTS, 1, dtype=numpy.int32)
        self.rows = DRAFTS * count, (DRAFTS + 1) * count, count < 0

    def step(self) -> None:
        """Do all that comes before a forward, and after the sampler."""
        self.steps.begin(*self.rows, True, REQUESTS)
        self.states.begin(self.metadata, self.batch, replayed=True)
        self.steps.before_replay(saves=True)
        self.steps.commit(self.sampled)


@pytest.mark.parametrize("joined", [True, False])
def test_what_a_usual_step_asks_for(joined, monkeypatch):
    """Joined, no operator of torch; each costs the host more than all else of a commit."""
    steps = StateSteps(monkeypatch, joined=joined)
    with torch.inference_mode():
        for _ in range(9):
            steps.step()
        steps.launches.made.clear()
        with Calls() as calls:
            steps.step()
    assert steps.launches.made == (["both"] if joined else ["states", "rows"])
    assert (calls.names == []) == joined
