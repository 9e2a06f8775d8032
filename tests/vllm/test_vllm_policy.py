"""The table that decides, and the settings; no engine."""

from __future__ import annotations

import attrs
import pytest
from kvtxn.integrations.vllm_facts import Facts
from kvtxn.integrations.vllm_policy import RULES, decide
from kvtxn.integrations.vllm_settings import settings, surfaces_errors

from kvtxn import ConfigError
from kvtxn.config import POLICIES
from kvtxn.errors import BackendUnavailableError


@pytest.mark.parametrize(
    ("asked", "policy"),
    [("auto", "deferred"), ("deferred", "deferred"), ("undo", "undo"), ("direct", "direct")],
)
def test_a_plain_engine_gets_what_is_asked_for(asked, policy):
    assert decide(asked, Facts()).policy == policy


def examples(forbids):
    return [pytest.param(rule, id=rule.name) for rule in RULES if rule.forbids == forbids]


def test_rules_have_names_of_their_own():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert not any(rule.applies(Facts()) for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_example_concerns_its_rule_and_no_other(rule):
    """So the tests below see each row of the table by itself."""
    facts = attrs.evolve(Facts(), **rule.example)
    assert [other.name for other in RULES if other.applies(facts)] == [rule.name]
    assert "{" not in rule.says(facts)


@pytest.mark.parametrize("rule", examples("windows"))
@pytest.mark.parametrize("asked", POLICIES)
def test_what_is_not_supported_is_refused_with_a_reason(asked, rule):
    facts = attrs.evolve(Facts(), **rule.example)
    assert decide(asked, facts) == ("off", rule.says(facts))


@pytest.mark.parametrize("rule", examples("deferred"))
def test_auto_takes_undo_where_attention_cannot_read_the_window(rule):
    facts = attrs.evolve(Facts(), **rule.example)
    assert decide("auto", facts).policy == "undo"
    assert rule.says(facts) in decide("auto", facts).reason
    assert decide("undo", facts).policy == "undo"
    off = decide("deferred", facts)
    assert off.policy == "off"  # a policy asked for by name is never swapped
    assert "cannot work here" in off.reason


@pytest.mark.parametrize("rule", examples("auto"))
def test_auto_takes_undo_where_tokens_may_not_be_stocks(rule):
    facts = attrs.evolve(Facts(), **rule.example)
    assert decide("auto", facts).policy == "undo"
    assert decide("deferred", facts).policy == "deferred"


def test_auto_defers_only_where_tokens_stay_stocks():
    facts = attrs.evolve(Facts(), dtype="bfloat16")
    auto = decide("auto", facts)
    assert auto.policy == "undo"
    assert "in bfloat16 another order of sums" in auto.reason
    assert decide("deferred", facts).policy == "deferred"  # by name it can be had


@pytest.mark.parametrize("asked", ["auto", "deferred"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"sinks": True},
        {"batch_invariant": True},
        {"tensor_parallel": 2},
        {"attention": "FLASH_ATTN", "flash": 3},
    ],
)
def test_on_gpus_sums_are_stocks_so_auto_defers(asked, runner, changes):
    """Drafts are read by vLLM's own attention, whatever the format and whatever it does."""
    facts = Facts(device="cuda", runner=runner, dtype="bfloat16")
    assert decide(asked, attrs.evolve(facts, **changes)).policy == "deferred"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": "FLASH_ATTN", "flash": 2}, "FlashAttention 2 was not seen"),
        ({"attention": "FLASH_ATTN", "flash": 4}, "FlashAttention 4 was not seen"),
        ({"alibi": True}, "for ALiBi vLLM takes FlashAttention 2"),
        ({"spare_blocks": False}, "no room for rows that wait"),
        # What is known first is said, though such an engine has no spare blocks either.
        ({"attention": "TRITON_ATTN", "spare_blocks": False}, "TRITON_ATTN cannot read"),
        ({"attention": "FLASH_ATTN", "flash": 2, "spare_blocks": False}, "FlashAttention 2"),
    ],
)
def test_on_gpus_auto_undoes_where_drafts_cannot_wait(changes, says):
    facts = attrs.evolve(Facts(device="cuda", runner="v2", dtype="bfloat16"), **changes)
    auto = decide("auto", facts)
    assert (auto.policy, says in auto.reason) == ("undo", True)
    off = decide("deferred", facts)
    assert (off.policy, says in off.reason) == ("off", True)


def test_spare_blocks_are_a_matter_of_gpus():
    """On the CPU drafts wait in buffers of their own."""
    assert decide("auto", Facts(spare_blocks=False)).policy == "deferred"


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
