"""Windows of a pipeline stage before the last one, without vLLM; see ``stage_rig``."""

from __future__ import annotations

import numpy
import pytest
import torch
from failing_stage import STAGES, InjectedFault, failing_stage
from kernels_here import importing_kernels
from stage_rig import Stage
from step_rig import DEVICE, Rig, anywhere  # noqa: F401  # a fixture

from kvtxn import ConfigError

with importing_kernels():
    from kvtxn.integrations.serving.pipeline_steps import PipelineSteps


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_requests_that_come_and_go(depth, backend):
    """Accepted rows last and are never missed, rejected ones are put back, nobody else's change."""
    stage = Stage(depth, seed=depth, backend=backend)
    for _ in range(60):
        stage.step()
    assert min(stage.seen[each] for each in ("handed on", "some gone", "all gone")) > 0, stage.seen
    assert 0 < stage.seen["put back"] < stage.seen["rejected"]
    assert stage.count("windows_total_committed") > 10
    assert stage.count("fallbacks_total") == 0


class Two:
    """Two stages, and two requests in one batch: three drafts each, then nothing for a step."""

    def __init__(self, policy="undo", **config) -> None:
        self.rig = Rig(policy, **config)
        self.steps = PipelineSteps(self.rig.manager, self.rig.slots, 4, 2)
        self.before = self.copies()
        self.batch = numpy.array([4, 7])

    def copies(self):
        return [cache.clone() for cache in self.rig.caches]

    def run(self, batch=None, first=0) -> None:
        """A step without acceptance to hear of; request r has the block ``first`` + r."""
        self.steps.advance(None, None)
        self.steps.settle()
        self.forward(self.batch if batch is None else batch, first)

    def forward(self, batch, first=0) -> None:
        rows = [(first + r) * 4 + i for r in range(len(batch)) for i in range(4)]
        self.rig.slots.fill_(-1)
        self.rig.slots[0, : len(rows)] = torch.tensor(rows)
        counts = numpy.full(len(batch), 3)
        self.steps.begin(counts, counts + 1, counts < 0, batch)
        self.written = self.rig.forward()

    def idle(self) -> None:
        """A step without requests."""
        self.steps.advance(None, None)
        self.steps.settle()
        self.rig.slots.fill_(-1)

    def hear(self, sampled, freed=(False, False), batch=None) -> None:
        """A step begins, and the acceptance of the step before the last one comes."""
        self.steps.advance(self.batch if batch is None else batch, numpy.array(freed))
        if sampled is not None:
            self.steps.commit(torch.tensor(sampled, dtype=torch.int32, device=DEVICE))
        self.steps.settle()

    def count(self, name: str) -> float:
        return self.rig.count(name)


def test_rows_of_a_freed_request_stay_and_count_nowhere():
    """The other request's rejected rows are put back meanwhile."""
    two = Two()
    two.run()
    whole = two.copies()
    two.idle()
    two.hear([1, 2], freed=(True, False))
    for cache, written, before in zip(two.rig.caches, whole, two.before, strict=True):
        assert torch.equal(cache[0], written[0])  # [block, heads, row, 2 * size]
        assert torch.equal(cache[1, :, :2], written[1, :, :2])
        assert torch.equal(cache[1, :, 2:], before[1, :, 2:])
    counts = [two.count(f"rows_{name}_total") for name in ("staged", "committed", "rejected")]
    assert counts == [3, 1, 2]


@pytest.mark.parametrize(
    "way", ["all freed", "never sent", "another batch", "the runner is unhooked"]
)
def test_where_no_acceptance_comes_the_rows_stay(way):
    """As stock leaves them; and the next steps have windows."""
    two = Two()
    two.run()
    whole = two.copies()
    two.idle()
    if way == "all freed":
        two.hear(None, freed=(True, True))
    elif way == "never sent":
        two.idle()
    elif way == "another batch":
        two.hear([1, 1], batch=numpy.array([4, 7]))
    else:
        two.steps.abandon()
    assert all(map(torch.equal, two.rig.caches, whole))
    assert two.count("windows_total_aborted") == 1
    two.run()
    two.idle()
    two.hear([4, 4])
    assert two.count("windows_total_committed") == 1


def test_windows_are_committed_in_the_order_of_their_steps():
    """Two are open at one time, each over slots of its own though the runner has one buffer."""
    two = Two()
    first, second = numpy.array([1, 2]), numpy.array([3, 5])
    two.run(first)
    two.run(second, first=2)
    assert [lane.window is not None for lane in two.steps.lanes] == [True, True]
    two.hear([1, 4], batch=first)
    two.forward(first)
    assert two.count("rows_rejected_total") == 3
    two.hear([2, 2], batch=second)
    assert two.count("rows_rejected_total") == 3 + 4
    for cache, before in zip(two.rig.caches, two.before, strict=True):
        assert torch.equal(cache[2:4, :, 2:], before[2:4, :, 2:])
        assert not torch.equal(cache[0, :, 1:], before[0, :, 1:])  # of the third step, not told yet


@pytest.mark.parametrize("stage", STAGES["undo"])
def test_a_stage_of_a_step_that_fails(stage):
    """No row of a request is lost, the fault is counted once, and the lane rests for a while."""
    engine = Stage(2, seed=1)
    for _ in range(4):
        engine.step(leaving=0)
    engine.judge = lambda *args: None  # the rejected rows of that step may stay
    with failing_stage(engine.steps.lanes[0], stage, 0) as calls:
        for _ in range(6):
            engine.step(leaving=0)
    assert calls[0] >= 1
    for _ in range(30):
        engine.step()
    assert engine.count("fallbacks_total") == 1
    assert engine.count("bypassed_windows_total_resting") > 0
    assert engine.count("windows_total_committed") > 5


def test_slots_that_cannot_be_copied(monkeypatch):
    """The step has no window, and the caches are as stock leaves them."""
    two = Two()

    def broken(*args):
        raise InjectedFault("copy")

    monkeypatch.setattr(two.steps, "_copy", broken)
    two.run()
    whole = two.copies()
    two.idle()
    two.hear([1, 1])
    assert all(map(torch.equal, two.rig.caches, whole))
    assert (two.count("fallbacks_total"), two.count("windows_total")) == (1, 0)


def test_errors_are_raised_where_they_are_asked_for():
    """Rejected rows are restored first, of freed requests none."""
    two = Two(on_error="raise")
    with failing_stage(two.steps.lanes[1], "commit", 0):
        two.run()
        whole = two.copies()
        two.idle()
        with pytest.raises(InjectedFault):
            two.hear([1, 2], freed=(True, False))
    for cache, written, before in zip(two.rig.caches, whole, two.before, strict=True):
        assert torch.equal(cache[0], written[0])
        assert torch.equal(cache[1, :, 1:], before[1, :, 1:])


def test_steps_without_drafts_and_batches_that_get_no_window():
    """The reason is counted once per step, and nothing waits for an acceptance."""
    two = Two()
    lengths = numpy.array([1, 1])
    two.steps.advance(None, None)
    two.steps.begin(None, lengths, lengths < 0, two.batch)
    two.idle()
    two.steps.advance(None, None)
    two.steps.begin(numpy.array([0, 2]), numpy.array([1, 3]), lengths < 0, two.batch)
    two.idle()
    two.hear([1, 1])
    two.forward(numpy.arange(5))
    assert two.count("bypassed_windows_total_order") == 1
    assert two.count("bypassed_windows_total_max_rows") == 1
    assert two.count("windows_total") == 0


def test_drafts_do_not_wait_here():
    with pytest.raises(ConfigError, match="drafts cannot wait on a pipeline stage"):
        Two("deferred")


@pytest.mark.parametrize("policy", ["undo", "direct"])
def test_warming_up_leaves_no_trace(policy):
    two = Two(policy)
    counts = two.rig.manager.snapshot()
    two.steps.warm_up()
    assert all(map(torch.equal, two.rig.caches, two.before))
    assert two.rig.manager.snapshot() == counts
    assert two.steps.nbytes >= 2 * sum(lane.windows.slots.nbytes for lane in two.steps.lanes)
