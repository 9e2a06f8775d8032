"""Recurrent states in the plug-in: settings, decisions, hooks and their undoing; no engine."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import model_files
import pytest
import torch
from engine_jobs import missing
from kvtxn.integrations.serving.state_steps import StateSteps
from kvtxn.integrations.vllm_plugin import runner as runner_module
from kvtxn.integrations.vllm_plugin.attach import swap_class
from kvtxn.integrations.vllm_plugin.cpu import lent_rows, runner_states
from kvtxn.integrations.vllm_plugin.internals import gated_delta, state_layers
from kvtxn.integrations.vllm_plugin.internals.layers import TargetLayer
from kvtxn.integrations.vllm_plugin.policy import doctor, supported
from kvtxn.integrations.vllm_plugin.policy.doctor import report
from kvtxn.integrations.vllm_plugin.policy.engine import (
    GATED_DELTA,
    MAMBA2,
    OTHER_STATES,
    EngineFacts,
)
from kvtxn.integrations.vllm_plugin.policy.matrix import matrix
from kvtxn.integrations.vllm_plugin.policy.rules import decide
from kvtxn.integrations.vllm_plugin.settings import asked_states, settings

from kvtxn import ConfigError, KVTxnError, LayerError, LayerRef, TransactionManager, TxnConfig
from kvtxn.states import WindowState

EXACT = {"kvtxn": {"policy": "auto", "recurrent": "exact"}}
FAST = {"kvtxn": {"policy": "auto", "recurrent": "fast"}}
ON_GPU = {"device": "cuda", "runner": "v2"}
ENGINE = EngineFacts(recurrent=GATED_DELTA, states="exact", dtype="bfloat16")

real_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


# -- settings and decisions -----------------------------------------------------------


def test_the_setting_is_off_unless_it_is_given():
    for given, states in ((EXACT, "exact"), ({"kvtxn": {"policy": "auto"}}, "off")):
        found = settings(given, 8, "cpu")
        assert found is not None
        assert found.recurrent == asked_states(given) == states
    assert asked_states(None) == asked_states({"kvtxn": {"recurrent": "nope"}}) == "off"


@pytest.mark.parametrize(
    ("given", "device", "says"),
    [
        ({"policy": "auto", "recurrent": "bits"}, "cpu", "one of 'off', 'exact', 'fast'"),
        ({"policy": "auto", "recurrent": "fast"}, "cpu", "vLLM's own operator is exact there"),
        ({"policy": "auto", "recurrent": "exact"}, "xpu", "on CPUs and GPUs only"),
        ({"policy": "auto", "recurrent": "fast"}, "cpu", 'has no faster one.*; use "exact"'),
        ({"policy": "auto", "recurrent": "fast"}, "xpu", "on CPUs and GPUs only"),
        ({"audit": "ledger", "recurrent": "exact"}, "cpu", "without a policy: no window"),
    ],
)
def test_a_value_without_effect_is_refused(given, device, says):
    with pytest.raises(ConfigError, match=says):
        settings({"kvtxn": given}, 8, device)


def test_states_are_held_under_deferred_alone():
    """The attention beside them is vLLM's own, so that no rounding speaks against "auto"."""
    auto, named = decide("auto", ENGINE), decide("deferred", ENGINE)
    assert auto.policy == named.policy == "deferred"
    assert "cannot be taken back to the middle of a window" in auto.reason
    for asked in ("undo", "direct"):
        off = decide(asked, ENGINE)
        assert off.policy == "off"
        assert off.reason.startswith(f"policy '{asked}' cannot work here: a recurrent state")


def test_what_rules_deferred_out_leaves_nothing_else():
    """Policy "auto" does not take ``undo`` over states if rows cannot wait."""
    shared = attrs.evolve(ENGINE, kv_sharing=True)
    for asked in ("auto", "deferred", "undo"):
        assert decide(asked, shared).policy == "off"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"states": "off"}, 'the settings lack "recurrent": "exact"'),
        ({"recurrent": OTHER_STATES}, "of no other recurrent layers"),
        ({**ON_GPU, "states": "off"}, 'the settings lack "recurrent": "exact"'),
        ({"states": "fast"}, 'set "recurrent" to "exact"'),
        ({**ON_GPU, "runner": "v1"}, "V2 model runner alone"),
        ({**ON_GPU, "cached_states": True}, "set enable_prefix_caching to False"),
        ({**ON_GPU, "tensor_parallel": 2}, "under tensor parallelism"),
        ({**ON_GPU, "pipeline_parallel": 2}, "under pipeline parallelism"),
        ({**ON_GPU, "recurrent": OTHER_STATES}, "of no other recurrent layers"),
        ({**ON_GPU, "dtype": "float16"}, "not checked with recurrent states of a float16 model"),
        ({"cached_states": True}, "set enable_prefix_caching to False"),
        ({"state_dtype": "bfloat16"}, "not checked with bfloat16 states"),
        ({"version": "0.31.0"}, "supported: 0.32.0"),
    ],
)
def test_other_engines_with_states_stay_stock_with_a_reason(changes, says):
    off = decide("auto", attrs.evolve(ENGINE, **changes))
    assert off.policy == "off"
    assert says in off.reason


@pytest.mark.parametrize(("changes", "names"), [({}, "0.30.9"), (ON_GPU, "0.31.9")])
def test_releases_for_states_are_those_of_the_device(monkeypatch, changes, names):
    monkeypatch.setattr(supported, "STATE_RELEASES", ("0.30.9",))
    monkeypatch.setattr(supported, "GPU_STATE_RELEASES", ("0.31.9",))
    off = decide("auto", attrs.evolve(ENGINE, **changes))
    assert off.policy == "off"
    assert off.reason.endswith(f"supported: {names}")


def test_a_dtype_of_states_that_is_not_known_yet_has_no_name():
    """Before the model is loaded; no reason of any rule names a fact that is missing."""
    for device in ("cpu", "cuda"):
        for row in matrix(EngineFacts(device=device, runner="v2" if device == "cuda" else "v1")):
            assert "None" not in str(row)


@real_vllm
@pytest.mark.parametrize(
    ("kvtxn", "says"),
    [
        ({"policy": "auto", "recurrent": "exact"}, "auto -> deferred (a recurrent state cannot be"),
        ({"policy": "auto"}, "auto -> off (the model has recurrent states, and the settings lack"),
    ],
)
def test_the_doctor_judges_a_model_with_states(tmp_path, kvtxn, says):
    """As the plug-in will, from the model's files and the user's settings."""
    options = {"dtype": "bfloat16", "enable_prefix_caching": False, "skip_tokenizer_init": True}
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    found = report(
        {
            "model": model_files.write("qwen3next", tmp_path),
            "speculative_config": speculation,
            "additional_config": {"kvtxn": kvtxn},
            **options,
        }
    )
    assert found["policies"][0].startswith(says)
    assert found["asked"][0].startswith(f"policy {says}")


@pytest.mark.parametrize(
    ("asked", "kind", "says"),
    [
        ("exact", GATED_DELTA, 'to the bit; with "fast" kvtxn\'s kernels verify and commit'),
        ("fast", GATED_DELTA, "kvtxn's kernels verify and commit gated delta nets"),
        ("exact", MAMBA2, "states and tokens are stock's to the bit"),
    ],
)
def test_the_doctor_says_what_the_setting_does(asked, kind, says):
    """And what the other one would bring, where there is one."""
    facts = attrs.evolve(ENGINE, **ON_GPU, flash=3, states=asked, recurrent=kind)
    wanted = settings({"kvtxn": {"policy": "auto", "recurrent": asked}}, 8, "cuda")
    policy, recurrent = doctor._outcomes(wanted, facts, None)
    assert policy.found == "deferred"
    assert str(recurrent).startswith(f"recurrent {asked} -> {asked} (")
    assert says in str(recurrent)
    assert ('with "fast"' in str(recurrent)) == ((asked, kind) == ("exact", GATED_DELTA))
    assert not recurrent.lacks


def test_on_a_gpu_states_go_with_every_policy():
    """The states are read alone until the commit, so the rows of attention may be undone."""
    engine = attrs.evolve(ENGINE, **ON_GPU, flash=3)
    for asked, policy in (("auto", "deferred"), ("undo", "undo"), ("deferred", "deferred")):
        assert decide(asked, engine).policy == policy
        assert decide(asked, attrs.evolve(engine, states="fast")).policy == policy
    other = attrs.evolve(engine, attention="FLASHINFER", flash=None)
    assert decide("auto", other).policy == "undo"


def test_the_matrix_names_both_kinds_of_states():
    lines = [str(row) for row in matrix(EngineFacts())]
    held = [line for line in lines if ": deferred (a recurrent state" in line]
    for family in ("Qwen3-Next, Qwen3.5", "Nemotron-H, Granite 4, Falcon-H1, Mamba-2", "LFM2"):
        mine = [line for line in held if f'{family} with "recurrent": "exact"' in line]
        assert mine
        assert all(line.endswith("; seen running") for line in mine if "bfloat16" in line)
    assert any("Jamba, OLMo hybrid" in line and ": off (kvtxn knows" in line for line in lines)


# -- hooks ----------------------------------------------------------------------------


@real_vllm
def test_the_operator_is_vllms_own_again():
    """Two engines in a process hook it once; the second undo gives it back."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    own, name = getattr(module, gdn_core()), gdn_core()
    assert gated_delta.core_differs() is None
    first = gated_delta.hook_core()
    hooked = getattr(module, name)
    assert hooked is not own
    assert gated_delta.core_differs() is None  # for a second engine it looks the same
    second = gated_delta.hook_core()
    assert getattr(module, name) is hooked
    first()
    assert getattr(module, name) is hooked
    second()
    assert getattr(module, name) is own


def gdn_core() -> str:
    """The name of vLLM's function."""
    return gated_delta.CORE


@real_vllm
def test_layers_without_a_hook_and_steps_without_drafts_run_vllms_own():
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    calls = []

    def own(*given: object) -> None:
        calls.append(given)

    with mock.patch.object(module, gdn_core(), own):
        undo = gated_delta.hook_core()
        hooked = getattr(module, gdn_core())
        drafts, none = (SimpleNamespace(spec_sequence_masks=mask) for mask in (1, None))
        for layer, found in ((object(), drafts), (SimpleNamespace(kvtxn=print), none)):
            hooked(layer, found, *"abcd")
            assert calls.pop() == (layer, found, *"abcd")
        undo()
        assert getattr(module, gdn_core()) is own


@real_vllm
@pytest.mark.parametrize("other", [None, lambda layer, metadata: None])
def test_another_operator_is_refused_in_a_sentence(other):
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    with mock.patch.object(module, gdn_core(), other):
        assert gdn_core() in str(gated_delta.core_differs())


class QwenGatedDeltaNetAttention:
    """Stands for vLLM's layer, which is known by this name."""

    num_spec = 4

    def get_state_dtype(self):
        return torch.bfloat16, torch.float32


def runner_with(**layers):
    """A model runner with these layers."""
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_one_state_is_held_and_given_back():
    layer, other = QwenGatedDeltaNetAttention(), SimpleNamespace(num_spec=4)
    runner = runner_with(gated=layer, other=other)
    undo = state_layers.hold_one_state(runner)
    assert (layer.num_spec, other.num_spec) == (0, 4)
    undo()
    assert layer.num_spec == 4
    assert state_layers.state_dtype(runner) == "float32"
    assert state_layers.state_dtype(runner_with()) == "float32"


@real_vllm
def test_specs_of_states_ask_for_one_block():
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=64, shapes=((3, 8), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32),
        num_speculative_blocks=4,
    )  # fmt: skip
    rows = object()
    found = state_layers.one_block_each({"state": spec, "rows": rows})
    assert found["state"].num_speculative_blocks == 0
    assert found["rows"] is rows
    assert spec.num_speculative_blocks == 4


class Own:
    """Stands for vLLM's runner with one gated delta net."""

    def __init__(self) -> None:
        self.gated = QwenGatedDeltaNetAttention()
        layers = {"gated": self.gated}
        self.compilation_config = SimpleNamespace(static_forward_context=layers)
        self.caches: list[object] = []

    def get_kv_cache_spec(self):
        return {"num_spec": self.gated.num_spec}

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False):
        self.caches.append(kv_cache_config)


def hooked(monkeypatch, facts):
    """A runner that became one of ours, in an engine of these facts, whose steps are refused."""
    runner = Own()
    swap_class(runner, runner_states.StateRunnerV1)
    ours: Any = runner
    ours.kvtxn_config = TxnConfig(policy="auto")
    ours.kvtxn_undo, ours.kvtxn_unhook = ExitStack(), ExitStack()
    monkeypatch.setattr(runner_states, "runner_facts", lambda runner: facts)
    monkeypatch.setattr(runner_module, "open_steps", lambda runner: None)
    return ours


@real_vllm
def test_without_steps_an_engine_with_one_state_does_not_start(monkeypatch):
    """Stock cannot run over such caches; caches that vLLM makes to measure memory need no steps."""
    runner = hooked(monkeypatch, ENGINE)
    assert runner.get_kv_cache_spec() == {"num_spec": 0}
    runner.initialize_kv_cache("measured", is_profiling=True)
    with pytest.raises(KVTxnError, match="the caches have one state per request, but kvtxn has no"):
        runner.initialize_kv_cache("real")
    assert runner.caches == ["measured", "real"]
    runner.kvtxn_unhook.close()
    assert runner.gated.num_spec == 4


@real_vllm
@pytest.mark.parametrize("why", [{"cached_states": True}, {"states": "off"}])
def test_an_engine_that_kvtxn_stays_out_of_keeps_its_caches(monkeypatch, why):
    runner = hooked(monkeypatch, attrs.evolve(ENGINE, **why))
    assert runner.get_kv_cache_spec() == {"num_spec": 4}
    runner.initialize_kv_cache("real")
    assert not runner.kvtxn_one_state


# -- rows that are lent ---------------------------------------------------------------


class Attention:
    """Stands for vLLM's attention: writes rows, and says what the cache holds while it attends."""

    def __init__(self) -> None:
        self.seen = None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        for part, rows in zip(kv_cache, (key, value), strict=True):
            part.view(-1, 1, 2)[slot_mapping] = rows

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):  # fmt: skip
        if self.seen == "fail":
            raise RuntimeError("a test made this fail")
        self.seen = kv_cache.clone()
        return output


class Lending:
    """One hooked attention, in a step with a row of a prompt and two drafts."""

    SLOTS = torch.tensor([2, 5, 6])

    def __init__(self) -> None:
        self.cache = torch.randn(2, 4, 4, 1, 2)
        self.before = self.cache.clone()
        ref = LayerRef("attn", *self.cache, group="rows")
        self.manager = TransactionManager([ref], TxnConfig(policy="deferred", max_rows=4))
        self.steps = StateSteps(self.manager, 50)
        self.impl = Attention()
        shape = {"row_shape": (1, 2), "dtype": torch.float32}
        self.layers = [TargetLayer("attn", "rows", None, self.impl, self.cache[0], **shape)]
        lent_rows.hook_attention(self.steps, self.layers)
        self.steps.plan(lambda: ([2], [3]))
        self.steps.begin(lambda: {"rows": self.SLOTS})
        self.rows = torch.randn(2, 3, 1, 2)

    def attend(self):
        """Write and attend, as vLLM does for each layer."""
        key, value = self.rows
        self.impl.do_kv_cache_update(None, key, value, self.cache, self.SLOTS)
        return self.impl.forward(None, None, key, value, self.cache, None, "attended")

    def expected(self, rows):
        """The caches with these rows written."""
        cache = self.before.clone()
        for part, written in zip(cache, self.rows, strict=True):
            part.view(-1, 1, 2)[self.SLOTS[rows]] = written[rows]
        return cache


def test_drafts_lie_in_their_slots_for_one_call():
    """The attention sees all rows; afterwards the drafts are gone, and the commit brings one."""
    lending = Lending()
    assert lending.attend() == "attended"
    assert torch.equal(lending.impl.seen, lending.expected([0, 1, 2]))
    assert torch.equal(lending.cache, lending.expected([0]))
    lending.steps.commit(lambda: torch.tensor([[7, 7, -1]]))
    assert torch.equal(lending.cache, lending.expected([0, 1]))


def test_drafts_leave_their_slots_even_if_the_attention_fails():
    lending = Lending()
    lending.impl.seen = "fail"
    with pytest.raises(RuntimeError, match="a test made this fail"):
        lending.attend()
    assert torch.equal(lending.cache, lending.expected([0]))


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_failure_while_lending_leaves_the_rows_written(what):
    """The step falls back: rows stay where vLLM has written them, as without kvtxn."""
    lending = Lending()
    with mock.patch.object(lent_rows, what, side_effect=RuntimeError("a test made this fail")):
        lending.attend()
    assert torch.equal(lending.impl.seen, lending.expected([0, 1, 2]))
    assert torch.equal(lending.cache, lending.expected([0, 1, 2]))
    window = lending.steps.window
    assert window is not None
    assert window.state is WindowState.DIRECT
    lending.steps.commit(lambda: torch.tensor([[7, 7, -1]]))
    reason = {"read": "stage", "write": "attend"}[what]
    assert lending.manager.snapshot()[f"kvtxn_fallbacks_total_{reason}"] == 1


def test_without_a_window_vllm_writes_and_attends():
    lending = Lending()
    lending.steps.abandon()
    lending.attend()
    assert torch.equal(lending.cache, lending.expected([0, 1, 2]))


def test_the_attention_is_vllms_own_again():
    lending = Lending()
    lent_rows.unhook_attention(lending.layers)
    assert type(lending.impl) is Attention
    assert set(vars(lending.impl)) == {"seen"}
    lent_rows.unhook_attention(lending.layers)


def test_latent_rows_are_not_lent():
    layer = TargetLayer("mla", "rows", None, Attention(), torch.zeros(1), (4,), torch.float32)
    with pytest.raises(LayerError, match="attention of 'mla' is unknown: its rows are latent"):
        lent_rows.hook_attention(Lending().steps, [layer])
