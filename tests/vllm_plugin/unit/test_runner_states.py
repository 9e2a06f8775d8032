"""GPU runners with recurrent states: what the hooked classes ask for, commit and undo."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy
import pytest
import torch
from engine_jobs import missing
from held_layers import DRAFTS
from kernels_here import importing_kernels

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

with importing_kernels():
    import held_rig as held
    from kvtxn.integrations.vllm_plugin import runner_parts
    from kvtxn.integrations.vllm_plugin.gpu import states as gpu_states
    from kvtxn.integrations.vllm_plugin.gpu import windows as gpu_windows
    from kvtxn.integrations.vllm_plugin.policy.engine_facts import GATED_DELTA, EngineFacts
    from kvtxn.integrations.vllm_plugin.policy.settings import PluginSettings
    from kvtxn.integrations.vllm_plugin.policy.state_rules import TAKEN
    from kvtxn.integrations.vllm_plugin.runners.hooked_runner import is_hooked
    from kvtxn.integrations.vllm_plugin.seam import held_states as held_states
    from kvtxn.integrations.vllm_plugin.seam.layers import attention_of

    from kvtxn import KVTxnError, LayerRef, TransactionManager, TxnConfig


class ModelState:
    """Stands for vLLM's ``model_state``."""

    def prepare_attn(
        self,
        input_batch,
        cudagraph_mode,
        block_tables,
        slot_mappings,
        attn_groups,
        kv_cache_config,
        for_capture=False,
        ubatch_idx=0,
        model_specific_attn_metadata=None,
    ):
        return input_batch


class Own:
    """Stands for vLLM's runners; its model is one layer."""

    def __init__(self, rig):
        vars(self).update(vars(rig.runner))
        self.rig, self.calls = rig, []
        self.model_config = SimpleNamespace(is_hybrid=True, runner_type="generate")

    def get_model(self):
        return SimpleNamespace(modules=lambda: [self.rig.sides[1].layer])

    def get_kv_cache_spec(self):
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

        states = MambaSpec(
            shapes=((4, 4),), dtypes=(torch.float32,), block_size=64, num_speculative_blocks=3
        )
        rows = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        return {"it": states, "attention": rows}

    def initialize_kv_cache(
        self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None
    ):
        self.calls.append("caches")


class OwnV1(Own):
    """Stands for vLLM's V1 runner."""

    def __init__(self, rig):
        super().__init__(rig)
        self.seq_lens = torch.tensor([40, 30], dtype=torch.int32)
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 4, 6], dtype=torch.int32))

    def _update_states(self, scheduler_output):
        self.calls.append("update")

    def _may_reorder_batch(self, scheduler_output):
        self.calls.append("reorder")

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return None, SimpleNamespace(num_draft_tokens=self.drafts), 5

    def _determine_batch_execution_and_padding(
        self,
        num_tokens,
        num_reqs,
        num_scheduled_tokens_np,
        max_num_scheduled_tokens,
        use_cascade_attn=False,
        allow_microbatching=True,
        force_eager=False,
        force_uniform_decode=None,
        force_has_lora=None,
        force_num_active_loras=None,
        num_encoder_reqs=0,
    ):
        return force_uniform_decode

    def _build_attention_metadata(
        self,
        num_tokens,
        num_reqs,
        max_query_len,
        num_tokens_padded=None,
        num_reqs_padded=None,
        ubatch_slices=None,
        logits_indices=None,
        max_num_sampled_tokens=None,
        use_spec_decode=False,
        for_cudagraph_capture=False,
        num_scheduled_tokens=None,
        slot_mappings=None,
    ):
        return self.made, "common"

    def _sample(self, logits, spec_decode_metadata):
        self.calls.append("sample")
        return SimpleNamespace(sampled_token_ids=logits)

    def begin(self, metadata):
        """Make the metadata of a step."""
        self.made = metadata
        assert self._build_attention_metadata(6, 2, max_query_len=4) == (metadata, "common")

    def sampled(self, counts):
        """Sample so many tokens of each request."""
        ids = torch.where(torch.arange(DRAFTS + 1) < torch.tensor(counts)[:, None], 7, -1)
        assert self._sample(ids, None).sampled_token_ids is ids
        assert self.calls[-1] == "sample"


class OwnV2(Own):
    """Stands for vLLM's V2 runner."""

    def __init__(self, rig):
        super().__init__(rig)
        self.model_state, self.speculator = ModelState(), None

    def prepare_inputs(self, scheduler_output, batch_req_state, batch_desc, num_active_loras):
        """As vLLM's own."""

    def prepare_attn(self, input_batch):
        return input_batch

    def sample(self, hidden_states, input_batch, grammar_output):
        return None

    def postprocess_sampled(
        self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None
    ):
        self.calls.append("postprocess")

    def update_pp_decode_requests(self):
        pass  # one stage

    def begin(self, metadata):
        """Make the metadata of a step."""
        assert self.model_state.prepare_attn(metadata, *[None] * 5) == metadata

    def sampled(self, counts):
        """Sample so many tokens of each request."""
        self.postprocess_sampled(None, None, torch.tensor(counts).int(), None)
        assert self.calls[-1] == "postprocess"


FACTS = EngineFacts(
    device="cuda", runner="v2", recurrent=GATED_DELTA, states="exact", dtype="bfloat16", flash=3
)


RUNNERS = {"v1": OwnV1, "v2": OwnV2}


def part(runner, kind):
    """A hooked runner's part of this kind."""
    [found] = [each for each in runner.kvtxn_parts._parts if isinstance(each, kind)]
    return found


def caches(runner):
    """Its part that holds the states."""
    return part(runner, gpu_states.StateCaches)


def opened_alone(runner, *_):
    """Open steps over one small layer of attention, with the runner's states."""
    ref = LayerRef("rows", *torch.zeros(2, 4, 4, 1, 8))
    manager = TransactionManager([ref], TxnConfig(policy="undo", backend="torch", max_rows=8))
    states, more = caches(runner).hold(manager)
    runner.opened.append(more)
    if isinstance(runner, OwnV1):
        steps = gpu_windows.PackedGraphSteps(manager, DRAFTS + 1, 50, states=states)
    else:
        slots = torch.full((1, 8), -1, dtype=torch.int64)
        steps = gpu_windows.GraphSteps(manager, slots, DRAFTS + 1, states=states)
    caches(runner).join(steps)
    return steps


@pytest.fixture(params=RUNNERS)
def runner(request, monkeypatch):
    """A hooked runner whose attention has no windows."""
    facts = attrs.evolve(FACTS, runner=request.param, unchecked=True)
    rig = held.Rig(GATED_DELTA, torch.float32, monkeypatch)
    rig.sides[1].layer.get_state_dtype = lambda: (torch.bfloat16, torch.float32)
    monkeypatch.setattr(held_states, "LAUNCHES", {GATED_DELTA: {"_forward_core": (
        *("mixed_qkv", "b", "a", "core_attn_out"),
    )}})  # fmt: skip
    for where in (gpu_states, gpu_windows.engine_config):
        monkeypatch.setattr(where, "runner_facts", lambda _: facts)
    monkeypatch.setattr(gpu_windows, "rows_may_wait", lambda _: False)
    own = RUNNERS[request.param](rig)
    wanted = PluginSettings(TxnConfig(policy="undo", max_rows=8), recurrent="exact")
    runner_parts.attach(own, wanted, 0, facts, windows=True)
    assert is_hooked(own)
    own.opened = []
    monkeypatch.setattr(gpu_windows, "open_steps", opened_alone)
    return own


def test_one_block_for_each_state(runner):
    specs = runner.get_kv_cache_spec()
    assert specs["it"].num_speculative_blocks == 0
    assert caches(runner).num_bytes() == held_states.bytes_of_buffers(runner) > 0


def test_the_memory_is_reserved(runner):
    """That of the buffers, beside the rows of attention."""
    row = 2 * 8 * 2
    wanted = runner.kvtxn_parts.memory_wanted()
    assert wanted >= held_states.bytes_of_buffers(runner) + 8 * row
    assert wanted == part(runner, gpu_windows.WindowCaches).memory_wanted()


def test_memory_of_captured_commits_is_reserved(runner):
    """That of the outputs which nobody reads: one for each branch, at most one for each layer."""
    without = held_states.bytes_of_buffers(runner)
    runner.compilation_config.cudagraph_mode.name = "FULL"
    rows, values = held.REQUESTS * (held.DRAFTS + 1), held.HEADS * held.SIZE
    assert held_states.bytes_of_buffers(runner) == without + 2 * rows * values
    [layer] = runner.compilation_config.static_forward_context.values()
    many = [(layer, GATED_DELTA)] * 20
    assert held_states.bytes_of_graphs(runner, many) == 8 * 2 * rows * values


def test_a_model_that_is_not_known_runs_stock(runner, monkeypatch):
    monkeypatch.setattr(held_states, "launches_differ", lambda _, fast: "layer it is another")
    assert runner.get_kv_cache_spec()["it"].num_speculative_blocks == 3
    assert caches(runner).num_bytes() == 0
    with pytest.raises(KVTxnError, match="layer it is another"):
        caches(runner).hold(None)


def test_what_speaks_against_a_model(runner):
    assert held_states.launches_differ(runner) is None
    runner.get_model = lambda: SimpleNamespace(modules=list)
    assert held_states.launches_differ(runner) == "layer it is not the target's"
    runner.model_config.is_hybrid = False
    assert "no layers of attention" in held_states.launches_differ(runner)


@pytest.mark.parametrize("drafts", [6, 7, 8])
def test_drafts_that_the_fused_kernel_leaves_no_column_for(runner, drafts):
    """A table of nine columns is too wide; for more rows vLLM takes its other kernel."""
    runner.rig.sides[1].layer.enable_fused_gdn_spec_decode = True
    runner.vllm_config.num_speculative_tokens = drafts
    wrong = held_states.launches_differ(runner)
    assert (wrong is not None) == (drafts == 7)
    assert wrong is None or "7 drafts" in wrong


def test_a_step_is_noted_and_committed(runner):
    """Also in the caches of vLLM's profiling; the commit comes before what vLLM does then."""
    layer = runner.rig.sides[1].layer
    runner.get_kv_cache_spec()
    runner.initialize_kv_cache(None, is_profiling=True)
    assert "_forward_core" in vars(layer)
    assert runner.kvtxn_states is None
    runner.initialize_kv_cache(None)
    assert runner.opened[0]["states"] == runner.opened[0]["state_blocks"] == 1
    given = held.metadata(
        GATED_DELTA, torch.tensor([[3], [5]]).int(), [4, 2], torch.ones(2, dtype=torch.int32)
    )
    runner.begin({"it": given})
    assert given.spec_state_indices_tensor.shape == (2, held.DRAFTS + 1)
    before = layer.kv_cache[1].clone()
    runner.sampled([2, 1])
    changed = (layer.kv_cache[1] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [3, 5]
    runner.sampled([2, 1])
    runner.kvtxn_undo.close()
    assert "_forward_core" not in vars(layer)
    if isinstance(runner, OwnV2):
        assert type(runner.model_state) is ModelState
    runner.begin({"it": given})
    assert runner.kvtxn_states._step is None


@pytest.mark.parametrize(
    ("computed", "rows", "drafts", "forced"),
    [
        ([9, 9], [4, 4], [3, 3], None),
        ([9, 9], [4, 1], [3, 0], None),
        ([9, 0], [4, 4], [3, 0], False),  # a prompt of as many rows as the other's drafts have
        ([9, 9], [4, 4], [3, 0], False),  # an answer that is computed again, in chunks
        ([0, 4], [4, 1], [0, 0], False),
    ],
)
@pytest.mark.parametrize("runner", ["v1"], indirect=True)
def test_no_step_with_a_prompt_counts_as_one_of_drafts_alone(
    runner, computed, rows, drafts, forced
):
    """vLLM would replay a graph that knows nothing of the prompt; a warm-up decides itself."""
    runner.input_batch = SimpleNamespace(
        num_computed_tokens_cpu=numpy.array(computed), num_prompt_tokens=numpy.array([5, 5])
    )
    runner.drafts, rows = drafts, numpy.array(rows)
    given = {"num_tokens": 8, "num_reqs": 2, "num_scheduled_tokens_np": rows}
    given["max_num_scheduled_tokens"] = 4
    for told, expected in ((None, None), ("states", forced)):
        part(runner, gpu_states.StatesV1).told = told
        assert runner._prepare_inputs(None, rows)[2] == 5
        assert runner._determine_batch_execution_and_padding(**given) is expected
    given["force_uniform_decode"] = True
    assert runner._determine_batch_execution_and_padding(**given) is True


def test_the_setting_chooses_the_kernels(runner):
    """And the memory that is reserved; the log says which."""
    exact = caches(runner).num_bytes()
    runner.get_kv_cache_spec()
    runner.initialize_kv_cache(None)
    runner.kvtxn_settings = attrs.evolve(runner.kvtxn_settings, recurrent="fast")
    fast = caches(runner).num_bytes()
    runner.initialize_kv_cache(None)
    assert [each["recurrent"] for each in runner.opened] == ["exact", "fast"]
    assert "of stock's time" in runner.opened[0]["with_fast"]
    assert "with_fast" not in runner.opened[1]
    assert [each["state_buffer_bytes"] for each in runner.opened] == [exact, fast]
    assert exact != fast
    assert runner.kvtxn_states._replayed is not None
    layer = runner.rig.sides[1].layer
    runner.initialize_kv_cache(None, is_profiling=True)
    assert "_forward_core" in vars(layer)
    runner.kvtxn_undo.close()


def test_auto_is_exact_where_its_rule_takes_it(runner, monkeypatch):
    """With stock's kernels and one state per request; the log says why. Else nothing is hooked."""
    taken = attrs.evolve(EngineFacts(flash=3), **TAKEN)
    runner.kvtxn_settings = attrs.evolve(runner.kvtxn_settings, recurrent="auto")
    for facts, blocks in ((attrs.evolve(taken, gain=1.2), 3), (taken, 0)):
        caches(runner)._decided = False
        monkeypatch.setattr(gpu_states, "runner_facts", lambda _, facts=facts: facts)
        assert runner.get_kv_cache_spec()["it"].num_speculative_blocks == blocks
        assert (caches(runner).num_bytes() > 0) == (blocks == 0)
    runner.initialize_kv_cache(None)
    [told] = runner.opened
    assert told["recurrent"] == "exact"
    assert told["recurrent_why"].startswith('"auto" takes "exact": 2.09 times as many requests')
    assert "of stock's time" in told["with_fast"]
    assert runner.kvtxn_states._replayed == []
    runner.kvtxn_undo.close()


@pytest.mark.parametrize(("attention", "one_state"), [("FLASH_ATTN", True), ("TREE_ATTN", False)])
def test_the_attention_is_known_before_the_caches(runner, monkeypatch, attention, one_state):
    """An attention backend that kvtxn does not know leaves the engine to stock, which then runs."""
    monkeypatch.setattr(gpu_states, "attention_of", lambda *_: attention)
    specs = runner.get_kv_cache_spec()
    assert (specs["it"].num_speculative_blocks == 0) == one_state
    runner.opened = []
    monkeypatch.setattr(gpu_windows, "open_steps", lambda *_: None)
    if not one_state:
        runner.initialize_kv_cache(None)
        assert runner.kvtxn_states is None


def test_of_layers_that_differ_an_unknown_attention_counts(monkeypatch):
    """It is read from the loaded model's layers of attention; a drafter's are left out."""
    from vllm.model_executor.layers.attention import Attention

    def layer(name):
        found = Attention.__new__(Attention)
        vars(found)["get_attn_backend"] = lambda: SimpleNamespace(get_name=lambda: name)
        return found

    layers = {"a": layer("FLASH_ATTN"), "b": layer("TREE_ATTN"), "c": layer("UNKNOWN"), "d": 1}
    own = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculator=SimpleNamespace(draft_attn_layer_names={"c"}),
    )
    assert attention_of(own, "cuda") == "TREE_ATTN"
    layers.pop("b")
    assert attention_of(own, "cuda") == "FLASH_ATTN"
    layers.clear()
    assert attention_of(own, "cuda") is None


def test_an_engine_without_steps_does_not_start(runner, monkeypatch):
    runner.get_kv_cache_spec()
    monkeypatch.setattr(gpu_windows, "open_steps", lambda *_: None)
    with pytest.raises(KVTxnError, match="the caches have one state per request"):
        runner.initialize_kv_cache(None)


@pytest.mark.parametrize("switched_off", [False, True])
def test_states_are_committed_by_windows_alone(runner, switched_off):
    """Also by the steps of a runner whose windows are switched off for a while, and once."""
    runner.get_kv_cache_spec()
    runner.initialize_kv_cache(None)
    steps, layer = runner.kvtxn, runner.rig.sides[1].layer
    if switched_off:
        runner.kvtxn = None
    given = held.metadata(
        GATED_DELTA, torch.tensor([[3], [5]]).int(), [4, 2], torch.ones(2, dtype=torch.int32)
    )
    for number in (1, 2):
        before = layer.kv_cache[1].clone()
        runner.begin({"it": given})
        runner.sampled([2, 1])
        changed = (layer.kv_cache[1] != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [3, 5]
        assert steps.manager.snapshot()["kvtxn_windows_total_committed"] == number
    runner.kvtxn_undo.close()


@pytest.mark.parametrize("runner", ["v2"], indirect=True)
def test_a_connector_finds_rows_and_states_committed(runner):
    """It may read both once the scheduler has the sampled tokens."""
    runner.get_kv_cache_spec()
    runner.initialize_kv_cache(None)
    rows = part(runner, gpu_windows.WindowsV2)
    rows.connected = True
    given = held.metadata(
        GATED_DELTA, torch.tensor([[3], [5]]).int(), [4, 2], torch.ones(2, dtype=torch.int32)
    )
    runner.begin({"it": given})
    counts = torch.tensor([2, 1]).int()
    rows.sampled(None, counts)
    assert not runner.kvtxn_states.waits
    runner.postprocess_sampled(None, None, counts, None)
    assert runner.kvtxn.manager.snapshot()["kvtxn_windows_total_committed"] == 1
    runner.kvtxn_undo.close()
