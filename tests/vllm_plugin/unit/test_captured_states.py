"""Forwards that are captured: their graphs name the blocks of states, and the host names none."""

from __future__ import annotations

from types import SimpleNamespace

import held_rig as held
import pytest
import torch
from engine_jobs import missing
from held_layers import DELTAS
from kernels_here import importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from kvtxn.integrations.vllm_plugin.seam import state_commits
from kvtxn.integrations.vllm_plugin.seam.state_commits import StateTables

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    from kvtxn.integrations.vllm_plugin.gpu.states import ReportedModelState


class Graph:
    """Stands for the graph of a forward: what it names is named again by each replay."""

    def __init__(self, monkeypatch, states):
        self.made, own = [], StateTables.name_sources

        def noted(tables, group, table):
            self.made.append((group, table))
            own(tables, group, table)

        monkeypatch.setattr(StateTables, "name_sources", noted)
        self.tables, self.own = states.tables, own

    def replay(self):
        for group, table in self.made:
            self.own(self.tables, group, table)


@pytest.fixture(
    params=[(GATED_DELTA, False), (GATED_DELTA, True), (OLMO_DELTA, False), (MAMBA2, False)],
    ids=str,
)
def rig(request, monkeypatch):
    kind, fast = request.param
    monkeypatch.setattr(held.Rig, "fast", fast)
    made = held.Rig(kind, torch.float32, monkeypatch)
    made.states.hook()
    return made


def forward(rig, table, lengths, **how):
    """Run the layer's forward over random rows; ``table`` is where vLLM names blocks."""
    layer = rig.sides[1].layer
    given = held.metadata(rig.kind, table, lengths, torch.ones(len(lengths), dtype=torch.int32))
    rig.context = SimpleNamespace(attn_metadata={"it": given})
    rig.states.begin(rig.context.attn_metadata, **how)
    rows = torch.randn(sum(lengths), layer.channels).to(rig.dtype)
    more = torch.randn(sum(lengths), 2, held.HEADS).to(rig.dtype)
    if rig.kind in DELTAS:
        out = torch.zeros(rows.shape[0], held.HEADS, held.SIZE, dtype=rig.dtype)
        b, a = more.unbind(1)
        layer._forward_core(mixed_qkv=rows.clone(), b=b, a=a, core_attn_out=out)
    else:
        out = torch.zeros(rows.shape[0], held.HEADS * held.SIZE, dtype=rig.dtype)
        gate = torch.zeros(rows.shape[0], held.HEADS * held.SIZE, dtype=rig.dtype)
        layer.conv_ssm_forward(torch.cat([gate, rows, more[:, 0]], 1), out)


def test_a_replay_names_the_blocks_that_vllm_names_then(rig, monkeypatch):
    """The host names none; the commit writes the blocks of the step, and no other."""
    table = torch.tensor([[3], [5]], dtype=torch.int32)
    graph = Graph(monkeypatch, rig.states)
    forward(rig, table, [4, 4], captured=True)
    assert [group for group, _ in graph.made] == [0, 0]  # before the forward, and in it
    del graph.made[0]
    table.copy_(torch.tensor([[7], [2]]))
    given = held.metadata(rig.kind, table, [4, 4], torch.ones(2, dtype=torch.int32))
    rig.states.begin({"it": given}, replayed=True)
    assert len(graph.made) == 1
    graph.replay()
    assert rig.states.tables.sources[0, :2, -1].tolist() == [7, 2]
    before = rig.sides[1].layer.kv_cache[1].clone()
    rig.commit(torch.tensor([2, 1], dtype=torch.int32))
    changed = (rig.sides[1].layer.kv_cache[1] != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [2, 7]


def test_other_forwards_name_none(rig, monkeypatch):
    """Not even after one that was captured: its table may be another step's by then."""
    table = torch.tensor([[3], [5]], dtype=torch.int32)
    graph = Graph(monkeypatch, rig.states)
    forward(rig, table, [4, 4], captured=True)
    forward(rig, table.clone(), [4, 1])
    assert len(graph.made) == 3  # the last one before the forward


def test_one_layer_of_a_group_names_the_blocks():
    """The one that runs first, whichever it is, in each forward over the same metadata."""
    tables = StateTables.build(2, 4, 3, torch.device("cpu"))
    table, calls = torch.tensor([[3], [5]], dtype=torch.int32), []
    tables.captured.update({0: table, 1: table + 1})
    for _ in "ab":  # as vLLM does: once to warm up, once to capture
        for group, layer in ((1, "c"), (0, "b"), (1, "d"), (0, "a")):
            tables.sources.zero_()
            tables.name_in_graph(group, layer)
            calls.append(tables.sources[group, :2, -1].tolist())
    assert calls == [[4, 6], [3, 5], [0, 0], [0, 0]] * 2
    tables.begin_forward()
    tables.name_in_graph(0, "b")
    assert not tables.sources.any()


class Own:
    """Stands for vLLM's ``model_state``."""

    def prepare_attn(self, *args, **kwargs):
        return "metadata"


@pytest.mark.parametrize(
    ("mode", "args", "named", "expected"),
    [
        ("FULL", (1, 2, 3, 4), {}, (False, True)),
        ("FULL", (1, 2, 3, 4), {"for_capture": False}, (False, True)),
        ("NONE", (1, 2, 3, 4), {"for_capture": True}, (True, False)),
        ("FULL", (1, 2, 3, 4), {"for_capture": True}, (True, False)),
        ("NONE", (1, 2, 3, 4, True), {}, (True, False)),
        ("NONE", (1, 2, 3, 4), {}, (False, False)),
        ("PIECEWISE", (1, 2, 3, 4), {}, (False, False)),
    ],
)
def test_vllms_modes_are_told_apart(mode, args, named, expected):
    """vLLM captures whole forwards under the mode NONE, and replays them under FULL."""
    seen = []
    state = type("State", (ReportedModelState, Own), {})()
    state.kvtxn_states = SimpleNamespace(
        begin=lambda metadata, batch, captured, replayed: seen.append((captured, replayed))
    )
    assert state.prepare_attn("batch", SimpleNamespace(name=mode), *args, **named) == "metadata"
    assert seen == [expected]


def test_the_place_of_for_capture_is_vllms():
    from inspect import signature

    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    names = list(signature(MambaHybridModelState.prepare_attn).parameters)
    names = names[names.index("cudagraph_mode") + 1 :]
    args = [name == "for_capture" for name in names]
    assert state_commits.is_capture(tuple(args), {})
    assert not state_commits.is_capture(tuple(not each for each in args), {})
