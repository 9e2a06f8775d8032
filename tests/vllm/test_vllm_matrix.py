"""The doctor's matrix says of every kind of engine what the plugin's table decides."""

from __future__ import annotations

from itertools import product

import attrs
import pytest
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
