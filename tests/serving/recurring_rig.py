"""A runner's side of steps that recur: states beside its rows, and one launch for both."""

from __future__ import annotations

import numpy
import torch
from kernels_here import importing_kernels
from kvtxn.integrations.serving.graph_steps import GraphSteps
from step_rig import DEVICE, Rig, anywhere

from kvtxn.testing.supplied_states import ToyStates

with importing_kernels():
    from kvtxn.backends.graphs import static_window

__all__ = [
    "COUNTS",
    "DEVICE",
    "DRAFTS",
    "LENGTHS",
    "Recurring",
    "after_a_step",
    "anywhere",
    "static_window",
]

DRAFTS, LENGTHS = [3, 3], [4, 4]
COUNTS = ([2, 4], [1, 3], [4, 2], [1, 1], [4, 4])


class Recurring(Rig):
    """A runner whose counts lie at one address, with states of two requests.

    The first commit at an address captures the launch of both; see ``after_a_step``.
    """

    def __init__(self, policy="deferred", **settings) -> None:
        self.states = ToyStates(2, DEVICE)
        super().__init__(policy, **settings)
        self.steps.warm_up()
        self.counts = torch.ones(2, dtype=torch.int32, device=DEVICE)

    def make(self, rows):
        return GraphSteps(self.manager, self.slots, 4, rows, states=self.states)

    def opens(self) -> int:
        """Count the windows that were opened."""
        return len(self.opened)

    def begins(self, replays: int = 2) -> None:
        """Begin a step of the usual batch, whose forward is a replayed graph."""
        drafts = numpy.array(DRAFTS, dtype=numpy.int32)
        self.begin(DRAFTS, LENGTHS, None, False, len(drafts))
        self.states.begin([5, 2], LENGTHS, replayed=replays == 2)

    def step(self, sampled, replays: int = 2) -> None:
        """Take a step; every byte of rows and states is looked at."""
        before = [cache.clone() for cache in self.caches]
        self.begins(replays)
        states = self.states.expected(sampled)
        made = self.forward()
        self.ends(sampled)
        self.expect(before, made, DRAFTS, LENGTHS, sampled)
        assert all(map(torch.equal, self.states.memory, states))

    def ends(self, sampled) -> None:
        self.counts.copy_(torch.tensor(sampled))
        self.steps.commit(self.counts)
        assert not self.states.waits


def after_a_step(monkeypatch) -> Recurring:
    """Return a runner after a first step, which opened a window; ``opened`` has them."""
    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 1)
    made = Recurring()
    made.opened, own = [], made.steps.windows.begin

    def begin(*args):
        made.opened.append(args)
        return own(*args)

    monkeypatch.setattr(made.steps.windows, "begin", begin)
    made.step(COUNTS[0])
    assert (made.opens(), made.states.captured, made.states.replayed) == (1, 1, 0)
    made.states.calls.clear()
    return made
