"""The options of ``kvtxn bench vllm``: what they turn into, and what is refused at once."""

from __future__ import annotations

import argparse
import json

import attrs
import pytest
import torch
from kvtxn.benchmarks.engines import command as vllm_bench
from kvtxn.benchmarks.engines import options as vllm_options
from kvtxn.benchmarks.engines.models import DRAFTERS, MODELS

from kvtxn.cli import main
from kvtxn.errors import ConfigError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    vllm_bench.add_arguments(parser)
    return parser.parse_args(arguments)


def engine_arguments(tmp_path, *arguments: str) -> dict:
    """The arguments of ``vllm.LLM``."""
    args = parse(*arguments)
    return vllm_bench.engine_arguments(args, MODELS[args.model], tmp_path)


def test_one_cell_for_each_combination():
    """Every list is walked; a scenario says what was left out."""
    found = vllm_options.points(parse("--scenario", "short", "long", "--requests", "1", "8"))
    assert [(p.scenario, p.context, p.tokens, p.requests) for p in found] == [
        ("short", 64, 32, 1),
        ("short", 64, 32, 8),
        ("long", 8192, 256, 1),
        ("long", 8192, 256, 8),
    ]
    given = parse("--context", "16", "32", "--tokens", "5", "--acceptance", "0.1", "0.9")
    found = vllm_options.points(given)
    assert {(p.context, p.tokens, p.acceptance) for p in found} == {
        (context, 5, rate) for context in (16, 32) for rate in (0.1, 0.9)
    }
    found = vllm_options.points(parse("--cells", "short:8:1:real", "mixed:16:2:0.5"))
    assert [(p.scenario, p.context, p.requests, p.acceptance) for p in found] == [
        ("short", 8, 1, None),
        ("mixed", 16, 2, 0.5),
    ]


def test_an_engine_for_each_policy():
    """The same twice has another name; an audit is stock with the audit alone."""
    policies = ("stock", "undo", "stock", "ledger", "bytes")
    found = vllm_bench.specs(parse("--policies", *policies, "--timeout", "7"), {"model": "m"})
    assert {spec.label: spec.config for spec in found} == {
        "stock": {},
        "undo": {"kvtxn": {"policy": "undo"}},
        "stock#2": {},
        "ledger": {"kvtxn": {"audit": "ledger"}},
        "bytes": {"kvtxn": {"audit": "bytes"}},
    }
    assert [spec.label for spec in found if spec.audited] == ["ledger", "bytes"]
    assert {spec.timeout for spec in found} == {7.0}


def test_engines_get_what_was_asked_for(tmp_path):
    """Room for the longest request, the batch, the drafts, and the user's own words last."""
    options = ["--requests", "2", "6", "--context", "10", "20", "--tokens", "5", "--drafts", "3"]
    found = engine_arguments(tmp_path, *options)
    assert found["max_model_len"] == 20 + 5 + 3 + 8
    assert found["max_num_seqs"] == 6
    assert found["speculative_config"]["num_speculative_tokens"] == 3
    assert "rejection_sample_method" not in found["speculative_config"]
    assert found["load_format"] == "dummy"
    more = engine_arguments(tmp_path, *options, "--engine-args", '{"seed": 3}')
    assert (more["max_num_seqs"], more["seed"]) == (6, 3)
    rates = engine_arguments(tmp_path, "--acceptance", "0.1")["speculative_config"]
    assert rates["rejection_sample_method"] == "synthetic"
    assert len(rates["synthetic_acceptance_rates"]) == 4


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_drafters(drafter, tmp_path):
    """Each names its method; those with weights name a folder with a configuration."""
    found = engine_arguments(tmp_path, "--model", "tiny", "--drafter", drafter)
    found = found["speculative_config"]
    assert found["method"] == drafter
    if "model" in found:
        assert (tmp_path / "tiny-drafter" / "config.json").is_file()


def test_a_token_in_the_cache():
    """In bf16, with a layer for the drafter: K and V of all heads."""
    assert MODELS["llama3-8b"].token_bytes == 33 * 2 * 2 * 8 * 128


def test_the_real_model_is_that_of_the_demo(tmp_path, monkeypatch):
    """Every engine is given its weights and tokenizer; nobody trained a drafter for it."""
    monkeypatch.setitem(MODELS, "smol", attrs.evolve(MODELS["smol"], prepare=lambda: tmp_path))
    found = engine_arguments(tmp_path, "--model", "smol")
    assert found["model"] == str(tmp_path)
    assert "load_format" not in found
    with pytest.raises(ConfigError, match="'smol' has no drafter of its own"):
        DRAFTERS["eagle"](tmp_path, MODELS["smol"], 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "'0' is not a positive number"),
        (["--requests", "1,8"], "'1,8' is not a positive number"),
        (["--first-token-rounds", "-1"], "'-1' is not a positive number"),
        (["--cells", "short:8"], "'short:8' is not SCENARIO:CONTEXT:REQUESTS:ACCEPTANCE"),
        (["--cells", "huge:8:1:real"], "'huge' is not one of short"),
        (["--policies", "redo"], "invalid choice: 'redo' (choose from"),
        (["--policies", "stock,undo"], "invalid choice: 'stock,undo' (choose from"),
        (["--scenario", "huge"], "invalid choice: 'huge' (choose from"),
        (["--acceptance", "lots"], "neither 'real' nor a share"),
        (["--acceptance", "1.5"], "between 0 and 1"),
        (["--arrivals", "-1"], "'-1' is not a positive number"),
        (["--engine-args", "[]"], "not a JSON object"),
        (["--engine-args", "{"], "not JSON"),
    ],
)
def test_values_that_make_no_sense(arguments, message, capsys):
    """argparse says which option and why."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", "vllm", *(f"{arguments[0]}={arguments[1]}",)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arrivals", "3"], "--arrivals has no effect"),
        (["--clock", "--policies", "stock"], "--clock has no effect on stock"),
        (["--first-token-rounds", "3", "--scenario", "mixed"], "requests arrive over time"),
        (["--acceptance", "0.5"], "no synthetic acceptance on CPUs"),
        (["--model", "smol", "--drafter", "eagle"], "'smol' has no drafter of its own"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, message, capsys, monkeypatch):
    """Before an engine starts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "vllm", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_engines_of_a_hybrid_hold_their_states_by_name(tmp_path, monkeypatch):
    """Each with a cache in which all requests fit; stock has a state for each draft as well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = ("--model", "qwen3.5-9b", "--policies", "stock", "exact", "fast", "--requests", "32")
    args = parse(*given, "--acceptance", "0.5")
    vllm_options.check(args)
    arguments = vllm_bench.engine_arguments(args, MODELS[args.model], tmp_path)
    assert arguments["mamba_ssm_cache_dtype"] == "float32"
    config = json.loads((tmp_path / "qwen3.5-9b" / "config.json").read_text())
    assert config["layer_types"].count("linear_attention") == 24
    stock, *others = vllm_bench.specs(args, arguments)
    assert stock.config == {}
    assert [each.config["kvtxn"] for each in others] == [
        {"policy": "auto", "recurrent": how} for how in ("exact", "fast")
    ]
    caches = [each.arguments["kv_cache_memory_bytes"] for each in (stock, *others)]
    state = 24 * 32 * 128 * 128 * 4
    assert caches[0] - caches[1] >= 32 * 4 * state
    assert caches[1] == caches[2] >= 32 * state
    page = 8 * 544 * 4096  # of eight layers with attention; each state has one of its group
    alike = parse(*given, "--acceptance", "0.5", "--equal-cache", "32")
    caches = {
        each.arguments["kv_cache_memory_bytes"] for each in vllm_bench.specs(alike, arguments)
    }
    assert caches == {(32 * (3 * 5 + 1) + 2) * page}
    own = parse(*given, "--engine-args", '{"kv_cache_memory_bytes": 5}')
    assert vllm_bench.specs(own, arguments)[0].arguments["kv_cache_memory_bytes"] == 5


def test_caches_of_other_models_are_not_alike():
    args = parse("--model", "tiny", "--policies", "stock", "undo", "--equal-cache", "3")
    with pytest.raises(ConfigError, match="--equal-cache has no effect"):
        vllm_options.check(args)


@pytest.mark.parametrize(("model", "policy"), [("qwen3.5-9b", "undo"), ("tiny", "fast")])
def test_policies_that_do_not_fit_the_model_are_refused(model, policy):
    args = parse("--model", model, "--policies", "stock", policy)
    with pytest.raises(
        ConfigError, match=f"stock, exact and fast .*got stock {policy} for {model}"
    ):
        vllm_options.check(args)


SHAPES = {"qwen3-next-a3b": (36, 12, 48), "nemotron-h-8b": (24, 4, 52)}


@pytest.mark.parametrize("name", SHAPES)
def test_configurations_of_other_hybrids_are_vllms(name, tmp_path, monkeypatch):
    """vLLM reads in them the layers, states and experts of the shape; n-grams alone draft."""
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(  # vLLM would import itself anew, to look at the model's class
        "vllm.model_executor.models.registry._run_in_subprocess", lambda function: function()
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse("--model", name, "--policies", "stock", "exact", "--requests", "4")
    arguments = vllm_bench.engine_arguments(args, MODELS[name], tmp_path)
    config = ModelConfig(model=arguments["model"], dtype="bfloat16", skip_tokenizer_init=True)
    states, attention, layers = SHAPES[name]
    assert config.is_hybrid
    assert config.architectures[0] in ModelRegistry.get_supported_archs()
    assert config.hf_config.num_hidden_layers == layers
    kinds = getattr(config.hf_config, "layers_block_type", None) or config.hf_config.layer_types
    found = [str(each) for each in kinds]
    named = ("linear_attention", "mamba"), ("full_attention", "attention")
    assert [sum(found.count(each) for each in names) for names in named] == [states, attention]
    if MODELS[name].shape.experts:
        assert (config.hf_config.num_experts, config.hf_config.num_experts_per_tok) == (64, 10)
    stock, exact = vllm_bench.specs(args, arguments)
    shape = MODELS[name].shape.states
    state = shape.layers * shape.heads * shape.value_size * shape.key_size * 4
    more = [each.arguments["kv_cache_memory_bytes"] for each in (stock, exact)]
    assert more[0] - more[1] >= 4 * 4 * state
    assert more[1] >= 4 * state
    with pytest.raises(ConfigError, match="take --drafter ngram"):
        engine_arguments(tmp_path, "--model", name, "--drafter", "eagle")
