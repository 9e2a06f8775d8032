"""What the GPU's engines are watched by sees states that are right, and commits of wrong counts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import held_rig as held
import numpy
import pytest
import test_aligned_states
import test_replayed_rows
import torch
from engine_jobs import missing
from kvtxn.integrations.vllm_plugin.internals.replayed_rows import REPLAYED
from kvtxn.integrations.vllm_plugin.internals.state_layers import StateLayer
from kvtxn.integrations.vllm_plugin.policy.engine import GATED_DELTA

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


class RunnerV1:
    """vLLM's V1 runner as far as its steps are watched: request 1 decodes, request 0 prefills."""

    def __init__(self, names, computed, rows, drafts):
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        count = len(names)
        tables = [SimpleNamespace(get_device_tensor=lambda n, g=g: torch.arange(n)[:, None] + g)
                  for g in (10, 20)]  # fmt: skip
        self.input_batch = SimpleNamespace(
            req_ids=[f"{name}-x" for name in names],
            num_computed_tokens_cpu=numpy.array(computed),
            num_prompt_tokens=numpy.array([20] * count),
            num_accepted_tokens_cpu_tensor=torch.arange(1, count + 1),
            block_table=tables,
        )
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[0, 1])
        self.seq_lens = torch.tensor(computed) + torch.tensor(rows)
        starts = torch.tensor([0, *rows]).cumsum(0)
        self.query_start_loc = SimpleNamespace(gpu=starts)
        self.rows = numpy.array(rows)
        self.metadata = SpecDecodeMetadata.__new__(SpecDecodeMetadata)
        self.metadata.num_draft_tokens = list(drafts)


@pytest.fixture
def watch_v1(monkeypatch):
    """The watch of V1 engines over a runner, whose device is the host."""
    monkeypatch.syspath_prepend(GPU)
    give_back(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with mock.patch.dict(sys.modules):
        import state_watch_v1

    def made(*step):
        watch = state_watch_v1.Watch()
        watch.model_runner = runner = RunnerV1(*step)
        watch.names, watch.first, watch.seen = {}, 0, []
        watch.batch = state_watch_v1.Batch.of(runner, runner.metadata, runner.rows)
        watch.note_states = lambda *given: watch.seen.append(given)
        return watch

    return made


def test_a_step_of_the_v1_runner_is_read(watch_v1):
    """Tokens after the step are those before it, its settled rows, and the accepted drafts."""
    watch = watch_v1([0, 1], [10, 30], [6, 4], [0, 3])
    assert watch.batch.is_prefilling_np.tolist() == [True, False]
    watch.note_v1(torch.tensor([1, 3], dtype=torch.int32))
    [(kept, computed, place)] = watch.seen
    assert kept.tolist() == [1, 3]
    assert computed == [16, 33]  # three of four: the settled row, and two drafts
    assert place.tolist() == [0, 1]
    assert watch.tables(SimpleNamespace(group="group.1")).tolist() == [[20], [21]]


def test_lots_are_a_requests_own(watch_v1):
    """Whatever its place in the batch, at each position others."""
    one = watch_v1([0, 1], [40, 30], [3, 4], [2, 3]).lots(5, [2, 3])
    other = watch_v1([1, 0], [30, 40], [4, 3], [3, 2]).lots(5, [3, 2])
    assert torch.equal(one[2:], other[:3])
    assert torch.equal(one[:2], other[3:])
    later = watch_v1([1, 0], [31, 40], [4, 3], [3, 2]).lots(5, [3, 2])
    assert not torch.equal(other[:3], later[:3])
    assert torch.equal(other[3:], later[3:])
