"""The table that decides, and the settings; no engine."""

from __future__ import annotations

import attrs
import pytest
from kvtxn.integrations.vllm_policy import Facts, decide, settings, surfaces_errors

from kvtxn import ConfigError
from kvtxn.errors import BackendUnavailableError


@pytest.mark.parametrize(
    ("asked", "policy"),
    [("auto", "deferred"), ("deferred", "deferred"), ("undo", "undo"), ("direct", "direct")],
)
def test_a_plain_engine_gets_what_is_asked_for(asked, policy):
    assert decide(asked, Facts()).policy == policy


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.26.0"}, "vLLM 0.26.0 was not checked; supported: 0.32.0"),
        ({"method": None}, "does not speculate"),
        ({"runner": "v2"}, "runner v2"),
        ({"device": "cuda"}, "device cuda"),
        ({"pipeline_parallel": 2}, "pipeline"),
        ({"context_parallel": 2}, "context"),
        ({"microbatches": True}, "microbatches"),
        ({"mla": True}, "latent"),
        ({"recurrent": True}, "recurrent"),
        ({"foreign_layer": "model.layers.3"}, "model.layers.3 is no plain attention"),
    ],
)
@pytest.mark.parametrize("asked", ["auto", "deferred", "undo", "direct"])
def test_what_is_not_supported_is_refused_with_a_reason(asked, change, reason):
    policy, why = decide(asked, attrs.evolve(Facts(), **change))
    assert policy == "off"
    assert reason in why


@pytest.mark.parametrize(
    "change",
    [{"kv_cache_dtype": "fp8"}, {"connector": True}, {"kv_sharing": True}, {"sinks": True}],
)
def test_auto_takes_undo_where_attention_cannot_read_the_window(change):
    facts = attrs.evolve(Facts(), **change)
    assert decide("auto", facts).policy == "undo"
    assert decide("undo", facts).policy == "undo"
    off = decide("deferred", facts)
    assert off.policy == "off"  # a policy asked for by name is never swapped
    assert "cannot work here" in off.reason


def test_auto_defers_only_where_tokens_stay_stocks():
    facts = attrs.evolve(Facts(), dtype="bfloat16")
    auto = decide("auto", facts)
    assert auto.policy == "undo"
    assert "in bfloat16 another order of sums" in auto.reason
    assert decide("deferred", facts).policy == "deferred"  # by name it can be had


@pytest.mark.parametrize("given", [{}, None, {"other": 1}, {"kvtxn": None}, "text"])
def test_inactive_unless_asked_for(given):
    assert settings(given, 8) is None


def test_settings_are_those_of_the_config():
    found = settings({"kvtxn": {"policy": "undo", "on_error": "raise", "debug": True}}, 24)
    assert found is not None
    assert (found.policy, found.on_error, found.debug, found.max_rows) == (
        "undo",
        "raise",
        True,
        24,
    )
    found = settings({"kvtxn": {"policy": "undo", "max_rows": 7}}, 24)
    assert found is not None
    assert found.max_rows == 7


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("undo", ConfigError, "expected a dict, got 'undo'"),
        ({"polcy": "undo"}, ConfigError, "has no setting 'polcy'"),
        ({"debug": True}, ConfigError, "names no policy"),
        ({"policy": "undoo"}, ConfigError, "policy is not valid"),
        ({"policy": "undo", "backend": "abacus"}, BackendUnavailableError, "'abacus'"),
    ],
)
def test_bad_settings_are_sentences(given, error, text):
    with pytest.raises(error) as caught:
        settings({"kvtxn": given}, 8)
    assert text in str(caught.value)


def test_on_error_is_known_even_if_the_rest_is_wrong():
    assert surfaces_errors({"kvtxn": {"policy": "undoo", "on_error": "raise"}})
    assert not surfaces_errors({"kvtxn": {"policy": "undoo"}})
    assert not surfaces_errors({"kvtxn": "undo"})
    assert not surfaces_errors(None)
