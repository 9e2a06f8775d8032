"""The doctor foresees of recurrent layers on a GPU what a loaded model would tell."""

from __future__ import annotations

from types import SimpleNamespace as Made

import mixer_models
import model_files
import pytest
from engine_jobs import missing
from invented_releases import invented  # noqa: F401
from kvtxn.integrations.vllm_plugin.policy.decision import WITHOUT_STAGES
from kvtxn.integrations.vllm_plugin.policy.rules import decide
from kvtxn.integrations.vllm_plugin.seam import backends, workers
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("invented")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}


@pytest.fixture
def foreseen(tmp_path, monkeypatch):
    """Expected facts of an engine on a GPU of some capability, with some release."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(backends, "flash_version", lambda named=None: 3)

    def facts(
        model="qwen3next", version=WITHOUT_STAGES, capability=(9, 0), states="exact", **options
    ):
        monkeypatch.setattr(workers, "version", lambda: version)
        monkeypatch.setattr(engine_config.workers, "version", lambda: version)
        changes, device = options.pop("changes", None), options.pop("device", "cuda")
        writer = mixer_models if model == "nemotron_h" else model_files
        given = {"kvtxn": {"policy": "auto", "recurrent": states}}
        config = engine_config.config_from(
            {
                **{"model": writer.write(model, tmp_path), "dtype": "bfloat16"},
                **{"skip_tokenizer_init": True, "speculative_config": NGRAM},
                "additional_config": given | options.pop("additional_config", {}),
                **options,
            }
        )
        config.device_config.device_type = device
        if changes is not None:
            changes(config)
        found = Made(major=capability[0], minor=capability[1])
        with monkeypatch.context() as patched:  # not while vLLM imports models, which ask for it
            here = type(current_platform)
            patched.setattr(here, "get_device_capability", lambda *_: found, raising=False)
            return engine_config.expected_facts(config)

    return facts


def keys(size):
    """Let a gated delta net's keys have this many numbers."""
    return lambda config: setattr(config.model_config.hf_text_config, "linear_key_head_dim", size)


@pytest.mark.parametrize(
    ("asked", "inner"),
    [
        ({}, True),
        ({"enable_prefix_caching": False}, False),
        ({"version": "0.32.0"}, False),
        ({"capability": (8, 0)}, False),
        ({"capability": (9, 0), "changes": keys(64)}, True),
        ({"capability": (10, 3), "changes": keys(128)}, True),
        ({"capability": (12, 0), "changes": keys(128)}, True),
        ({"capability": (12, 0), "changes": keys(64)}, False),
        ({"capability": (11, 0), "changes": keys(128)}, False),
        ({"additional_config": {"gdn_prefill_backend": "triton"}}, False),
        ({"additional_config": {"gdn_prefill_backend": "FlashInfer"}}, True),
        ({"additional_config": {"gdn_prefill_backend": "cutedsl"}}, False),
    ],
)
def test_states_in_the_middle_of_prompts_are_foreseen(foreseen, monkeypatch, asked, inner):
    """By release, prefix cache, setting and GPU, as vLLM chooses its kernel of prompts."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    facts = foreseen(**{"enable_prefix_caching": True} | asked)
    assert facts.inner_states == inner
    found = decide("auto", facts)
    assert (found.policy == "off") == inner
    assert ("set gdn_prefill_backend to 'triton'" in found.reason) == inner


def test_before_cuda_13_newer_gpus_take_another_kernel(foreseen, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "12.8")
    asked = {"enable_prefix_caching": True, "changes": keys(128)}
    assert not foreseen(**asked, capability=(10, 0)).inner_states
    assert foreseen(**asked, capability=(9, 0)).inner_states


def number(name, value):
    """Change a number of the configuration of speculation or of caches."""
    return lambda config: setattr(config.speculative_config, name, value)


def replays(config):
    """vLLM's own replay of Mamba-2 layers is on."""
    config.cache_config.use_replayssm = True


def states_of(dtype):
    """States have this dtype."""
    return lambda config: setattr(config.cache_config, "mamba_ssm_cache_dtype", dtype)


def other_kernels(config):
    """vLLM's Mamba-2 kernels are FlashInfer's."""
    config.mamba_config.backend = Made(value="flashinfer")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"model": "nemotron_h", "changes": replays}, "leave use_replayssm out"),
        ({"model": "nemotron_h", "changes": other_kernels}, "leave mamba_backend out"),
        ({"model": "mamba2"}, "the model has no layers of attention"),
        (
            {"states": "fast", "changes": number("num_speculative_tokens", 16)},
            "kvtxn's kernels of gated delta nets take at most 15 drafts",
        ),
        ({"changes": states_of("float16")}, "not checked with float16 states"),
    ],
)
def test_layers_that_cannot_be_held_are_foreseen(foreseen, asked, says):
    """An engine like these runs stock, though its model's kind of layers is known."""
    found = decide("auto", foreseen(**{"enable_prefix_caching": False} | asked))
    assert found.policy == "off"
    assert says in found.reason


@pytest.mark.parametrize(("fast", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_dtype_of_states_is_foreseen_on_a_cpu(foreseen, monkeypatch, fast, dtype):
    """Before the model is loaded; CPUs with AVX-512 for bfloat16 have them in float32."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: fast)
    on_cpu = {"device": "cpu", "enable_prefix_caching": False, "version": "0.32.0"}
    assert foreseen(**on_cpu).state_dtype == dtype
    assert foreseen(**on_cpu, mamba_ssm_cache_dtype="float32").state_dtype == "float32"
    assert (decide("auto", foreseen(**on_cpu)).policy == "off") == (dtype == "bfloat16")
    facts = foreseen("nemotron_h", **on_cpu, changes=states_of("float16"))
    assert "not checked with float16 states of a bfloat16 model" in decide("auto", facts).reason


def test_others_are_let_in(foreseen):
    for model in ("qwen3next", "nemotron_h"):
        facts = foreseen(model, enable_prefix_caching=False)
        assert (facts.odd_states, facts.inner_states) == (None, False)
        assert decide("auto", facts).policy == "deferred"
    many = number("num_speculative_tokens", 15)
    assert foreseen(states="fast", enable_prefix_caching=False, changes=many).odd_states is None


def test_nothing_is_read_of_states_that_stay_out(foreseen):
    facts = foreseen("mamba2", states="off", enable_prefix_caching=False)
    assert (facts.odd_states, facts.state_dtype) == (None, None)
