"""Verify without writing and a commit give, bit for bit, the states and outputs of vLLM's own step.

vLLM's own code runs: its layers' methods, its builders' metadata classes, and its kernels through
Triton's interpreter; the convolution alone is written out here, and is the same on both sides.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace

import pytest
import torch
from engine_jobs import missing
from held_layers import DELTAS
from held_rig import (
    DRAFTS,
    HEADS,
    SPEC,
    Captures,
    Rig,
    built,
)
from kernels_here import importing_kernels
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from kvtxn.integrations.vllm_plugin.seam import held_states as held_states
from kvtxn.integrations.vllm_plugin.seam import verified_rows

from kvtxn.errors import KVTxnError

with importing_kernels():
    from kvtxn.backends.move_rows.stage_rows import stage_rows

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


KINDS = [(kind, stored) for kind in (GATED_DELTA, OLMO_DELTA, MAMBA2)
         for stored in (torch.float32, torch.bfloat16)]  # fmt: skip


def hooked(kind, stored, monkeypatch, make=None):
    """Return a rig whose layers are hooked; ``make`` captures its commits."""
    made = Rig(kind, stored, monkeypatch, make)
    made.states.warm_up()
    made.states.hook()
    return made


@pytest.fixture(params=KINDS[::2], ids=lambda p: f"{p[0].split()[0]}-{p[0].split()[-1]}")
def rig(request, monkeypatch):
    return hooked(*request.param, monkeypatch)


#: The methods that are hooked in a layer, by its kind and whether kvtxn's own kernels verify.
METHODS = {
    (GATED_DELTA, False): ["_forward_core"],
    (OLMO_DELTA, False): ["_forward_core"],
    (MAMBA2, False): ["conv_ssm_forward"],
    (GATED_DELTA, True): ["_forward_core", "rearrange_mixed_qkv"],
    (MAMBA2, True): ["conv_ssm_forward"],
}


@pytest.fixture(params=METHODS, ids=str)
def either(request, monkeypatch):
    """Layers of each kind and form."""
    kind, fast = request.param
    monkeypatch.setattr(Rig, "fast", fast)
    return hooked(kind, torch.float32, monkeypatch)


@pytest.mark.parametrize(("kind", "stored"), KINDS, ids=str)
@pytest.mark.parametrize("captured", [False, True])
def test_states_and_outputs_are_stocks(kind, stored, captured, monkeypatch):
    """In several steps, with every number of kept rows, rows missing, and requests left out."""
    rig = hooked(kind, stored, monkeypatch, Captures() if captured else None)
    rig.step([4, 4, 4, 4], [1, 2, 3, 4])
    rig.step([4, 1, 3, 2], [4, 1, 2, 1])
    rig.step([1, 1, 1, 1], [1, 1, 1, 1])
    rig.step([4, 4], [3, 0])  # 0: as stock, one row stays
    rig.step([2, 4, 4, 4], [2, 1, 4, 3])
    rig.step([3, 1, 2], [3, 1, 2])  # in a graph of four requests
    rig.step([4, 4, 4], [3, 4, 1])
    if captured:
        assert (rig.make.captured, rig.make.replays) == (3, 7)  # of 1, 2 and 4 requests


def test_the_memory_of_rows_is_that_of_the_formula(monkeypatch):
    """Of a gated delta net of OLMo hybrid, whose decays and step sizes are float32."""
    rig = Rig(OLMO_DELTA, torch.float32, monkeypatch)
    [rows] = rig.states._verified
    kept = [part for part in vars(rows).values() if isinstance(part, torch.Tensor)]
    assert {part.dtype for part in kept} == {torch.bfloat16, torch.float32}
    formula = verified_rows.row_elements(rig.sides[1].layer, OLMO_DELTA) * rig.dtype.itemsize
    assert sum(part.nbytes for part in kept) == held_states.most_rows(rig.runner) * formula


def test_commits_that_cannot_be_captured_are_made_layer_by_layer(monkeypatch):
    """The log says so; the states are the same."""

    def make(run):
        raise RuntimeError("no capture here")

    said = {}
    warning = lambda event, **more: said.update({event: more["why"]})  # noqa: E731
    monkeypatch.setattr(held_states, "log", SimpleNamespace(warning=warning))
    rig = Rig(GATED_DELTA, torch.float32, monkeypatch, make)
    rig.states.warm_up()
    assert said == {"kvtxn.commits_not_captured": "RuntimeError('no capture here')"}
    assert rig.states.graphs is None
    rig.states.hook()
    rig.step([4, 3, 4, 1], [3, 1, 4, 1])


def test_a_grid_too_large_for_two_lines_a_request(rig, monkeypatch):
    """Each request's own line alone, and so all of its rows: the states are the same."""
    for module in (verified_rows, verified_rows):
        monkeypatch.setattr(module, "_MOST_PROGRAMS", 3 * HEADS)
    rig.step([4, 3, 4, 1], [3, 1, 4, 1])
    rig.step([2, 4], [1, 4])
    stock, ours = rig.sides
    for request, column in enumerate((0, 3, 3, 0)):  # kept in the last step of each, less one
        assert torch.equal(stock.state(request, column), ours.state(request, 0))


def test_a_step_without_a_commit_leaves_the_states(either):
    """As if the forward had not been: the next step reads the same states."""
    layer = either.sides[1].layer
    before = layer.kv_cache[1].clone()
    rows = torch.randn(8, layer.channels).to(either.dtype)
    more = torch.randn(8, 2, HEADS).to(either.dtype)
    either.forward(either.sides[1], [4, 4], rows, more)
    either.states.abandon()
    either.commit(torch.tensor([2, 2], dtype=torch.int32))
    assert torch.equal(layer.kv_cache[1], before)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_rows_of_several_tensors_are_staged_at_once(count):
    """Of any width, from rows any distance apart; rows behind those given stay as they are."""
    widths = [3000, 5, 1024, 1, 70][:count]
    wide = [torch.randn(4, width + 9).bfloat16() for width in widths]
    sources = [part[:, 4 : 4 + width] for part, width in zip(wide, widths, strict=True)]
    targets = [torch.full((6, width), 7.0).bfloat16() for width in widths]
    stage_rows(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[:4], source)
        assert (target[4:] == 7).all()


def test_unhooked_layers_have_their_own_methods(either):
    layer = either.sides[1].layer
    hooked = [name for name, each in vars(layer).items() if isinstance(each, MethodType)]
    assert hooked == METHODS[either.kind, either.fast]
    either.states.unhook()
    assert not [name for name, each in vars(layer).items() if isinstance(each, MethodType)]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_fails_is_repeated_or_stops_the_engine(times, captured, monkeypatch):
    """What fails once changes nothing; what fails twice is never mistaken for a commit."""
    rig = hooked(MAMBA2, torch.float32, monkeypatch, Captures() if captured else None)
    rows, left = rig.states._verified[0], [times]
    commit = rows.commit

    def failing(step):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("no launch")
        commit(step)

    monkeypatch.setattr(rows, "commit", failing)
    if times == 1:
        rig.step([4, 4, 4, 4], [2, 3, 4, 1])
    else:
        with pytest.raises(KVTxnError, match=r"did not take in its accepted drafts.*no launch"):
            rig.step([4, 4, 4, 4], [2, 3, 4, 1])
    assert rig.repeated == 1


# -- metadata that vLLM's own builders make ------------------------------------------------


@pytest.mark.parametrize("full", [True, False])
def test_steps_of_vllms_builders_are_understood(rig, full):
    """A table of one column looks as wide as stock's; the requests that verify are found."""
    given = built(rig.kind, rig, [(4, 3), (4, 3)], full=full)
    rig.states.begin({"it": given})
    table = getattr(given, SPEC[rig.kind])
    assert table.shape[1] == DRAFTS + 1
    assert table[:2, 0].tolist() == [1, 2]
    sources = rig.states.tables.sources[0]
    assert sources[:, -1].tolist()[:4] == [1, 2, 0, 0]
    assert not sources[:, :-1].any()
    rig.commit(torch.tensor([2, 4]))
    tables = rig.states.tables
    assert tables.commits[0, :4:2].tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 2, 2]]
    assert not tables.commits[0, 1::2].any()
    assert not tables.commits[0, 4:].any()
    assert tables.kept[:5].tolist() == [0, 2, 4, 8, 8]


def test_requests_that_verify_are_found_among_prompts(rig):
    """Their places, their rows, and of which request each count is."""
    batch = [(4, 3), (1, 0), (9, -1)]
    if rig.kind in DELTAS:
        batch = [(9, -1), *batch[:2]]  # vLLM does not sort this kind of batch
    given = built(rig.kind, rig, batch, full=False)
    rig.states.begin({"it": given})
    step = rig.states._step
    assert (step.requests, step.rows) == (2, 5)
    assert step.starts.tolist() == [0, 4, 5]
    rig.commit(torch.tensor([1, 3, 1] if rig.kind in DELTAS else [3, 1, 1]))
    first = 1 + batch.index((4, 3))
    tables = rig.states.tables
    expected = [[0, 0, first, 0, first], [first + 1, 0, 0, 0, first + 1]]
    assert tables.commits[0, :4:2].tolist() == expected
    assert not tables.commits[0, 1::2].any()
    assert tables.kept[:5].tolist() == [0, 3, 4, 5, 5]


def test_a_step_of_prompts_alone_commits_nothing(rig):
    rig.states.begin({"it": built(rig.kind, rig, [(9, -1), (7, -1)], full=False)})
    before = rig.sides[1].layer.kv_cache[1].clone()
    rig.commit(torch.tensor([1, 1]))
    assert torch.equal(rig.sides[1].layer.kv_cache[1], before)
