"""A watch follows windows over rows and states; the engine says which states it writes itself."""

from __future__ import annotations

import pytest
import torch
from kvtxn.integrations.serving.ledger.watch import Watch
from kvtxn.integrations.serving.step import NO_CHANGES, Arrival, Changes, Room, Rows, States

from kvtxn import LayerRef, TransactionManager
from kvtxn.audit import RowGroup, StateGroup
from kvtxn.recurrent import ShortConv

NAMES = ["with drafts", "without"]
DIM, WIDTH, SLOTS = 4, 3, 4


class Engine:
    """Two requests in blocks of 8 rows; the first verifies two drafts in its second step.

    A step with drafts has a window of the first request alone; the engine writes all other states.

    Args:
        commits: the slot of the first request's state in the window.
    """

    def __init__(self, commits: int = 0) -> None:
        rows = LayerRef("rows", *torch.zeros(2, 2, 8, 1, DIM), group="group.0")
        state = torch.zeros(SLOTS, WIDTH - 1, DIM)
        states = LayerRef.recurrent("state", state, replay=ShortConv(WIDTH), group="group.1")
        self.manager = TransactionManager([rows, states])
        self.watch = Watch(
            {"group.0": RowGroup("group.0", 8, 2)}, Room(2, 16, False), 0, "log",
            states={"group.1": StateGroup("group.1", SLOTS)},
        )  # fmt: skip
        self.watch.windows.find = lambda: self.manager
        self.commits = commits

    def step(self, first, tokens, drafts, ids, changes=NO_CHANGES, kept=None, slots=None):
        """Run a step, whose window keeps ``kept`` drafts; None: as many as ``ids`` say."""
        starts = torch.tensor([0, len(tokens[0]), len(tokens[0]) + len(tokens[1])])
        begin = torch.tensor(first)
        positions = [torch.arange(f, f + len(t)) for f, t in zip(first, tokens, strict=True)]
        rows = torch.cat([8 * i + each for i, each in enumerate(positions)])
        own = torch.tensor([0, 1])
        read = Rows(
            NAMES, starts, begin, torch.tensor(tokens[0] + tokens[1]), torch.tensor(drafts),
            {"group.0": rows}, {"group.0": own.unsqueeze(1)},
        )  # fmt: skip
        sources = {"group.1": torch.where(begin > 0, own, -1)}
        states = States(slots or {}, sources, None, leaves={"group.1": own})
        self.watch.change(changes)
        self.watch.step(lambda: (read, states), pytest.fail)
        sampled = torch.tensor([each + [-1] * (3 - len(each)) for each in ids])
        number = (sampled >= 0).sum(1)
        self.watch.windows.commit_nears(number, sampled)
        if drafts[0]:
            where = {"group.0": rows[1:3], "group.1": torch.tensor([self.commits])}
            with self.manager.window([2], where, settled=0) as window:
                window.stage(self.manager.layers["rows"], *torch.randn(2, 2, 1, DIM))
                window.stage(self.manager.layers["state"], [torch.randn(2, DIM)])
                window.commit([int(number[0]) - 1 if kept is None else kept])
        self.watch.sampled(number, sampled)
        assert not self.watch.windows

    def run(self, **window):
        """Run a prompt, drafts of which one is accepted, and a step that reads what they left."""
        arrivals = [
            Arrival(name, tokens, [], {}, 0, [[i], [i]])
            for i, (name, tokens) in enumerate(zip(NAMES, ([1, 2], [3, 4]), strict=True))
        ]
        self.step([0, 0], [[1, 2], [3, 4]], [0, 0], [[5], [6]], Changes((), arrivals, (), ()))
        self.step([2, 2], [[5, 7, 8], [6]], [2, 0], [[7, 9], [10]], **window)
        self.step([4, 3], [[9], [10]], [0, 0], [[1], [1]])
        return [(each["kind"], each["request"], each["group"]) for each in self.watch.report()]


def test_states_of_a_window_and_of_the_engine_are_known():
    """Those that a window commits, and those of requests and steps without one."""
    engine = Engine()
    assert engine.run() == []
    assert not engine.watch.stopped
    assert engine.watch.counters()["kvtxn_audit_states_checked_total"] == 4


def test_the_window_says_which_block_it_wrote_a_state_to():
    """Whatever the engine says of it: the window has committed into a third one."""
    assert ("state", NAMES[0], "group.1") in Engine(commits=2).run()


@pytest.mark.parametrize("kept", [0, 2])
def test_a_window_that_keeps_other_drafts_than_were_sampled_is_found(kept):
    found = Engine().run(kept=kept)
    assert ("state", NAMES[0], "group.1") in found
    assert {request for _, request, _ in found} == {NAMES[0]}


def test_a_step_with_slots_of_states_that_a_commit_writes_ends_the_audit(caplog):
    engine = Engine()
    engine.run(slots={"group.1": torch.full((4,), -1)})
    assert engine.watch.stopped
    assert "the commit writes its states" in caplog.text
