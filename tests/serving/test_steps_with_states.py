"""Steps whose windows hold recurrent states of the engine's own kernels, beside rows or alone."""

from __future__ import annotations

import numpy
import pytest
import torch
from kvtxn.integrations.serving.graph_steps import GraphSteps, PackedGraphSteps
from recurring_rig import (  # noqa: F401
    COUNTS,
    DEVICE,
    DRAFTS,
    LENGTHS,
    Recurring,
    anywhere,
    static_window,
)
from step_rig import ON_GPU, Calls, Rig

from kvtxn.state_supplier import StateSupplier
from kvtxn.testing.faults import InjectedFault


@pytest.fixture
def rig():
    return Recurring()


def states_are(rig, expected) -> bool:
    """Tell whether each state is the expected one, to the bit."""
    return all(map(torch.equal, rig.states.memory, expected))


def test_under_undo_each_step_has_a_window_and_one_launch(monkeypatch):
    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 1)
    rig = Recurring("undo")
    for sampled in COUNTS:
        rig.step(sampled)
    assert (rig.states.replayed, rig.states.calls) == (len(COUNTS) - 1, ["commit"])
    assert rig.count("windows_total_committed") == len(COUNTS)


def test_layers_that_were_noted_in_part(rig):
    """Something else wrote the rows of the others: the window falls back; states are in once."""
    before = [cache.clone() for cache in rig.caches]
    rig.begins()
    states = rig.states.expected([2, 4])
    made = rig.forward()
    rig.steps.note_staged(rig.steps.layers[0])
    for ref, rows in list(zip(rig.steps.layers, made, strict=True))[1:]:
        for row, slot in enumerate(rig.slots[0, :8].tolist()):
            ref.key_cache[slot // 4, slot % 4] = rows[0][row]
            ref.value_cache[slot // 4, slot % 4] = rows[1][row]
    rig.ends([2, 4])
    assert rig.states.calls == ["commit"]
    assert states_are(rig, states)
    assert rig.count("fallbacks_total_attend") == rig.count("windows_total_fell_back") == 1
    assert len(before) == len(rig.caches)


def test_steps_without_a_window_for_their_rows_commit_states(rig, monkeypatch):
    """Without drafts, with too many rows, while windows rest, and after a failed beginning."""
    numbers = []
    rig.manager.on_commit(lambda ended: numbers.append((ended.layout.num_rows, ended.states)))
    for drafts, lengths, failing in (
        ([0], [1], False),
        ([3] * 5, [4] * 5, False),  # 20 rows
        ([3, 3], [4, 4], True),
        ([3, 3], [4, 4], False),  # rests
    ):
        with monkeypatch.context() as patch:
            if failing:
                patch.setattr(rig.steps.windows, "plan", broken)
            rig.begin(drafts, lengths)
            slots = list(range(len(lengths)))
            rig.states.begin(slots, lengths, replayed=True)
            sampled = [min(2, length) for length in lengths]
            states = rig.states.expected(sampled)
            rig.commit(sampled)
        assert states_are(rig, states)
    assert numbers == [(0, rig.states.names)] * 4
    assert rig.count("windows_total_committed") == 4
    assert rig.count("bypassed_windows_total") == 2
    assert rig.count("fallbacks_total_begin") == 1


def broken(*_: object) -> None:
    """Stands for anything that fails."""
    raise InjectedFault("a test made this fail")


def test_states_say_nothing_about_windows_over_rows(rig):
    """A window of states alone neither ends the rest of rows early nor prolongs it."""
    rig.steps._start_rest()
    rig.steps._start_rest()
    rest, pause = rig.steps._rest, rig.steps._pause
    for fails in ({}, {"commit": 1}):
        rig.begins()
        rig.states.fails = dict(fails)
        states = rig.states.expected([2, 4])
        rig.ends([2, 4])
        assert states_are(rig, states)
        rest -= 1
        assert (rig.steps._rest, rig.steps._pause) == (rest, pause)
    assert rig.count("windows_total_fell_back") == rig.count("fallbacks_total_states") == 1


def test_a_step_that_has_nothing_to_commit_has_no_window(rig):
    """Such as one of prompts alone."""
    rig.begin([0], [4], [True])
    rig.commit([1])
    assert rig.count("windows_total") == 0


def test_an_abandoned_step_leaves_its_states(rig):
    """With a window for its rows, and without one."""
    for begin in (rig.begins, lambda: rig.begin([0, 0], [1, 1])):
        begin()
        rig.states.begin([5, 2], LENGTHS)
        states = rig.states.expected(None)
        rig.steps.abandon()
        assert not rig.states.waits
        rig.ends([2, 2])
        assert states_are(rig, states)


def test_a_step_that_was_dropped_leaves_nothing_to_the_next(rig):
    """Nobody aborted it, and it had no window that the next step would have ended."""
    rig.begin([0, 0], [1, 1])
    rig.states.begin([5, 2], [1, 1])
    states = rig.states.expected(None)
    rig.begin([0, 0], [4, 4], [True, True])
    rig.commit([1, 1])
    assert states_are(rig, states)
    assert rig.count("windows_total") == 0


def test_what_a_step_without_rows_asks_torch_for(rig):
    """Nothing beside the commit of the states: no operator, and no launch."""
    counts = torch.ones(1, dtype=torch.int32, device=DEVICE)

    class Silent(StateSupplier):
        names, waits = ("mixer",), False

        def commit(self, sampled):
            made.append(sampled)

        def repeat(self, sampled):
            raise AssertionError

        def abandon(self):
            self.waits = False

    made: list[torch.Tensor] = []
    steps = GraphSteps(rig.manager, rig.slots, 4, states=Silent())
    with torch.inference_mode(), Calls() as calls:
        steps.begin(None, numpy.ones(1), numpy.zeros(1))
        steps.states.waits = True
        steps.commit(counts)
    assert made == [counts]
    assert calls.names == []


@pytest.mark.parametrize("drafts", [[3, 0, 2], [0, 2, 0]])
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_requests_with_drafts_anywhere_in_a_batch(policy, drafts):
    """States take in what each request of the batch sampled, rows what the window's did."""

    class Packed(Recurring):
        def make(self, rows):
            return PackedGraphSteps(self.manager, 4, 50, rows, states=self.states)

        def plan(self, *batch):
            self.steps.begin_among(*batch, [self.slots[0]])

    rig = Packed(policy)
    lengths = [count + 1 for count in drafts]
    rig.begin(drafts, lengths)
    rig.states.begin([1, 4, 6], lengths)
    sampled = [min(2, length) for length in lengths]
    states = rig.states.expected(sampled)
    ids = torch.where(torch.arange(4) < torch.tensor(sampled)[:, None], 7, -1).to(DEVICE)
    rig.steps.commit_ids(ids)
    assert states_are(rig, states)
    assert rig.count("rows_committed_total") == sum(sampled) - 3
    rig.begin([0, 0], [1, 1])
    rig.states.begin([1, 4], [1, 1])
    states = rig.states.expected([1, 1])
    rig.steps.commit_ids(ids[:2, :1])
    assert states_are(rig, states)
    assert rig.count("windows_total_committed") == 2


@pytest.mark.skipif(not ON_GPU, reason="nothing is captured here")
@pytest.mark.parametrize("policy", ["deferred", "undo"])
def test_a_commit_is_captured_with_that_of_states(policy, monkeypatch):
    """One replay makes both, with what is then in the counts; the capture itself makes neither."""
    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 1)
    counts = torch.ones(2, dtype=torch.int32, device=DEVICE)
    seen, replays = torch.zeros_like(counts), []

    class Copied(StateSupplier):
        waits = True
        replays = 2

        def commit(self, sampled):
            replays.append(False)

        def repeat(self, sampled):
            raise AssertionError

        def abandon(self):
            """There is always a step."""

        def launches(self, sampled, num_requests):
            return lambda: seen.copy_(sampled)

    class Copying(Rig):
        def make(self, rows):
            return GraphSteps(self.manager, self.slots, 4, rows, states=Copied())

    rig = Copying(policy)
    rig.steps.warm_up()
    for number, sampled in enumerate(([2, 4], [1, 3], [4, 2])):
        before = [cache.clone() for cache in rig.caches]
        rig.begin(DRAFTS, LENGTHS)
        made = rig.forward()
        counts.copy_(torch.tensor(sampled))
        rig.steps.commit(counts)
        rig.expect(before, made, DRAFTS, LENGTHS, sampled)
        assert seen.tolist() == (sampled if number else [0, 0])
    assert replays == [False]
    assert rig.count("windows_total_committed") == 3
