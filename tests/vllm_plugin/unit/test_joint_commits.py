"""States and rows that one launch commits: the same states as stock's, whatever fails."""

from __future__ import annotations

import held_rig as held
import pytest
import torch
from engine_jobs import missing
from held_layers import DELTAS, DRAFTS, REQUESTS
from kernels_here import importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2
from step_rig import anywhere  # noqa: F401

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    from kvtxn.backends.graphs import static_window

    from kvtxn.cuda_graphs import GRAPH_BYTES
    from kvtxn.layout import RowLayout

FULL = [DRAFTS + 1] * REQUESTS


class Rig(held.Rig):
    """States in windows over padding rows, committed from buffers that stay where they are.

    Attributes:
        joint: stands for the captured launches of rows and states.
    """

    def joins(self):
        self.joint = held.Captures()
        self.windows = held.windows_with(self.states, "triton")
        layout = RowLayout.build((DRAFTS,) * REQUESTS, (1,) * REQUESTS, torch.device("cpu"))
        self.plan = self.windows.plan(layout)
        self.windows.warm_up([layout])
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.sampled = torch.zeros(REQUESTS, dtype=torch.int32)
        self.own, self.states = self.states, self
        return self

    def begin(self, metadata, batch):
        """As a replayed forward: its blocks are named, and its rows begin where they always do."""
        self.own.begin(metadata, batch)
        self.own._known = None
        self.own.replays = len(metadata["it"].num_accepted_tokens)
        given = metadata["it"]
        name = "spec_query_start_loc" if self.kind in DELTAS else "query_start_loc_d"
        starts = getattr(given, name)
        self.starts[: starts.shape[0]] = starts
        setattr(given, name, self.starts[: starts.shape[0]])

    def commit(self, counts):
        """Commit by a window over the plan's rows, or without a plan by one without rows."""
        count = counts.shape[0]
        sampled = self.sampled[:count]
        sampled.copy_(counts)
        if self.plan is None or count < self.plan.num_requests:
            self.windows.begin_states().commit_sampled(sampled)
        else:
            self.windows.begin(self.plan).commit_sampled(sampled)
        assert self.own._step is None

    def count(self, name):
        """Return how many windows ended so."""
        return self.windows.context.metrics.windows[name]


#: Either supplier; the kind of layer plays no part in who commits the states.
KINDS = [(GATED_DELTA, True), (MAMBA2, False)]


@pytest.fixture
def rig(monkeypatch):
    """States by kvtxn's own kernels: what they are is the same with either supplier."""
    return joined(KINDS[0], monkeypatch)


def joined(kind_and_supplier, monkeypatch):
    """Return a rig whose layouts are often enough from their second step on."""
    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 2)
    kind, fast = kind_and_supplier
    monkeypatch.setattr(held.Rig, "fast", fast)
    if fast:  # its sums are in another order than stock's
        monkeypatch.setattr(torch, "equal", nearly)
    made = Rig(kind, torch.float32, monkeypatch, held.Captures())
    made.states.warm_up()
    made.states.hook()
    made.joins()
    if made.own.capture is None:  # else the states say how to capture
        captured = lambda _, run: made.joint(run)  # noqa: E731
        monkeypatch.setattr(static_window.StaticLaunches, "captured", captured)
    else:
        made.joint = made.make
        made.make.captured = 0
    return made


def nearly(one, other):
    """Tell whether two tensors are as near as float32 sums in two orders, rounded to bfloat16."""
    return bool(((one - other).abs() <= 2**-7 * other.abs().max()).all())


STEPS = [[1, 2, 3, 4], [4, 1, 1, 2], [2, 2, 4, 1], [1, 1, 1, 3], [4, 4, 4, 4], [3, 1, 2, 4]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_states_are_those_of_stock(kind, monkeypatch):
    """From the third step of a kind on states and rows have one launch."""
    rig = joined(kind, monkeypatch)
    for sampled in STEPS:
        rig.step(FULL, sampled)
    alone = 0 if rig.own._alone else 2  # the first steps' states have a graph of their own
    assert (rig.joint.captured, rig.joint.replays) == (1, 4 + alone)
    assert rig.count("committed") == 6


def test_steps_of_another_kind_are_committed_by_themselves(rig):
    """Fewer requests, or no window for the rows."""
    for sampled in STEPS[:3]:
        rig.step(FULL, sampled)
    assert rig.joint.replays == 1
    rig.step([4, 4], [3, 1])
    rig.plan, whole = None, rig.plan
    rig.step(FULL, STEPS[4])
    assert rig.joint.replays == 1
    rig.plan = whole
    rig.step(FULL, STEPS[5])
    assert rig.joint.replays == 2


def test_forwards_that_are_no_graph_are_committed_by_themselves(rig, monkeypatch):
    for sampled in STEPS[:3]:
        rig.step(FULL, sampled)
    begin = rig.begin

    def eager(metadata, batch):
        begin(metadata, batch)
        rig.own.replays = 0

    monkeypatch.setattr(rig, "begin", eager)
    rig.step(FULL, STEPS[3])
    assert rig.joint.replays == 1


def test_a_launch_that_fails_leaves_the_states_to_be_committed(rig, monkeypatch):
    """It wrote nothing; the states are committed by themselves, and nothing is lost."""
    for sampled in STEPS[:3]:
        rig.step(FULL, sampled)
    [place], replays = rig.plan.launches.with_states, rig.plan.launches.with_states

    def failing():
        raise RuntimeError("no launch")

    with monkeypatch.context() as patch:
        patch.setitem(replays, place, failing)
        rig.step(FULL, STEPS[3])
    rig.step(FULL, STEPS[4])
    assert rig.joint.replays == 2
    assert (rig.count("fell_back"), rig.count("committed")) == (1, 4)
    assert rig.repeated == 0


def test_counts_of_another_form_at_the_same_address(rig):
    """A prepared launch would read other numbers there."""
    for sampled in STEPS[:3]:
        rig.step(FULL, sampled)
    rig.sampled = rig.sampled.repeat_interleave(2)[::2]
    rig.plan.launches.with_states[rig.sampled.data_ptr()] = pytest.fail
    rig.step(FULL, STEPS[3])
    assert rig.joint.replays == 1


def test_a_graph_that_had_to_go_is_captured_again(rig):
    """Its steps are committed by two launches until they have recurred as often once more."""
    graphs, replays = rig.windows.context.executor.graphs, rig.plan.launches.with_states
    graphs.most_bytes = GRAPH_BYTES
    for sampled in STEPS[:3]:
        rig.step(FULL, sampled)
    assert (rig.joint.replays, len(replays)) == (1, 1)
    graphs.add(lambda: print, lambda: None)
    assert not replays
    for sampled in STEPS[3:]:
        rig.step(FULL, sampled)
    assert (rig.joint.captured, rig.joint.replays) == (2, 2)


def test_what_cannot_be_captured_stays_two_launches(rig, monkeypatch):
    captured = static_window.StaticLaunches.captured
    monkeypatch.setattr(static_window.StaticLaunches, "captured", lambda *_: None)
    for sampled in STEPS[:4]:
        rig.step(FULL, sampled)

    def failing(*_):
        raise RuntimeError("no capture")

    monkeypatch.setattr(static_window, "_OFTEN_WITH_STATES", 5)
    monkeypatch.setattr(static_window.StaticLaunches, "captured", failing)
    for sampled in STEPS[:2]:
        rig.step(FULL, sampled)
    monkeypatch.setattr(static_window.StaticLaunches, "captured", captured)
    assert (rig.joint.replays, rig.count("committed"), rig.repeated) == (0, 6, 0)
