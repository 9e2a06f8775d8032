"""The table that decides, and the settings; no engine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import attrs
import pytest
from invented_releases import invented  # noqa: F401
from kvtxn.integrations.vllm_plugin.policy import wants
from kvtxn.integrations.vllm_plugin.policy.decision import ON_ONE_GPU, UNLISTED, WITHOUT_STAGES
from kvtxn.integrations.vllm_plugin.policy.doctor import hook_gone
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.rules import RULES, TIME_RULES, decide, on_trial
from kvtxn.integrations.vllm_plugin.policy.settings import WITHOUT_EFFECT, settings
from kvtxn.integrations.vllm_plugin.policy.supported import CONNECTORS_CHECKED, ROW_RELEASES
from kvtxn.integrations.vllm_plugin.seam.engine_config import connector_names

from kvtxn import ConfigError
from kvtxn.config import POLICIES, TxnConfig
from kvtxn.errors import BackendUnavailableError, KVTxnError


@pytest.mark.parametrize(
    ("asked", "policy"),
    [("auto", "undo"), ("deferred", "deferred"), ("undo", "undo"), ("direct", "direct")],
)
def test_a_plain_engine_gets_what_is_asked_for(asked, policy):
    """On a CPU "auto" takes what leaves the attention alone."""
    assert decide(asked, EngineFacts()).policy == policy


pytestmark = pytest.mark.usefixtures("invented")


def examples(forbids):
    return [pytest.param(rule, id=rule.name) for rule in RULES if rule.forbids == forbids]


def test_rules_have_names_of_their_own():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert [rule.name for rule in RULES if rule.applies(EngineFacts())] == ["time on CPUs"]
    assert RULES[-len(TIME_RULES) :] == TIME_RULES


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_example_concerns_its_rule_and_no_other(rule):
    """Exactly one rule applies to each example, so the tests below see each rule by itself.

    But for those about time, which speak last.
    """
    facts = attrs.evolve(EngineFacts(), **rule.example)
    others = [other for other in RULES if other.applies(facts) and other not in TIME_RULES]
    assert (others or [other for other in TIME_RULES if other.applies(facts)]) == [rule]
    assert "{" not in rule.says(facts)


@pytest.mark.parametrize("rule", examples("windows"))
@pytest.mark.parametrize("asked", POLICIES)
def test_what_is_not_supported_is_refused_with_a_reason(asked, rule):
    facts = attrs.evolve(EngineFacts(), **rule.example)
    assert decide(asked, facts) == ("off", rule.says(facts))


@pytest.mark.parametrize("rule", examples("deferred"))
def test_auto_takes_undo_where_attention_cannot_read_the_window(rule):
    facts = attrs.evolve(EngineFacts(), **rule.example)
    said = f"rows cannot be deferred here: {rule.says(facts)}"
    assert decide("auto", facts) == ("undo", said)
    assert decide("undo", facts).policy == "undo"
    off = decide("deferred", facts)
    assert off.policy == "off"  # a policy asked for by name is never swapped
    assert "cannot work here" in off.reason


@pytest.mark.parametrize("rule", examples("auto"))
def test_auto_takes_undo_where_tokens_may_not_be_stocks(rule):
    """The reason does not claim that rows cannot be deferred, since by name they can."""
    facts = attrs.evolve(EngineFacts(), **rule.example)
    said = f"'auto' does not choose 'deferred' here: {rule.says(facts)}"
    assert decide("auto", facts) == ("undo", said)
    assert decide("deferred", facts) == ("deferred", "asked for")


@pytest.mark.parametrize("asked", ["auto", "deferred"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "fp8"},
        {"sinks": True},
        {"tensor_parallel": 2},
        {"attention": "FLASH_ATTN", "flash": 3},
        {"attention": "TRITON_ATTN"},
        {"attention": "TRITON_ATTN", "alibi": True},
        {"mla": True},
        {"mla": True, "attention": "TRITON_MLA"},
        {"mla": True, "attention": "FLASH_ATTN_MLA"},
    ],
)
def test_on_gpus_sums_are_stocks_so_auto_defers(asked, runner, changes):
    """Drafts are read by vLLM's own attention, whatever the format and whatever it does."""
    facts = EngineFacts(device="cuda", runner=runner, dtype="bfloat16")
    latents = asked == "auto" and runner == "v1" and changes.get("mla")
    found = decide(asked, attrs.evolve(facts, **changes)).policy
    assert found == ("undo" if latents else "deferred")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked", ["undo", "deferred"])
def test_connectors_that_read_durable_rows_only_are_let_in(asked, device):
    facts = EngineFacts(device=device, runner="v1", connectors=CONNECTORS_CHECKED[device])
    assert decide(asked, facts).policy == asked
    with_another = attrs.evolve(facts, connectors=(*facts.connectors, "LMCacheConnectorV1"))
    assert "LMCacheConnectorV1 may copy draft rows" in decide(asked, with_another).reason


MULTI = {"kv_connector": "MultiConnector"}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector"}
BACK = {"bidirectional_kv_xfer": True}
DISK = {"kv_connector_extra_config": {"kv_offload_backend": "disk"}}


@pytest.mark.parametrize(
    ("transfer", "names"),
    [
        ({"kv_connector": None}, []),
        (SIMPLE, ["SimpleCPUOffloadConnector"]),
        (SIMPLE | DISK, ["SimpleCPUOffloadConnector with kv_offload_backend 'disk'"]),
        (SIMPLE | {"kv_connector_module_path": "mine"}, ["mine.SimpleCPUOffloadConnector"]),
        ({"kv_connector": "Mine", "kv_connector_module_path": "mine"}, ["Mine"]),
        (
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": BACK},
            ["NixlConnector with bidirectional_kv_xfer"],
        ),
        (MULTI, ["MultiConnector"]),
        (
            MULTI | {"kv_connector_extra_config": {"connectors": [SIMPLE, SIMPLE | DISK]}},
            [
                "SimpleCPUOffloadConnector",
                "SimpleCPUOffloadConnector with kv_offload_backend 'disk'",
            ],
        ),
    ],
)
def test_connectors_are_named_with_what_is_special_about_them(transfer, names):
    """Several connectors count each, and one that only has a known name is not known by it."""
    assert list(connector_names(SimpleNamespace(**transfer))) == names
    checked = all(name in CONNECTORS_CHECKED["cuda"] or name == "Mine" for name in names)
    facts = EngineFacts(device="cuda", runner="v2", connectors=tuple(names))
    assert (decide("undo", facts).policy == "undo") == (checked and "Mine" not in names)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention": "FLASH_ATTN", "flash": 2}, "blocks of a multiple of 16 rows"),
        ({"attention": "FLASH_ATTN", "flash": 4}, "FlashAttention 4 cannot read"),
        ({"alibi": True}, "for ALiBi vLLM takes FlashAttention 2"),
        ({"spare_blocks": False}, "no spare KV-cache blocks could be added"),
        # The first rule that applies gives the reason; these engines have no spare blocks either.
        ({"attention": "FLASHINFER", "spare_blocks": False}, "FLASHINFER cannot read"),
        ({"attention": "FLASH_ATTN", "flash": 2, "spare_blocks": False}, "FlashAttention 2"),
    ],
)
def test_on_gpus_auto_undoes_where_drafts_cannot_wait(changes, says):
    facts = attrs.evolve(EngineFacts(device="cuda", runner="v2", dtype="bfloat16"), **changes)
    auto = decide("auto", facts)
    assert (auto.policy, says in auto.reason) == ("undo", True)
    off = decide("deferred", facts)
    assert (off.policy, says in off.reason) == ("off", True)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "TRITON_ATTN"},
        {"attention": "TRITON_MLA", "mla": True},
        {"mla": True},  # before the model is loaded: any of latent attention
    ],
)
def test_the_reason_names_what_lets_drafts_wait_under_other_attention(changes):
    """Each step that it names leads to windows, and without one the engine has ``undo``."""
    facts = EngineFacts(device="cuda", runner="v2", dtype="bfloat16", version=ON_ONE_GPU, **changes)
    found = decide("auto", facts)
    assert found.policy == "undo"
    for step in ("policy 'undo'", "the setting 'unchecked'", f"releases {ROW_RELEASES[0]}"):
        assert step in found.reason
    assert decide("undo", facts).policy == "undo"
    assert decide("deferred", attrs.evolve(facts, unchecked=True)).policy == "deferred"
    assert decide("deferred", attrs.evolve(facts, version=ROW_RELEASES[0])).policy == "deferred"
    assert ("attention backend FLASH_ATTN" in found.reason) == ("mla" not in changes)
    if "mla" not in changes:
        flash = attrs.evolve(facts, attention="FLASH_ATTN", flash=3)
        assert decide("deferred", flash).policy == "deferred"


def test_pipeline_stages_before_the_last_one():
    """Off, since nobody saw them on several GPUs; let in, they undo, and nothing waits there."""
    stages = {"version": WITHOUT_STAGES, "pipeline_parallel": 2}
    last = EngineFacts(device="cuda", runner="v2", dtype="bfloat16", **stages)
    early = attrs.evolve(last, last_stage=False)
    for asked in POLICIES:
        assert decide(asked, early).policy == "off"
        assert "not checked on several GPUs" in decide(asked, early).reason
    early = attrs.evolve(early, unchecked=True)
    found = {asked: decide(asked, early) for asked in POLICIES}
    policies = {asked: each.policy for asked, each in found.items()}
    assert policies == {"auto": "undo", "deferred": "off", "undo": "undo", "direct": "direct"}
    assert "another request may read accepted rows" in found["auto"].reason
    assert decide("auto", attrs.evolve(last, unchecked=True)).policy == "deferred"
    connected = attrs.evolve(early, connectors=("OffloadingConnector",))
    assert decide("undo", connected).policy == "off"


def test_spare_blocks_are_a_matter_of_gpus():
    """On the CPU drafts wait in buffers of their own."""
    assert decide("deferred", EngineFacts(spare_blocks=False)).policy == "deferred"


@pytest.mark.parametrize("given", [{}, None, {"other": 1}, "text"])
def test_inactive_unless_asked_for(given):
    assert settings(given, 8, "cpu") is None


def test_settings_are_those_of_the_config():
    found = settings({"kvtxn": {"policy": "undo", "on_error": "raise", "debug": True}}, 24, "cpu")
    assert found is not None
    assert not found.required
    txn = found.txn
    assert (txn.policy, txn.on_error, txn.debug, txn.max_rows) == (
        "undo",
        "raise",
        True,
        24,
    )
    found = settings({"kvtxn": {"policy": "undo", "max_rows": 7}}, 24, "cpu")
    assert found is not None
    assert found.txn.max_rows == 7


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("undo", ConfigError, "expected a dict, got 'undo'"),
        (None, ConfigError, "expected a dict, got None"),
        ({"polcy": "undo"}, ConfigError, "there is no setting 'polcy'"),
        ({"polcy": "undo"}, ConfigError, "did you mean 'policy'?"),
        ({"polcy": "undo"}, ConfigError, "one of policy, backend, max_rows, "),
        ({"zzz": 1, "policy": "undo"}, ConfigError, "there is no setting 'zzz'"),
        ({"policy": "undo", "required": "yes"}, ConfigError, "expected true or false, got 'yes'"),
        ({"policy": "undo", "max_rows": "64"}, ConfigError, "expected a positive int of at most"),
        ({"debug": True}, ConfigError, "names neither a policy nor an audit"),
        ({"policy": "undoo"}, ConfigError, "policy is not valid"),
        ({"policy": "undoo"}, ConfigError, "did you mean 'undo'?"),
        ({"policy": "Auto"}, ConfigError, "got 'Auto'; did you mean 'auto'?"),
        ({"policy": "none"}, ConfigError, """got 'none'; write "policy": "auto\""""),
        ({"policy": ["undo"]}, ConfigError, """got ['undo']; write "policy": "auto\""""),
        ({"policy": "auto", "backend": "Torch"}, BackendUnavailableError, "did you mean 'torch'?"),
        ({"policy": "auto", "on_error": "Raise"}, ConfigError, "did you mean 'raise'?"),
        ({"audit": "ledgers"}, ConfigError, "did you mean 'ledger'?"),
        ({"policy": "undo", "backend": "abacus"}, BackendUnavailableError, "'abacus'"),
    ],
)
def test_bad_settings_are_sentences(given, error, text):
    with pytest.raises(error) as caught:
        settings({"kvtxn": given}, 8, "cpu")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        *({"policy": policy} for policy in ("Auto", "defered", "of", "", "x" * 400)),
        {"audit": "ledgers"},
        {"policy": "auto", "recurrent": "Exact"},
        {"policy": "auto", "backend": "Torch"},
        {"policy": "auto", "acceptance": "Loop"},
    ],
)
def test_what_a_hint_offers_is_not_refused(given):
    """The value that a hint names in place of the wrong one is taken."""
    with pytest.raises(KVTxnError) as caught:
        settings({"kvtxn": given}, 8, "cpu")
    *_, wrong = given
    offered = re.findall(r"'(\w+)'\?|\"(\w+)\"$", caught.value.hint)
    [value] = [name for pair in offered for name in pair if name]
    assert settings({"kvtxn": given | {wrong: value}}, 8, "cpu") is not None


def test_what_is_required_is_no_setting_of_the_library():
    found = settings({"kvtxn": {"policy": "auto", "required": True}}, 8, "cpu")
    assert found is not None
    assert (found.required, found.txn) == (True, TxnConfig(policy="auto", max_rows=8))


@pytest.mark.parametrize(("name", "value"), [("staging", "copy"), ("acceptance", "loop")])
def test_a_setting_without_effect_is_refused(name, value):
    """The device that does not use the setting refuses any value of it but "auto"."""
    assert name in WITHOUT_EFFECT["cuda"]
    given = {"kvtxn": {"policy": "auto", name: value}}
    assert settings(given, 8, "cpu") is not None
    assert settings({"kvtxn": {"policy": "auto", name: "auto"}}, 8, "cuda") is not None
    with pytest.raises(ConfigError, match=f"{name} has no effect on device cuda: .*; leave {name}"):
        settings(given, 8, "cuda")


def test_unchecked_is_true_or_false_and_needs_a_policy():
    found = settings({"kvtxn": {"policy": "auto", "unchecked": True}}, 8, "cpu")
    assert found is not None
    assert (found.unchecked, found.txn) == (True, TxnConfig(policy="auto", max_rows=8))
    with pytest.raises(ConfigError, match="expected true or false, got 'yes'"):
        settings({"kvtxn": {"policy": "auto", "unchecked": "yes"}}, 8, "cpu")
    with pytest.raises(ConfigError, match="unchecked has no effect without a policy"):
        settings({"kvtxn": {"audit": "ledger", "unchecked": True}}, 8, "cpu")


WINDOWS = {
    "backend": "torch", "max_rows": 64, "acceptance": "loop", "on_error": "raise",
    "staging": "copy", "debug": True,
}  # fmt: skip


def test_every_setting_of_windows_is_tried_without_a_policy():
    assert {"policy", *WINDOWS} == {field.name for field in attrs.fields(TxnConfig)}


@pytest.mark.parametrize("policy", ["undo", "direct"])
def test_rows_that_nobody_holds_are_not_copied(policy):
    """Only under a deferred commit rows wait, copied or not."""
    with pytest.raises(ConfigError, match=f"staging has no effect under policy '{policy}'"):
        settings({"kvtxn": {"policy": policy, "staging": "copy"}}, 8, "cpu")
    assert settings({"kvtxn": {"policy": policy, "staging": "auto"}}, 8, "cpu") is not None


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("policy", [{}, {"policy": None}])
def test_settings_of_windows_need_a_policy(name, policy):
    """An audit alone opens no window, so they would be taken and do nothing."""
    given = {"audit": "ledger", name: WINDOWS[name]}
    with pytest.raises(ConfigError, match=f"{name} has no effect without a policy: no window"):
        settings({"kvtxn": {**given, **policy}}, 8, "cpu")
    assert settings({"kvtxn": {**given, "policy": "deferred"}}, 8, "cpu") is not None
    assert settings({"kvtxn": {"audit": "ledger", **policy, "required": True}}, 8, "cpu")


@pytest.mark.parametrize(
    "facts",
    [
        {"version": UNLISTED},
        {"version": UNLISTED, "device": "cuda", "runner": "v2"},
    ],
)
def test_a_release_that_was_not_checked_is_the_users_choice(facts):
    """Without the setting the reason names it."""
    off = decide("auto", EngineFacts(**facts))
    assert off.policy == "off"
    assert "; with the setting 'unchecked' windows start after a self-test, but not" in off.reason
    assert on_trial(EngineFacts(**facts, unchecked=True))
    assert not on_trial(EngineFacts(**facts))
    assert decide("deferred", EngineFacts(**facts, unchecked=True)).policy == "deferred"


def test_a_checked_release_is_not_on_trial():
    facts = EngineFacts(unchecked=True)
    assert not on_trial(facts)
    assert hook_gone(facts) is None


def test_on_error_is_known_even_if_the_rest_is_wrong():
    assert wants({"kvtxn": {"policy": "undoo", "on_error": "raise"}}, "on_error", "raise")
    assert wants({"kvtxn": {"policy": "undoo", "required": True}}, "required", True)
    for given in ({"kvtxn": {"policy": "undoo"}}, {"kvtxn": "undo"}, None):
        assert not wants(given, "on_error", "raise")
        assert not wants(given, "required", True)
