"""States and rows that one launch commits: the same states as stock's, whatever fails."""

from __future__ import annotations

from types import SimpleNamespace

import held_rig as held
import pytest
import torch
from engine_jobs import missing
from held_layers import DELTAS, DRAFTS, REQUESTS
from kernels_here import importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine import GATED_DELTA, MAMBA2

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu import states as gpu_states
    from kvtxn.integrations.vllm_plugin.gpu.states import JointCommits

    from kvtxn.captured_launches import LayoutLaunches
    from kvtxn.captured_shared import StepPlan
    from kvtxn.cuda_graphs import GRAPH_BYTES, GraphCache


class Launches(LayoutLaunches):
    """Stands for a layout's launches: a captured launch makes the same calls again."""

    def __init__(self):
        self.captured, self.replayed, self.fails = 0, 0, False

    def save(self):
        """Nothing is saved here."""

    def commit(self, sampled):
        """The rows are not what is tested here."""

    def capture_with(self, sampled, beside, make=None):
        self.captured += 1

        def replay():
            if self.fails:
                raise RuntimeError("no launch")
            self.replayed += 1
            beside()

        return replay


class Window(SimpleNamespace):
    """Stands for the window of a step whose forward was replayed."""

    def to_launch(self):
        return self.plan


class Rig(held.Rig):
    """States that are committed as ``GraphSteps`` does, from buffers that stay where they are."""

    def joins(self):
        self.launches, self.graphs = Launches(), GraphCache()
        self.layout = SimpleNamespace(num_requests=REQUESTS)
        self.window = Window(plan=StepPlan(None, self.layout, self.launches, None, 0))
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32)
        self.sampled = torch.zeros(REQUESTS, dtype=torch.int32)
        self.joint, self.own, self.together = JointCommits(self.states, self.graphs), self.states, 0
        self.states = self
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
        sampled = self.sampled[: counts.shape[0]]
        sampled.copy_(counts)
        launch = self.joint.commit(self.window, sampled)
        if launch is not None:
            self.together += 1
            try:
                launch()
                self.own.abandon()
            except RuntimeError:
                assert self.launches.fails
                self.joint.repeat(sampled)
        assert self.own._step is None


#: Either supplier; the kind of layer plays no part in who commits the states.
KINDS = [(GATED_DELTA, True), (MAMBA2, False)]


@pytest.fixture
def rig(monkeypatch):
    """States by kvtxn's own kernels: what they are is the same with either supplier."""
    return joined(KINDS[0], monkeypatch)


def joined(kind_and_supplier, monkeypatch):
    """Return a rig whose layouts are often enough from their second step on."""
    monkeypatch.setattr(gpu_states, "_OFTEN", 2)
    kind, fast = kind_and_supplier
    monkeypatch.setattr(held.Rig, "fast", fast)
    if fast:  # its sums are in another order than stock's
        monkeypatch.setattr(torch, "equal", nearly)
    made = Rig(kind, torch.float32, monkeypatch, held.Captures())
    made.states.warm_up()
    made.states.hook()
    return made.joins()


def nearly(one, other):
    """Tell whether two tensors are as near as float32 sums in two orders, rounded to bfloat16."""
    return bool(((one - other).abs() <= 2**-7 * other.abs().max()).all())


STEPS = [[1, 2, 3, 4], [4, 1, 1, 2], [2, 2, 4, 1], [1, 1, 1, 3], [4, 4, 4, 4], [3, 1, 2, 4]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}")
def test_states_are_those_of_stock(kind, monkeypatch):
    """From the third step of a kind on states and rows have one launch."""
    rig = joined(kind, monkeypatch)
    for sampled in STEPS:
        rig.step([DRAFTS + 1] * REQUESTS, sampled)
    assert (rig.launches.captured, rig.launches.replayed, rig.together) == (1, 4, 4)
    assert rig.make.replays == (0 if rig.own._alone else 2)


def test_steps_of_another_kind_are_committed_by_themselves(rig, monkeypatch):
    """Fewer requests, other rows; no window, or one that is not ended by one launch."""
    full = [DRAFTS + 1] * REQUESTS
    for sampled in STEPS[:3]:
        rig.step(full, sampled)
    assert rig.together == 1
    rig.step([4, 4], [3, 1])
    whole, rig.window = rig.window, Window(plan=StepPlan(None, rig.layout, rig.launches, None, 0))
    monkeypatch.setattr(Window, "to_launch", lambda _: None)
    rig.step(full, STEPS[3])
    rig.window = None
    rig.step(full, STEPS[4])
    assert rig.together == 1
    rig.window = whole
    rig.step(full, STEPS[5])
    assert rig.together == 2


def test_forwards_that_are_no_graph_are_committed_by_themselves(rig, monkeypatch):
    full = [DRAFTS + 1] * REQUESTS
    for sampled in STEPS[:3]:
        rig.step(full, sampled)
    begin = rig.begin

    def eager(metadata, batch):
        begin(metadata, batch)
        rig.own.replays = 0

    monkeypatch.setattr(rig, "begin", eager)
    rig.step(full, STEPS[3])
    assert rig.together == 1


def test_a_launch_that_fails_leaves_the_states_to_be_committed(rig):
    """It wrote nothing; the states are committed by themselves, and nothing is lost."""
    full = [DRAFTS + 1] * REQUESTS
    for sampled in STEPS[:3]:
        rig.step(full, sampled)
    rig.launches.fails = True
    rig.step(full, STEPS[3])
    rig.launches.fails = False
    rig.step(full, STEPS[4])
    assert (rig.together, rig.launches.replayed) == (3, 2)
    assert rig.errors == []


def test_counts_of_another_form_at_the_same_address(rig):
    """A prepared launch would read other numbers there."""
    full = [DRAFTS + 1] * REQUESTS
    for sampled in STEPS[:3]:
        rig.step(full, sampled)
    assert rig.together == 1
    rig.sampled = rig.sampled.repeat_interleave(2)[::2]
    rig.window.plan.together = dict.fromkeys([rig.sampled.data_ptr()], pytest.fail)
    rig.step(full, STEPS[3])
    assert rig.together == 1


def test_a_graph_that_had_to_go_is_captured_again(rig):
    """Its steps are committed by two launches until they have recurred as often once more."""
    rig.graphs.most_bytes = GRAPH_BYTES
    full = [DRAFTS + 1] * REQUESTS
    for sampled in STEPS[:3]:
        rig.step(full, sampled)
    assert (rig.together, len(rig.window.plan.together)) == (1, 1)
    rig.graphs.add(lambda: print, lambda: None)
    assert not rig.window.plan.together
    for sampled in STEPS[3:]:
        rig.step(full, sampled)
    assert (rig.launches.captured, rig.together) == (2, 2)


def test_what_cannot_be_captured_stays_two_launches(rig, monkeypatch):
    monkeypatch.setattr(rig.launches, "capture_with", lambda *_: None)
    for sampled in STEPS[:4]:
        rig.step([DRAFTS + 1] * REQUESTS, sampled)

    def failing(*_):
        raise RuntimeError("no capture")

    monkeypatch.setattr(gpu_states, "_OFTEN", 5)
    monkeypatch.setattr(rig.launches, "capture_with", failing)
    for sampled in STEPS[:2]:
        rig.step([DRAFTS + 1] * REQUESTS, sampled)
    assert (rig.together, rig.errors) == (0, [])
