"""A runner's side of steps that recur: states beside its rows, and one launch for both."""

from __future__ import annotations

from types import SimpleNamespace

import numpy
import torch
from step_rig import DEVICE, Rig, anywhere

__all__ = [
    "COUNTS",
    "DEVICE",
    "DRAFTS",
    "LENGTHS",
    "Recurring",
    "States",
    "after_a_step",
    "anywhere",
]

DRAFTS, LENGTHS = [3, 3], [4, 4]
COUNTS = ([2, 4], [1, 3], [4, 2], [1, 1], [4, 4])


class States:
    """Stands for recurrent states, whose one launch commits the rows of a window as well.

    Attributes:
        noted: the step.
        launched: launches of both.
        calls: what was asked for by itself.
        error: what the next launch raises, having written nothing.
    """

    def __init__(self) -> None:
        self.noted = SimpleNamespace(metadata=None, batch=None, replays=0)
        self.launched, self.calls, self.error = 0, [], None

    def begin(self, replays: int) -> None:
        self.noted.metadata = self.noted.batch = "a step's"
        self.noted.replays = replays

    def commit(self, window, sampled):
        if window is None or self.noted.replays != window.plan.num_requests:
            self.calls.append("commit" if self.noted.metadata else "nothing")
            self.noted.metadata = None
            return None
        launches = window.plan.launches

        def launch():
            error, self.error = self.error, None
            if error is not None:
                raise error
            launches.commit(sampled)
            self.launched += 1

        return window.plan.together.setdefault(sampled.data_ptr(), launch)

    def repeat(self, sampled):
        assert self.noted.metadata
        self.calls.append("repeat")
        self.noted.metadata = None


class Recurring(Rig):
    """A runner whose counts lie at one address."""

    def __init__(self, policy="deferred", **settings) -> None:
        super().__init__(policy, **settings)
        self.steps.beside = self.states = States()
        self.counts = torch.ones(2, dtype=torch.int32, device=DEVICE)

    def opens(self) -> int:
        """Count the windows that were opened."""
        return len(self.opened)

    def begins(self, replays: int = 2) -> None:
        """Begin a step of the usual batch, whose forward is a replayed graph."""
        drafts = numpy.array(DRAFTS, dtype=numpy.int32)
        self.begin(DRAFTS, LENGTHS, None, False, len(drafts))
        self.states.begin(replays)

    def step(self, sampled, replays: int = 2) -> None:
        """Take a step; every byte is looked at."""
        before = [cache.clone() for cache in self.caches]
        self.begins(replays)
        made = self.forward()
        self.ends(sampled)
        self.expect(before, made, DRAFTS, LENGTHS, sampled)

    def ends(self, sampled) -> None:
        self.counts.copy_(torch.tensor(sampled))
        self.steps.commit(self.counts)
        assert self.states.noted.metadata is None
        assert self.states.calls or self.states.noted.batch is None


def after_a_step(monkeypatch) -> Recurring:
    """Return a runner after a first step, which opened a window; ``opened`` has them."""
    made = Recurring()
    made.opened, own = [], made.steps.windows.begin

    def begin(*args):
        made.opened.append(args)
        return own(*args)

    monkeypatch.setattr(made.steps.windows, "begin", begin)
    made.step(COUNTS[0])
    assert (made.opens(), made.states.launched) == (1, 1)
    return made
