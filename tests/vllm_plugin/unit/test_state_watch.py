"""What the GPU's engines are watched by sees states that are right, and commits of wrong counts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import held_rig as held
import pytest
import test_aligned_states
import test_replayed_rows
import torch
from engine_jobs import missing
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA
from kvtxn.integrations.vllm_plugin.seam.replayed_rows import REPLAYED
from kvtxn.integrations.vllm_plugin.seam.state_layers import StateLayer

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

GPU = str(Path(__file__).parents[2] / "gpu")


def give_back(monkeypatch):
    """Let launches be watched until the test's end."""
    for kind in REPLAYED.values():
        monkeypatch.setattr(kind, "launch", kind.launch)


class Watched:
    """One layer whose steps are watched as those of an engine on a GPU."""

    def __init__(self, monkeypatch):
        monkeypatch.syspath_prepend(GPU)
        give_back(monkeypatch)
        with mock.patch.dict(sys.modules):
            import state_watch
        self.rig = test_replayed_rows.Rig(GATED_DELTA, torch.float32, monkeypatch)
        self.rig.states.warm_up()
        self.rig.states.hook()
        self.ours = self.rig.sides[1]
        layer = self.ours.layer
        self.watch = watch = state_watch.Watch()
        watch.found = [StateLayer("it", "group.0", GATED_DELTA, layer, *layer.kv_cache)]
        watch.replayed, watch.held = self.rig.states._replayed[0].layers, True
        watch.model_runner = SimpleNamespace(kvtxn_states=self.rig.states, kvtxn=None)
        watch.tables = lambda _: self.ours.table[: watch.batch.num_reqs].long()
        watch.all_tables = lambda: [watch.tables(None)]
        watch.num_blocks = held.BLOCKS
        watch.begin(0)

    def step(self, lengths, sampled):
        """Verify, commit, and look."""
        layer, watch, rig = self.ours.layer, self.watch, self.rig
        rows = torch.randn(sum(lengths), layer.channels).to(rig.dtype)
        more = torch.randn(sum(lengths), 2, held.HEADS).to(rig.dtype)
        watch.batch = SimpleNamespace(num_reqs=len(lengths))
        watch.before, watch.blocks = watch.states_now(), watch.blocks_now()
        rig.forward(self.ours, lengths, rows, more)
        step, counts = rig.states._step, torch.tensor(sampled, dtype=torch.int32)
        rig.commit(counts)
        watch.recur(step, counts)
        rig.accepted[: len(lengths)] = counts.clamp(min=1)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def test_right_states_are_right(watched):
    watched.step([4, 4, 4, 4], [1, 2, 3, 4])
    watched.step([4, 1, 3], [2, 1, 3])
    seen = watched.watch.seen_states()
    assert 0 < seen.pop("worst") < 2**-18
    wrong = dict.fromkeys(("off", "mistaken", "blind", "other_blocks", "ends"), 0)
    assert seen == {"states": 7, **wrong}


def test_wrong_counts_are_seen_each(watched):
    """Of the fifth step the two requests that can have another count; the others are right."""
    watched.watch.miscount()
    for _ in range(5):
        watched.step([4, 4, 1], [4, 1, 1])
    given, seen = watched.watch.count_again(), watched.watch.seen_states()
    assert (given, seen["off"], seen["mistaken"], seen["states"]) == (2, 2, 2, 15)
    watched.step([4, 4, 1], [4, 1, 1])
    assert watched.watch.seen_states()["off"] == 2


def test_another_block_that_changes_is_seen(watched):
    watched.step([4, 4], [1, 2])
    watched.watch.batch = SimpleNamespace(num_reqs=2)
    advance = test_replayed_rows.replayed_rows.advance_gated_delta

    def stray(layers, *given, **named):
        advance(layers, *given, **named)
        layers.states[0][7, 0, 0, 0] += 1

    with mock.patch.object(test_replayed_rows.replayed_rows, "advance_gated_delta", stray):
        watched.step([4, 4], [3, 1])
    assert watched.watch.seen_states()["other_blocks"] == 1


def test_commits_that_fail_are_repeated(watched):
    watched.watch.fail_once()
    for _ in range(8):
        watched.step([4, 4, 1], [4, 1, 1])
    assert watched.watch.repair() == {"failed": 1}
    assert watched.rig.repeated == 1
    assert watched.watch.seen_states()["off"] == 0


class AlignedWatch:
    """The same, where the prefix cache keeps states: steps cross the ends of blocks."""

    def __init__(self, monkeypatch):
        monkeypatch.syspath_prepend(GPU)
        give_back(monkeypatch)
        monkeypatch.setattr(held, "BLOCKS", 80)
        monkeypatch.setattr(test_aligned_states.Rig, "fast", True)
        with mock.patch.dict(sys.modules):
            import state_watch
        self.rig = rig = test_aligned_states.Rig(GATED_DELTA, torch.float32, monkeypatch)
        layer = rig.sides[1].layer
        self.watch = watch = state_watch.Watch()
        watch.found = [StateLayer("it", "group.0", GATED_DELTA, layer, *layer.kv_cache)]
        watch.replayed, watch.held, watch.aligned = rig.states._replayed[0].layers, True, True
        watch.model_runner = rig.runner
        watch.tables = lambda _: rig.engines[1].tables.long()
        watch.all_tables = lambda: [watch.tables(None)]
        watch.num_blocks = held.BLOCKS
        watch.begin(0)
        forward, commit = rig.forward, rig.states.commit

        def forwarded(side, *given):
            if side is rig.sides[1]:
                watch.batch = SimpleNamespace(num_reqs=held.REQUESTS, **vars(rig.batch))
                watch.before, watch.blocks = watch.states_now(), watch.blocks_now()
            return forward(side, *given)

        def committed(counts):
            step = rig.states._step
            commit(counts)
            watch.recur(step, counts)

        monkeypatch.setattr(rig, "forward", forwarded)
        monkeypatch.setattr(rig.states, "commit", committed)


def test_states_at_the_ends_of_blocks_are_compared(monkeypatch):
    """Right ones are right; the blocks of requests that cross an end may change, and no others."""
    watched = AlignedWatch(monkeypatch)
    for sampled in ([1, 2, 3, 4], [4, 4, 4, 4], [4, 1, 4, 4]):
        watched.rig.step([4] * held.REQUESTS, sampled)
    seen = watched.watch.seen_states()
    assert seen["ends"] == watched.rig.crossed > 3
    assert (seen["off"], seen["other_blocks"]) == (0, 0)


def test_a_state_that_is_not_at_the_end_of_its_block_is_seen(monkeypatch):
    """A commit that leaves none there; where the block is the request's own, there is no other."""
    watched = AlignedWatch(monkeypatch)
    rows = test_replayed_rows.replayed_rows
    advance = rows.advance_gated_delta

    def without(*given, snapshots, boundary, **named):
        advance(*given, **named)

    monkeypatch.setattr(rows, "advance_gated_delta", without)
    with pytest.raises(AssertionError):  # the rig itself sees it first
        watched.rig.step([4] * held.REQUESTS, [4, 4, 4, 4])
    assert 0 < watched.watch.seen_states()["off"] <= watched.watch.seen_states()["ends"]
