"""Settings that do not fit the engine: plug-in and doctor refuse them, in the same words."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import model_files
import pytest
import torch
from engine_jobs import missing
from kvtxn.backends.torch_executor import TorchExecutor
from kvtxn.integrations.vllm_plugin import plugin as vllm_plugin
from kvtxn.integrations.vllm_plugin.policy.doctor import bounded, check_fit, report
from kvtxn.integrations.vllm_plugin.policy.engine_facts import (
    GATED_DELTA,
    MAMBA2,
    OLMO_DELTA,
    SHORT_CONV,
    EngineFacts,
)
from kvtxn.integrations.vllm_plugin.policy.rules import decide
from kvtxn.integrations.vllm_plugin.policy.settings import settings
from kvtxn.integrations.vllm_plugin.seam import workers
from worker_rig import Runner, wrapper

from kvtxn import BackendUnavailableError, ConfigError, registry
from kvtxn.executor import Capabilities

PLAIN = EngineFacts()
EXACT = {"policy": "auto", "recurrent": "exact"}
FAST = {"policy": "auto", "recurrent": "fast"}
STATES = EngineFacts(recurrent=GATED_DELTA, states="exact", dtype="bfloat16")

real_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def engine(asked, drafts=4, requests=8):
    """A configuration of vLLM's, as far as settings are compared with it."""
    speculation = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return SimpleNamespace(
        additional_config={"kvtxn": asked},
        speculative_config=speculation,
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )


def refused(asked, facts=PLAIN, **changes):
    """Check settings as plug-in and doctor do; returns the sentence of the refusal, or None."""
    config = engine(asked, **changes)
    try:
        check_fit(settings(config.additional_config, 1, facts.device), facts, config)
    except ConfigError as error:
        return str(error)
    return None


# -- max_rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", ["auto", "deferred", "undo", "direct"])
@pytest.mark.parametrize(("max_rows", "drafts"), [(1, 4), (4, 4), (1, 1)])
def test_fewer_rows_than_one_request_has(device, policy, max_rows, drafts):
    """No step could ever have a window, whatever the log says at the start."""
    facts = EngineFacts(device=device)
    says = refused({"policy": policy, "max_rows": max_rows}, facts, drafts=drafts)
    assert says is not None
    assert says.startswith(f"additional_config['kvtxn']: max_rows={max_rows} leaves no room")
    assert f"expected at least {drafts + 1} ({drafts} drafts, " in says
    assert refused({"policy": policy, "max_rows": drafts + 1}, facts, drafts=drafts) is None


def test_rows_that_are_compared_with_nothing():
    """Without drafts no window opens anyway; of an unknown release nothing is read."""
    assert refused({"policy": "auto"}) is None
    assert refused({"policy": "auto", "max_rows": 1}, drafts=0) is None
    config = SimpleNamespace(additional_config={"kvtxn": {"policy": "auto", "max_rows": 1}})
    wanted = settings(config.additional_config, 1, "cpu")
    check_fit(wanted, EngineFacts(version="0.1.0"), config)
    check_fit(None, EngineFacts(), config)


@pytest.mark.parametrize(("asked", "drafts", "rows"), [(2**31 - 1, 4, 40), (7, 4, 7), (99, 0, 99)])
def test_more_rows_than_a_step_has(asked, drafts, rows):
    """Buffers are sized by what a step can have, not by a number that nothing reaches."""
    given = {"policy": "undo", "max_rows": asked}
    wanted = settings({"kvtxn": given}, 1, "cpu")
    assert wanted is not None
    assert bounded(wanted, engine(given, drafts=drafts)).txn.max_rows == rows


# -- what the device cannot do ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"backend": "triton"}, "'triton' cannot run on cpu: Triton compiles for GPUs only"),
        ({"backend": "cudagraph"}, "'cudagraph' cannot run on cpu"),
        ({"acceptance": "graph"}, "acceptance='graph' needs a CUDA device, not cpu"),
    ],
)
def test_a_setting_that_cannot_work_on_this_device(asked, says):
    """It is refused before the engine starts, in the same words wherever it is read."""
    with pytest.raises(BackendUnavailableError) as caught:
        settings({"kvtxn": {"policy": "undo", **asked}}, 8, "cpu")
    assert str(caught.value).startswith(f"additional_config['kvtxn']: {says}")
    assert "use " in caught.value.hint


def test_a_backend_that_cannot_do_the_policy():
    """A third party's, whose executor says so."""

    class NoUndo(TorchExecutor):
        name = "fitting-test"
        capabilities = Capabilities(policies=frozenset({"direct"}))

    registry.register("fitting-test", NoUndo)
    try:
        assert settings({"kvtxn": {"policy": "direct", "backend": "fitting-test"}}, 8, "cpu")
        with pytest.raises(BackendUnavailableError, match=r"kvtxn.*cannot carry out policy 'undo'"):
            settings({"kvtxn": {"policy": "undo", "backend": "fitting-test"}}, 8, "cpu")
    finally:
        registry.unregister("fitting-test")


def test_asking_initialises_no_gpu(monkeypatch):
    """vLLM forks workers from the process that checks the settings first."""
    monkeypatch.setattr(registry, "resolve", None)
    assert not torch.cuda.is_initialized()
    assert settings({"kvtxn": {"policy": "undo", "backend": "triton"}}, 8, "cuda") is not None


# -- the same sentence everywhere -------------------------------------------------------------

REFUSED = {
    "rows": {"policy": "undo", "max_rows": 1},
    "required": {"policy": "auto", "max_rows": 1, "required": True},
    "backend": {"policy": "undo", "backend": "triton"},
    "acceptance": {"policy": "deferred", "acceptance": "graph"},
    "states": EXACT,
    "null": None,
}


@pytest.mark.parametrize("asked", REFUSED.values(), ids=REFUSED)
@real_vllm
def test_the_doctor_says_what_the_engine_says(tmp_path, asked):
    """Before the engine, in a worker, and in the doctor."""
    given = wrapper({"policy": "undo"})
    given.vllm_config.additional_config = {"kvtxn": asked}
    given.vllm_config.model_config.hf_text_config = SimpleNamespace(model_type="llama")
    with pytest.raises((ConfigError, BackendUnavailableError)) as before:
        vllm_plugin._before_engine(given.vllm_config)
    with pytest.raises((ConfigError, BackendUnavailableError)) as worker:
        vllm_plugin._on_worker(given)
    vllm_plugin.unregister()
    args = {
        "model": model_files.write("llama", tmp_path), "skip_tokenizer_init": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }  # fmt: skip
    assert report(args)
    with pytest.raises((ConfigError, BackendUnavailableError)) as doctor:
        report({**args, "additional_config": {"kvtxn": asked}})
    assert str(before.value) == str(worker.value) == str(doctor.value)
    assert str(doctor.value).startswith("additional_config['kvtxn']: ")
    assert type(given.worker.model_runner) is Runner
    assert workers.device_type() == "cpu"


# -- recurrent states -------------------------------------------------------------------------


def test_a_model_without_states_refuses_the_setting():
    assert "the model has no recurrent layers; got 'exact'" in str(refused(EXACT))
    assert refused(EXACT, STATES) is None
    assert refused(EXACT, EngineFacts(version="0.1.0")) is None  # nothing is known of its models


@pytest.mark.parametrize("kind", [OLMO_DELTA, SHORT_CONV])
def test_layers_without_fast_kernels_refuse_fast(kind):
    """In a sentence that names them; gated delta nets and Mamba-2 layers take it."""
    on_gpu = attrs.evolve(STATES, device="cuda", runner="v2", states="fast")
    for known in (GATED_DELTA, MAMBA2):
        assert refused(FAST, attrs.evolve(on_gpu, recurrent=known)) is None
    facts = attrs.evolve(on_gpu, recurrent=kind)
    assert f"none for {kind}; got 'fast'; use \"exact\"" in str(refused(FAST, facts))
    off = decide("auto", facts)
    assert off.policy == "off"
    assert f"none for {kind}" in off.reason
