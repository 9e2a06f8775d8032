"""Recurrent states in the plug-in: hooks and their undoing; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from engine_jobs import missing
from kvtxn.integrations.vllm_plugin import runner_parts
from kvtxn.integrations.vllm_plugin.cpu import states, windows
from kvtxn.integrations.vllm_plugin.policy.engine_facts import (
    GATED_DELTA,
    EngineFacts,
)
from kvtxn.integrations.vllm_plugin.policy.settings import settings
from kvtxn.integrations.vllm_plugin.runners.hooked_runner import unhook_runner
from kvtxn.integrations.vllm_plugin.seam import batches, cpu_states, state_layers

from kvtxn import KVTxnError

EXACT = {"kvtxn": {"policy": "auto", "recurrent": "exact"}}
FAST = {"kvtxn": {"policy": "auto", "recurrent": "fast"}}
ON_GPU = {"device": "cuda", "runner": "v2"}
ENGINE = EngineFacts(recurrent=GATED_DELTA, states="exact", dtype="bfloat16")

real_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


# -- hooks ----------------------------------------------------------------------------


@real_vllm
def test_the_operator_is_vllms_own_again():
    """Two engines in a process hook it once; the second undo gives it back."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    own, name = getattr(module, gdn_core()), gdn_core()
    assert cpu_states.core_differs() is None
    first = cpu_states.hook_core()
    hooked = getattr(module, name)
    assert hooked is not own
    assert cpu_states.core_differs() is None  # for a second engine it looks the same
    second = cpu_states.hook_core()
    assert getattr(module, name) is hooked
    first()
    assert getattr(module, name) is hooked
    second()
    assert getattr(module, name) is own


def gdn_core() -> str:
    """The name of vLLM's function."""
    return cpu_states.CORE


@real_vllm
def test_layers_without_a_hook_and_steps_without_drafts_run_vllms_own():
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as module

    calls = []

    def own(*given: object) -> None:
        calls.append(given)

    with mock.patch.object(module, gdn_core(), own):
        undo = cpu_states.hook_core()
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
        assert gdn_core() in str(cpu_states.core_differs())


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


@pytest.mark.parametrize("blocks", [0, 1])
def test_states_in_the_middle_of_prompts_are_told(blocks):
    """By the spec that the layer gives: a release without the field leaves none."""
    layer, asked = QwenGatedDeltaNetAttention(), []
    spec = SimpleNamespace(num_prefill_checkpoint_blocks=blocks)
    layer.get_kv_cache_spec = lambda config: asked.append(config) or spec
    runner = runner_with(gated=layer, other=SimpleNamespace())
    runner.vllm_config = "the configuration"
    assert state_layers.leaves_inner_states(runner) == bool(blocks)
    assert asked == ["the configuration"]
    layer.get_kv_cache_spec = lambda config: object()
    assert not state_layers.leaves_inner_states(runner)


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
    monkeypatch.setattr(batches, "V1_METHODS", {})
    own = attrs.evolve(facts, device="cpu", runner="v1")
    runner_parts.attach(runner, settings(EXACT, 1, "cpu"), 0, own, windows=True)
    monkeypatch.setattr(states, "runner_facts", lambda runner: facts)
    monkeypatch.setattr(windows, "open_steps", lambda *_: None)
    return runner


@real_vllm
def test_without_steps_an_engine_with_one_state_does_not_start(monkeypatch):
    """Stock cannot run over such caches; caches that vLLM makes to measure memory need no steps."""
    runner = hooked(monkeypatch, ENGINE)
    assert runner.get_kv_cache_spec() == {"num_spec": 0}
    runner.initialize_kv_cache("measured", is_profiling=True)
    with pytest.raises(KVTxnError, match="the caches have one state per request, but kvtxn has no"):
        runner.initialize_kv_cache("real")
    assert runner.caches == ["measured", "real"]
    unhook_runner(runner)
    assert type(runner) is Own
    assert runner.gated.num_spec == 4


@real_vllm
@pytest.mark.parametrize("why", [{"cached_states": True}, {"states": "off"}])
def test_an_engine_that_kvtxn_stays_out_of_keeps_its_caches(monkeypatch, why):
    runner = hooked(monkeypatch, attrs.evolve(ENGINE, **why))
    assert runner.get_kv_cache_spec() == {"num_spec": 4}
    runner.initialize_kv_cache("real")
    assert not runner.kvtxn_one_state
