"""Steps that seem to recur, while something between them or in their middle is another."""

from __future__ import annotations

import logging

import numpy
import pytest
import torch
from recurring_rig import COUNTS, DEVICE, DRAFTS, LENGTHS, after_a_step, anywhere  # noqa: F401

from kvtxn.window_transitions import WindowState


@pytest.fixture
def rig(monkeypatch):
    return after_a_step(monkeypatch)


def test_marks_that_somebody_cleared_are_made_again(rig):
    """As when windows were switched off for some steps: drafts do not wait by themselves then."""
    rig.step(COUNTS[1])
    rig.steps.windows.mark(None)
    assert (rig.steps.windows.position == -1).all()
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert rig.opens() == 2
    assert rig.count("windows_total_committed") == 5


def test_a_window_that_was_opened_and_dropped_is_aborted(rig):
    """A forward outside of graphs that failed: the next step begins as if it had not been."""
    rig.step(COUNTS[1])
    rig.begins(replays=0)
    rig.steps.note_staged(rig.steps.layers[0])
    dropped = rig.steps.window
    for sampled in COUNTS[2:]:
        rig.step(sampled)
    assert dropped.state is WindowState.ABORTED
    assert rig.manager.current is None
    assert rig.count("windows_total_aborted") == 1
    assert rig.count("windows_total_committed") == 5


def test_a_step_whose_states_were_not_noted_commits_none(rig):
    """The launch would commit those of the step before once more."""
    rig.step(COUNTS[1])
    drafts = numpy.array(DRAFTS, dtype=numpy.int32)
    rig.begin(DRAFTS, LENGTHS, None, False, len(drafts))
    rig.forward()
    rig.ends(COUNTS[2])
    assert (rig.states.replayed, rig.states.calls) == (1, [])


def test_counts_of_another_form_at_the_known_address(rig):
    """The launch would read their halves; they are committed as ``commit_sampled`` takes them."""
    counts = torch.empty(4, dtype=torch.int32, device=DEVICE)
    rig.counts = counts[:2]
    rig.step(COUNTS[1])
    rig.step(COUNTS[2])
    assert rig.states.captured == 2  # one for each address
    assert rig.states.replayed == 1
    rig.states.calls.clear()
    rig.counts = counts.view(torch.int64)
    rig.begins()
    before = [cache.clone() for cache in rig.caches]
    made = rig.forward()
    rig.counts.copy_(torch.tensor(COUNTS[3]))
    rig.steps.commit(rig.counts)
    rig.expect(before, made, DRAFTS, LENGTHS, COUNTS[3])
    assert (rig.states.replayed, rig.states.calls) == (1, ["commit"])


def test_other_requests_of_the_same_number_have_their_own_slots(rig):
    """The slots are read where the runner put them for this step."""
    rig.step(COUNTS[1])
    rig.begins()
    rig.slots[0, :8] = torch.tensor([20, 21, 22, 23, 12, 13, 14, 15])
    before = [cache.clone() for cache in rig.caches]
    rig.forward()
    rig.ends([3, 1])
    for cache, old in zip(rig.caches, before, strict=True):
        changed = (cache != old).any(-1).any(1).nonzero().tolist()
        assert changed == [[3, 0], [5, 0], [5, 1], [5, 2]]
    assert rig.opens() == 1


def test_hooks_and_the_log_that_come_in_the_middle_of_a_step(rig, caplog):
    heard = []
    rig.begins()
    rig.forward()
    hook = rig.manager.on_commit(lambda ended: heard.append(ended.number))
    rig.ends(COUNTS[1])
    hook.remove()
    rig.step(COUNTS[2])
    rig.begins()
    rig.forward()
    with caplog.at_level(logging.DEBUG, "kvtxn"):
        rig.ends(COUNTS[3])
    assert heard == [1]
    assert "window.committed" in caplog.text or "window.begin" in caplog.text
    assert rig.count("windows_total_committed") == 4


def test_counters_are_right_in_the_middle_of_a_step(rig):
    for number, sampled in enumerate(COUNTS):
        rig.begins()
        assert rig.count("windows_total_committed") == number + 1
        rig.forward()
        rig.ends(sampled)
    rig.begins()
    rig.manager.metrics.restart()
    rig.forward()
    rig.ends(COUNTS[0])
    assert rig.count("windows_total_committed") == 1
    assert rig.count("stage_operations_total") == 8 * (2 + 2)
