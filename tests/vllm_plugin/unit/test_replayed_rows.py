"""Recurrent layers by kvtxn's own kernels, in vLLM's own methods: beside vLLM's kernel.

Stock's kernel runs through Triton's interpreter and leaves a state per row; here is one state per
request, and a commit that takes the kept rows in.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import held_rig as held
import pytest
import torch
from engine_jobs import missing
from held_layers import KEY_HEADS
from kernels_here import importing_kernels
from kvtxn.backends.gated_delta import DeltaRows
from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, MAMBA2, OLMO_DELTA
from kvtxn.integrations.vllm_plugin.seam import held_states as held_states
from kvtxn.integrations.vllm_plugin.seam import replayed_rows, state_layers
from torch import Tensor

from kvtxn.errors import KVTxnError, LayerError

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

#: Of the largest number: sums in another order; bfloat16 states round in every step, and keep a
#: last place that differs.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2**-5}


class Rig(held.Rig):
    """Stock beside states that kvtxn's kernels verify and commit."""

    fast = True

    def compare_outputs(self, theirs: Tensor, mine: Tensor) -> None:
        """Compare a step's outputs with stock's."""
        stored = self.sides[1].layer.kv_cache[1].dtype
        near = 2**-7 if stored == torch.float32 else 2**-6
        assert (theirs - mine).abs().max() <= near * theirs.abs().max()

    def compare(self, request: int, length: int) -> None:
        """Compare a request's state with stock's after every count of the step's rows."""
        stock, ours = self.sides
        right = int(self.accepted[request]) - 1
        near = NEAR[ours.layer.kv_cache[1].dtype]
        for count in {right, *range(length)}:
            theirs, mine = stock.state(request, count).float(), ours.state(request, 0).float()
            off = float((theirs - mine).abs().max() / theirs.abs().max())
            assert (off <= near) == (count == right), f"request {request} after {count} drafts"


def hooked(kind, dtype, monkeypatch):
    """A rig whose layer is hooked."""
    made = Rig(kind, dtype, monkeypatch, held.Captures())
    made.states.warm_up()
    made.states.hook()
    return made


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    """Of the states."""
    return request.param


@pytest.fixture(params=[GATED_DELTA, MAMBA2])
def rig(request, dtype, monkeypatch):
    """Layers of each kind that kvtxn's kernels take."""
    return hooked(request.param, dtype, monkeypatch)


@pytest.fixture
def delta_rig(dtype, monkeypatch):
    """Gated delta nets alone."""
    return hooked(GATED_DELTA, dtype, monkeypatch)


def test_states_are_those_after_the_kept_rows_and_no_other_count(rig):
    """In several steps, with every number of kept rows, rows missing, and requests left out."""
    rig.step([4, 4, 4, 4], [1, 2, 3, 4])
    rig.step([4, 1, 3, 2], [4, 1, 2, 1])
    rig.step([1, 1, 1, 1], [1, 1, 1, 1])
    rig.step([4, 4], [3, 0])  # 0: as stock, one row stays
    rig.step([2, 4, 4, 4], [2, 1, 4, 3])
    rig.step([3, 1, 2], [3, 1, 2])
    rig.step([4, 4, 4, 4], [2, 2, 3, 1])
    assert rig.states.graphs is None  # one launch has nothing to capture
    assert not rig.make.captured


@pytest.mark.parametrize("kind", [GATED_DELTA, MAMBA2])
def test_the_kernels_take_what_vllms_methods_give(kind, monkeypatch):
    """Through Triton's interpreter, which cuts bfloat16 off where a GPU rounds."""
    with importing_kernels():
        from kvtxn.backends.gated_delta import launch
        from kvtxn.backends.mamba2 import launch as mamba2_launch

    seen = Counter()

    def verify_mamba2(x, dt, b, c, A, D, dt_bias, *where, longest):
        seen["verify"] += 1
        mamba2_launch.launch_verify((x, dt, b, c, A, D, dt_bias), *where, longest=longest)

    def verify(query, key, value, a, b, A_log, dt_bias, *where, scale, longest):
        seen["verify"] += 1
        given = query, key, value, a, b, A_log, dt_bias
        launch.launch_verify(given, *where, scale=scale, normalise=True, longest=longest)

    def advance(layers, sources, count, starts, *, longest, boundary, snapshots):
        seen["advance"] += 1
        where = sources, count, starts, boundary, snapshots
        launch.launch_advance(layers, *where, longest=longest)

    monkeypatch.setattr(replayed_rows, "verify_gated_delta", verify)
    monkeypatch.setattr(replayed_rows, "verify_mamba2", verify_mamba2)
    monkeypatch.setattr(replayed_rows, "advance_gated_delta", advance)
    rig = hooked(kind, torch.float32, monkeypatch)
    rig.step([4, 1, 3, 2], [4, 1, 2, 1])
    rig.step([4, 4], [3, 0])
    rig.step([1, 2, 3, 4], [1, 2, 2, 3])
    warm = 2 if kind == GATED_DELTA else 1  # layouts of rows
    assert seen == {"verify": warm + 3, "advance": 2 + 3}  # warm-ups and steps


@pytest.mark.parametrize("by", [-1, 1])
def test_a_wrong_count_is_seen(rig, by):
    """The comparison above would find it."""
    commit = rig.states.commit
    rig.states.commit = lambda sampled: commit(sampled + by)
    with pytest.raises(AssertionError, match="request 0 after"):
        rig.step([4, 4, 4, 4], [2, 2, 3, 3])


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_fails_is_repeated_or_stops_the_engine(rig, monkeypatch, times):
    """The launch that is repeated has written nothing before."""
    left, advance = [times], replayed_rows.advance_gated_delta

    def failing(*given, **named):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("no launch")
        advance(*given, **named)

    monkeypatch.setattr(replayed_rows, "advance_gated_delta", failing)
    if times == 1:
        rig.step([4, 4, 4, 4], [2, 3, 4, 1])
    else:
        with pytest.raises(KVTxnError, match=r"did not take in its accepted drafts.*no launch"):
            rig.step([4, 4, 4, 4], [2, 3, 4, 1])
    assert rig.repeated == 1


def test_requests_that_verify_are_found_among_prompts(rig):
    """Of a mixed batch the states of these requests take rows in, and no other."""
    batch, sampled, blocks = [(9, -1), (4, 3), (1, 0)], [1, 3, 1], [2, 3]
    if rig.kind == MAMBA2:  # vLLM puts its prompts last
        batch, sampled, blocks = [*batch[1:], batch[0]], [3, 1, 1], [1, 2]
    given = held.built(rig.kind, rig, batch, full=False)
    rig.states.begin({"it": given})
    [layer] = rig.states._verified[0].layers
    for part in (layer.rows.key, layer.rows.corrected):
        part[:5].normal_()
    before = rig.sides[1].layer.kv_cache[1].clone()
    rig.commit(torch.tensor(sampled))
    changed = (rig.sides[1].layer.kv_cache[1] != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == blocks
    assert rig.states.tables.counts[:2].tolist() == [3, 1]


def test_requests_that_pad_a_captured_graph_take_nothing_in(rig):
    """They have neither rows nor a block, and nobody samples for them."""
    given = held.built(rig.kind, rig, [(4, 3), (2, 1)], full=True)
    rig.states.begin({"it": given}, replayed=True)
    table = getattr(given, held.SPEC[rig.kind])
    rig.states.tables.name_sources(0, table)  # as the graph does
    [layer] = rig.states._verified[0].layers
    for part in (layer.rows.key, layer.rows.corrected):
        part.normal_()
    before = rig.sides[1].layer.kv_cache[1].clone()
    rig.commit(torch.tensor([2, 1, 1, 1][: table.shape[0]], dtype=torch.int32))
    changed = (rig.sides[1].layer.kv_cache[1] != before).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [1, 2]


def test_steps_without_drafts_run_vllms_kernel(delta_rig):
    """The kernel gets the arguments as they were given, and rows that are contiguous."""
    [layer] = delta_rig.states._verified[0].layers
    own = type(delta_rig.sides[1].layer).rearrange_mixed_qkv
    rows, seen = torch.randn(3, delta_rig.sides[1].layer.channels).to(delta_rig.dtype), []
    parts = dict(zip("qkv", layer.views(rows), strict=True))
    layer.verify(lambda **given: seen.append(given), a=1, **parts)
    expected = dict(zip("qkv", own(layer.module, rows), strict=True))
    assert seen[0].pop("a") == 1
    for name, part in seen[0].items():
        assert part.is_contiguous()
        assert torch.equal(part, expected[name])
    assert seen[0].keys() == expected.keys()
    assert layer.views(None) == own(layer.module, None)


def test_mamba2_layers_without_drafts_run_vllms_kernel(dtype, monkeypatch):
    """The kernel gets the arguments as they were given."""
    rig, seen = hooked(MAMBA2, dtype, monkeypatch), []
    [layer] = rig.states._verified[0].layers
    layer.verify(lambda *given, **named: seen.append((given, named)), 1, 2, cu_seqlens=3)
    assert seen == [((1, 2), {"cu_seqlens": 3})]


def test_caches_of_a_profiling_run_are_not_held(rig):
    """The next commit finds the layer's new caches."""
    layer = rig.sides[1].layer
    rig.step([4, 4], [3, 1])
    rig.states.forget_caches()
    past, state = layer.kv_cache
    layer.kv_cache = (past, state.clone())
    rig.step([4, 4], [2, 4])
    assert not torch.equal(layer.kv_cache[1], state)


def gated_norm(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """What the layer's gated norm does, without its weights."""
    scaled = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out.copy_(scaled * torch.nn.functional.silu(gate.float()))


def test_the_fused_path_verifies_the_same_way(monkeypatch):
    """After vLLM's own convolution, before the layer's own norm."""
    rig = Rig(GATED_DELTA, torch.float32, monkeypatch)
    ours = rig.sides[1].layer
    ours.enable_fused_gdn_spec_decode = True
    ours._rms_norm_gated_cuda = gated_norm
    ours.norm = SimpleNamespace(norm_before_gate=True, bias=None, group_size=None, activation="")
    rig.states.hook()
    lengths = [4, 1, 3, 4]
    total = sum(lengths)
    mixed = torch.randn(total, ours.channels + 5)[:, : ours.channels].to(rig.dtype)
    b, a = torch.randn(2, total, held.HEADS).to(rig.dtype)
    gate = torch.randn(total, held.HEADS, held.SIZE).to(rig.dtype)
    accepted = torch.ones(4, dtype=torch.int32)
    given = held.metadata(GATED_DELTA, rig.sides[1].table, lengths, accepted)
    rig.states.begin({"it": given})
    out, plain = torch.zeros(2, total, held.HEADS, held.SIZE, dtype=rig.dtype)
    getattr(ours, state_layers.FUSED)(
        mixed_qkv=mixed, b=b, a=a, output_gate=gate, core_attn_out=out, attn_metadata=given
    )
    [layer] = rig.states._verified[0].layers
    staged = layer.rows.corrected.clone()
    query, key, value = ours.rearrange_mixed_qkv(mixed)
    made, _ = layer.verify(
        None, q=query, k=key, v=value, a=a, b=b, cu_seqlens=given.spec_query_start_loc,
        num_accepted_tokens=accepted, initial_state=ours.kv_cache[1],
    )  # fmt: skip
    assert torch.equal(staged, layer.rows.corrected)
    assert staged[:total].any()
    gated_norm(made[0], gate, plain)
    assert torch.equal(out, plain)


def test_layers_without_a_fast_form_keep_the_exact_one(monkeypatch):
    """And its tables; the formula counts each in its own form."""
    rig = Rig(OLMO_DELTA, torch.float32, monkeypatch)
    assert rig.states._replayed == []
    assert rig.states.tables.commits.shape[1]
    fast = Rig(GATED_DELTA, torch.float32, monkeypatch)
    assert not fast.states.tables.commits.shape[1]
    kinds = [(each.sides[1].layer, each.kind) for each in (rig, fast)]
    sizes = (16, 64, 4, 2)
    both = held_states.bytes_by_formula(kinds, *sizes, fast=True)
    [one, other] = (held_states.bytes_by_formula([each], *sizes, fast=True) for each in kinds)
    assert both == one + other
    staged = DeltaRows.row_bytes(KEY_HEADS, held.HEADS, held.SIZE, held.SIZE)
    assert other == 16 * staged + 12 * 64 * 8
    [layer] = fast.states._verified[0].layers
    room = layer.rows
    assert sum(part[0].nbytes for part in (room.key, room.corrected, room.decay)) == staged
    assert room.num_rows == held.REQUESTS * (held.DRAFTS + 1)


@pytest.mark.parametrize("make", [None, held.Captures()], ids=["by layers", "captured"])
def test_both_forms_in_one_engine(make, monkeypatch):
    """A Mamba-2 layer by kvtxn's kernels, an OLMo hybrid's by vLLM's; one step, one commit."""
    fast = Rig(MAMBA2, torch.float32, monkeypatch)
    exact = held.Rig(OLMO_DELTA, torch.float32, monkeypatch)
    layers = {"it": fast.sides[1].layer, "other": exact.sides[1].layer}
    runner = fast.runner
    runner.compilation_config.static_forward_context = layers
    runner.kv_cache_config.kv_cache_groups = [
        SimpleNamespace(layer_names=[name]) for name in layers
    ]
    states = held.HeldStates(runner, make, fast=True)
    states.warm_up()
    states.hook()
    given = {}

    def begin(name, metadata):
        given[name] = metadata["it"]
        states.begin({name: metadata["it"]})

    fast.states = SimpleNamespace(begin=lambda metadata, _: begin("it", metadata))
    exact.states = SimpleNamespace(begin=lambda metadata, _: begin("other", metadata))
    for lengths, sampled in (([4, 1, 3, 2], [3, 1, 2, 1]), ([4, 4, 2, 1], [1, 4, 2, 1])):
        for rig in (fast, exact):
            rows = torch.randn(sum(lengths), rig.sides[0].layer.channels).to(rig.dtype)
            more = torch.randn(sum(lengths), 2, held.HEADS).to(rig.dtype)
            for side in rig.sides:
                rig.forward(side, lengths, rows, more)
        states.begin(given)
        states.commit(torch.tensor(sampled, dtype=torch.int32))
        for rig in (fast, exact):
            rig.accepted[:] = torch.tensor(sampled)
        for request, count in enumerate(sampled):
            fast.compare(request, lengths[request])
            columns = zip(exact.sides, (count - 1, 0), strict=True)
            stock, ours = (side.state(request, column) for side, column in columns)
            assert torch.equal(stock, ours)


def test_a_state_that_the_kernels_do_not_take_stops_the_start(monkeypatch):
    rig = Rig(GATED_DELTA, torch.float32, monkeypatch)
    layer = rig.sides[1].layer
    layer.kv_cache = (layer.kv_cache[0], layer.kv_cache[1].to(torch.float64))
    with pytest.raises(LayerError, match="bfloat16 or float16"):
        rig.states.warm_up()


@pytest.mark.parametrize("fast", [True, False])
def test_seven_drafts_leave_no_column_to_vllms_fused_kernel_alone(monkeypatch, fast):
    """kvtxn's own kernel reads no column of a table; it wants the layer's gated norm."""
    from kvtxn.integrations.vllm_plugin.seam import held_states

    rig = Rig(GATED_DELTA, torch.float32, monkeypatch)
    layer = rig.sides[1].layer
    layer.enable_fused_gdn_spec_decode = True
    methods = {"_forward_core": state_layers.LAUNCHES[GATED_DELTA]["_forward_core"]}
    monkeypatch.setattr(held_states, "LAUNCHES", {GATED_DELTA: methods})
    rig.runner.vllm_config.num_speculative_tokens = 7
    rig.runner.model_config = SimpleNamespace(is_hybrid=True, runner_type="generate")
    rig.runner.model_state = None
    rig.runner.get_model = lambda: SimpleNamespace(modules=lambda: [layer])
    wrong = held_states.launches_differ(rig.runner, fast=fast)
    assert ("_rms_norm_gated_cuda is not there" if fast else "7 drafts") in wrong
    type(layer)._rms_norm_gated_cuda = lambda self, x, output_gate, out: None
    assert (held_states.launches_differ(rig.runner, fast=fast) is None) == fast
    rig.runner.vllm_config.num_speculative_tokens = 16
    wrong = held_states.launches_differ(rig.runner, fast=fast)
    assert wrong == ("kvtxn's kernels of gated delta nets take at most 15 drafts" if fast else None)


def test_the_kernels_take_as_many_rows_as_is_said():
    from kvtxn.integrations.vllm_plugin.seam.held_states import MOST_REPLAYED

    with importing_kernels():
        from kvtxn.backends.gated_delta.launch import MOST_ROWS
    assert MOST_ROWS == MOST_REPLAYED
