"""The doctor's matrix says of every kind of engine what the plugin's table decides."""

from __future__ import annotations

from itertools import product

import attrs
import pytest
import vllm_models
from kvtxn.integrations.vllm_matrix import BACKENDS, FAMILIES, FORMATS, PARALLELISM, matrix
from kvtxn.integrations.vllm_policy import RULES, Facts, decide
from kvtxn.integrations.vllm_report import report

from kvtxn.config import POLICIES
from kvtxn.errors import ConfigError

DEVICES = {"cpu": Facts(), "cuda": Facts(device="cuda", runner="v2"), "tpu": Facts(device="tpu")}


@pytest.mark.parametrize("device", DEVICES)
def test_every_row_is_what_the_plugin_decides(device):
    for row in matrix(DEVICES[device]):
        assert row.facts
        for facts in row.facts:
            assert row.auto == decide("auto", facts)
            found = {asked: decide(asked, facts).policy for asked in POLICIES}
            named = {policy for policy, policy_found in found.items() if policy == policy_found}
            assert set(row.named) == named


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_engine_is_named_once(device):
    attention, latent = BACKENDS.get(device, (("any",), ("any",)))
    kinds = [
        (family, backend)
        for family, changes in FAMILIES.items()
        for backend in (latent if "mla" in changes else attention)
    ]
    expected = sorted(product(kinds, FORMATS, PARALLELISM))
    rows = matrix(DEVICES[device])
    said = [one for row in rows for one in product(row.kinds, row.formats, row.parallelism)]
    assert sorted(said) == expected
    assert sum(len(row.facts) for row in rows) == len(expected)


def test_rows_say_it_in_a_line():
    """What differs is named; what does not is "any"."""
    lines = [str(row) for row in matrix(Facts())]
    pipeline = next(line for line in lines if "| pipeline (last stage)" in line)
    assert pipeline == (
        "any | any | pipeline (last stage), pipeline (other stages): off "
        "(vLLM's V1 model runner cannot speculate under pipeline parallelism)"
    )
    plain = next(line for line in lines if line.startswith("Llama"))
    assert "on CPU_ATTN | float32 | one worker, tensor: deferred, undo by name (" in plain


def test_an_unsupported_release_is_one_line():
    [row] = matrix(Facts(version="0.1.0"))
    assert (
        str(row)
        == "any | any | any: off (" + RULES[0].says(attrs.evolve(Facts(), version="0.1.0")) + ")"
    )


@pytest.mark.parametrize("asked", [{"policy": "nope"}, {"polcy": "undo"}, {}, "undo"])
def test_settings_that_are_not_valid_are_said_before_anything_is_judged(asked):
    """As the plug-in says them; no engine has to be built for that."""
    with pytest.raises(ConfigError, match=r"policy|a dict"):
        report({"model": "nowhere", "additional_config": {"kvtxn": asked}})


@pytest.mark.parametrize(
    ("model", "rule"),
    [("llama", None), ("gemma3n", "shared rows"), ("gptoss", "sinks"), ("bloom", "alibi")],
)
def test_an_engine_is_judged_as_the_plugin_will(tmp_path, model, rule):
    """What its model's configuration gives away is known before it is loaded."""
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    folder = vllm_models.write(model, tmp_path)
    options = {"model": folder, "skip_tokenizer_init": True, "dtype": "float32"}
    found = report({**options, "speculative_config": speculation})
    policy, reason = found["policies"][0].removeprefix("auto -> ").split(" ", 1)
    assert policy == ("deferred" if rule is None else "undo")
    says = {each.name: each.reason for each in RULES}
    assert rule is None or says[rule] in reason
    assert "has the last word" in found["engine"]["assumed"]
