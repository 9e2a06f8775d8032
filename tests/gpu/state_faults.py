"""Faults in the commits of recurrent states, which a watch plants on purpose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


class Faults:
    """A mixin of the watch of states: commits that fail, and commits of wrong counts."""

    model_runner: Any
    replayed: Any

    def fail_once(self) -> None:
        """Let a commit fail in every seventh step: a captured one, or else one layer's."""
        states: Any = self.model_runner.kvtxn_states
        self.repeated = Counter[str]()
        if not states._verified:
            return
        self.by_themselves()
        ways = ("commit_sampled", states._alone), ("run", states.graphs)
        found = [(name, each) for name, each in ways if each is not None]
        name, self.spoiled = next(iter(found), ("commit", states._verified[-1]))
        commit, calls = getattr(self.spoiled, name), [0]

        def failing(*args: Any) -> None:
            calls[0] += 1
            if calls[0] % 7 == 0:
                self.repeated["failed"] += 1
                raise RuntimeError("a fault that a test injects")
            commit(*args)

        setattr(self.spoiled, name, failing)

    def repair(self) -> dict[str, int]:
        """Everything works again; returns how often the commit failed."""
        for name in ("commit", "commit_sampled", "run"):
            vars(getattr(self, "spoiled", self)).pop(name, None)
        self.together()
        return dict(self.repeated)

    def by_themselves(self) -> None:
        """Let states be committed before rows, so that a test can put itself between."""
        states: Any = self.model_runner.kvtxn_states
        begin = states.begin

        def beginning(*args: Any, **named: Any) -> None:
            begin(*args, **named)
            states.replays = 0

        states.begin = beginning

    def together(self) -> None:
        """Commit states and rows by one launch again, where they were before."""
        vars(self.model_runner.kvtxn_states).pop("begin", None)

    def miscount(self) -> None:
        """Let the commit of every fifth step take in one row less or more than is kept."""
        states: Any = self.model_runner.kvtxn_states
        self.by_themselves()
        commit, calls, self.miscounted = states.commit, [0], 0

        def miscounting(sampled: torch.Tensor) -> None:
            calls[0] += 1
            step = states._step
            if calls[0] % 5 == 0 and step is not None and step.requests:
                wrong = torch.where(sampled > 1, sampled - 1, sampled + 1)
                places = slice(step.requests) if step.places is None else step.places
                lengths = step.starts.diff()[: sampled[places].shape[0]]
                right, other = (
                    each[places].clamp(min=1).minimum(lengths) for each in (sampled, wrong)
                )
                self.miscounted += int((right != other).sum()) * len(self.replayed)
                sampled = wrong
            commit(sampled)

        states.commit = miscounting

    def count_again(self) -> int:
        """Commit what is kept again; returns how many states were given a wrong count."""
        del self.model_runner.kvtxn_states.commit
        self.together()
        return self.miscounted
