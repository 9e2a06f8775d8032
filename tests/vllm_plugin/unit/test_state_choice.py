"""``recurrent="auto"``: its rule, the numbers behind it, and what each engine gets."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from engine_jobs import missing
from invented_releases import invented  # noqa: F401
from kvtxn.benchmarks.engines import hybrids
from kvtxn.benchmarks.engines.models import MODELS
from kvtxn.integrations.vllm_plugin.policy import doctor, state_rules
from kvtxn.integrations.vllm_plugin.policy.decision import MEASURED, ON_ONE_GPU
from kvtxn.integrations.vllm_plugin.policy.doctor import check_states
from kvtxn.integrations.vllm_plugin.policy.engine_facts import (
    MAMBA2,
    OLMO_DELTA,
    OTHER_STATES,
    EngineFacts,
)
from kvtxn.integrations.vllm_plugin.policy.rules import decide
from kvtxn.integrations.vllm_plugin.policy.settings import asked_states, settings
from kvtxn.integrations.vllm_plugin.policy.state_rules import TAKEN
from kvtxn.integrations.vllm_plugin.seam import engine_config as engine_config

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
AUTO = {"kvtxn": {"policy": "auto", "recurrent": "auto"}}
ENGINE = attrs.evolve(EngineFacts(flash=3), **TAKEN)
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}

real_vllm = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


# -- the numbers -------------------------------------------------------------------------------


def test_each_measurement_has_the_commit_of_its_result():
    for name, found in MEASURED.items():
        assert found["commit"] == results(found["result"])["machine"]["commit"], name


def test_the_times_are_those_of_the_result():
    rows = [
        row
        for row in results("h200-recurrent")["rows"]
        if (row["model"], row["dtype"], row["drafts"]) == ("qwen3.5-9b", "float32", 4)
    ]
    for kernel, found in state_rules.EXACT_OF_STOCK.items():
        measured = {
            row["requests"]: round(row["kernels"][f"vLLM's, {kernel}"]["of_stock"]["median"], 2)
            for row in rows
        }
        assert measured == found


def test_latents_take_as_long_as_in_the_results():
    """By blocks of one row, as their rules say: the most of all cases."""
    for backend, fp8, name in (
        ("TRITON_MLA", True, "TRITON_MLA over 8 bits by blocks of one row, at most"),
        ("FLASH_ATTN_MLA", False, "FLASH_ATTN_MLA by blocks of one row, at most"),
    ):
        shares = [
            row["of_blocks"]["median"]
            for row in results(MEASURED[name]["result"])["rows"]
            if (row["backend"], row["fp8"]) == (backend, fp8)
        ]
        said = MEASURED[name]["of_stock"]
        assert round(max(shares), len(str(said)) - 2) == said


def test_few_requests_are_those_that_gain_no_time():
    """By stock's fused kernel; by its Triton kernel no number of requests does."""
    fused, triton = state_rules.EXACT_OF_STOCK.values()
    assert all((part > 0.95) == (count <= state_rules.FEW) for count, part in fused.items())
    assert all(1 < part <= 1.2 for part in triton.values())


def test_the_room_is_that_of_the_result():
    rows = results("capacity-scheduler")["rows"]
    held = {(r["length"], r["cache"] == "align", r["policy"]): r["reported"] for r in rows}
    measured = {
        (tokens, cached): round(held[tokens, cached, "exact"] / held[tokens, cached, "stock"], 2)
        for tokens, cached, policy in held
        if policy == "stock"
    }
    assert measured == state_rules.HELD_OF_STOCK


def whole(tmp_path, **options):
    """The configuration of an engine of Qwen3.5-9B's shape, as a GPU's worker would read it.

    By the name of Qwen3-Next, whose sizes have the same names: vLLM knows it on any machine.
    """
    shape = MODELS["qwen3.5-9b"].shape
    sizes = hybrids.configuration(shape) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    given = {
        "model": str(tmp_path),
        "mamba_ssm_cache_dtype": "float32",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_num_seqs": 64,
        "speculative_config": NGRAM,
        "additional_config": AUTO,
    }
    config = engine_config.config_from(given | options)
    config.device_config.device_type = "cuda"
    return config


@real_vllm
@pytest.mark.parametrize("tokens", [1024, 4096])
@pytest.mark.parametrize("cached", [False, True])
def test_the_formula_gives_what_vllms_planning_gave(tmp_path, tokens, cached):
    """From the configuration alone, without a model and without caches."""
    config = whole(tmp_path)
    config.cache_config.mamba_cache_mode = "align" if cached else "none"
    found = engine_config.one_state_gain(config, 4, tokens)
    assert found == pytest.approx(state_rules.HELD_OF_STOCK[tokens, cached], rel=0.01)


@real_vllm
def test_smaller_states_and_fewer_drafts_gain_less(tmp_path):
    config = whole(tmp_path)
    full = engine_config.one_state_gain(config, 4, 4096)
    assert 1 < engine_config.one_state_gain(config, 1, 4096) < full
    config.cache_config.mamba_ssm_cache_dtype = "bfloat16"
    assert engine_config.one_state_gain(config, 4, 4096) < full
    config.cache_config.cache_dtype = "fp8"  # rows of half the size
    assert engine_config.one_state_gain(config, 4, 4096) == pytest.approx(full, rel=0.1)
    config.model_config.hf_text_config.layer_types = None
    assert engine_config.one_state_gain(config, 4, 4096) == 1.0


# -- the rule ----------------------------------------------------------------------------------


def test_it_takes_exact_where_all_conditions_hold():
    """Policies are those of "exact"; at the limits the rule still takes it."""
    exact = attrs.evolve(ENGINE, states="exact")
    for asked in ("auto", "deferred", "undo", "direct"):
        assert decide(asked, ENGINE) == decide(asked, exact)
    assert decide("auto", ENGINE).policy == "deferred"
    least = {"most_requests": state_rules.FEW + 1, "gain": state_rules.GAIN}
    assert decide("auto", attrs.evolve(ENGINE, **least)).policy == "deferred"
    assert decide("auto", attrs.evolve(ENGINE, attention="FLASH_ATTN")).policy == "deferred"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"most_requests": 8}, "at most 8 requests run at once (max_num_seqs)"),
        ({"gain": 1.49}, "1.49 times as many requests of 4096 tokens would fit, and it takes 1.5"),
        ({"state_dtype": "bfloat16"}, "with gated delta nets and bfloat16 states"),
        ({"recurrent": MAMBA2, "state_dtype": None}, "with Mamba-2 layers and recurrent states"),
        ({"model": "qwen3_next"}, "with model type qwen3_next"),
        ({"attention": "TRITON_ATTN"}, "beside attention backend TRITON_ATTN"),
        ({"kv_cache_dtype": "fp8"}, "beside a KV cache of format fp8"),
        ({"device": "cpu", "runner": "v1"}, "whose text with drafts is not greedy's on a CPU"),
        ({"tensor_parallel": 2}, "under tensor parallelism"),
        ({"runner": "v1"}, "was not measured with vLLM's V1 model runner"),
        ({"version": ON_ONE_GPU, "unchecked": True}, f"not checked with vLLM {ON_ONE_GPU}"),
        ({"recurrent": OLMO_DELTA}, "with gated delta nets of OLMo hybrid and"),
        ({"recurrent": OTHER_STATES}, "of other recurrent layers it would have to know"),
    ],
)
@pytest.mark.usefixtures("invented")
def test_else_it_leaves_the_states_to_stock_with_a_reason(changes, says):
    """The reason says so if "exact" would start."""
    off = decide("auto", attrs.evolve(ENGINE, **changes))
    assert off.policy == "off"
    assert says in off.reason
    by_rule = off.reason.startswith('"recurrent": "auto" leaves the states to stock')
    exact = decide("auto", attrs.evolve(ENGINE, **changes, states="exact"))
    assert by_rule == (exact.policy != "off")
    assert not by_rule or 'set "recurrent" to "exact"' in off.reason


def test_it_tries_nothing_out():
    """``unchecked`` lets such states start over ranks with "exact"; "auto" takes what was seen."""
    ranks = attrs.evolve(ENGINE, recurrent=MAMBA2, tensor_parallel=2, unchecked=True)
    assert decide("auto", ranks).policy == "off"
    assert decide("auto", attrs.evolve(ranks, states="exact")).policy == "deferred"


@real_vllm
@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, "deferred"),
        ({"max_num_seqs": 8}, "off"),
        ({"speculative_config": NGRAM | {"num_speculative_tokens": 1}}, "off"),
        ({"speculative_config": NGRAM | {"num_speculative_tokens": 2}}, "deferred"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "off"),
        ({"max_model_len": 1024}, "deferred"),
    ],
)
def test_an_engines_arguments_decide(tmp_path, options, policy):
    """A user can tell from them; of requests longer than 4096 tokens nothing is assumed."""
    facts = engine_config.config_facts(whole(tmp_path, **options))
    assert facts.model == "qwen3_next"
    facts = attrs.evolve(facts, version=ENGINE.version, runner="v2", flash=3, model=ENGINE.model)
    assert facts.gain_tokens == min(4096, options.get("max_model_len", 8192))
    assert decide("auto", facts).policy == policy


# -- settings and doctor -----------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_one_configuration_serves_all_models(device):
    """A model without recurrent layers is served as without the setting, on any device."""
    wanted = settings(AUTO, 8, device)
    assert wanted is not None
    assert wanted.recurrent == asked_states(AUTO) == "auto"
    plain = EngineFacts(device=device, states="auto")
    check_states(wanted, plain)
    assert decide("auto", plain) == decide("auto", attrs.evolve(plain, states="off"))
    [policy, *others] = doctor._outcomes(wanted, plain, None)
    assert policy.setting == "policy"
    assert not others


def test_the_doctor_says_what_it_takes_and_why():
    wanted = settings(AUTO, 8, "cuda")
    policy, recurrent = doctor._outcomes(wanted, ENGINE, None)
    assert policy.found == "deferred"
    line = str(recurrent)
    assert line.startswith('recurrent auto -> exact ("auto" takes "exact": 2.09 times as many ')
    for part in ("1.10 of stock's time with 1 request, 0.99 with 8", "stock's to the bit; with"):
        assert part in line
    assert not recurrent.lacks


def test_the_doctor_says_why_not():
    """And a user who requires kvtxn is told that the start stops."""
    wanted = settings({"kvtxn": AUTO["kvtxn"] | {"required": True}}, 8, "cuda")
    few = attrs.evolve(ENGINE, most_requests=4)
    lines = doctor._asked(wanted, few, None)
    assert lines[0].startswith('policy auto -> off ("recurrent": "auto" leaves the states to stock')
    assert lines[-1].startswith("required -> the start stops: kvtxn is required, but")
