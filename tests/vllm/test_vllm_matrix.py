"""The doctor's matrix says of every kind of engine what the plugin's table decides."""

from __future__ import annotations

from itertools import product

import attrs
import pytest
import vllm_models
from kvtxn.integrations import vllm_internals as internals
from kvtxn.integrations import vllm_internals_gpu as inside
from kvtxn.integrations.vllm_facts import Facts
from kvtxn.integrations.vllm_lacks import LACKS
from kvtxn.integrations.vllm_matrix import (
    ALIBI,
    BACKENDS,
    FAMILIES,
    FORMATS,
    PARALLELISM,
    PLAIN,
    SEEN,
    SHARED,
    SINKS,
    matrix,
)
from kvtxn.integrations.vllm_policy import RULES, decide
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
    assert "on CPU_MLA | float32 | one worker: deferred, undo by name (" in plain


def test_what_was_seen_is_in_its_line():
    """Next to what is promised from reading alone."""
    rows = matrix(Facts(device="cuda", runner="v2"))
    [seen] = [
        str(row)
        for row in rows
        if (PLAIN, "FLASH_ATTN") in row.kinds
        and "bfloat16" in row.formats
        and "one worker" in row.parallelism
    ]
    assert ": deferred, undo by name (" in seen
    assert seen.endswith("; seen running")
    lines = [str(row) for row in rows]
    unseen = [line for line in lines if line.endswith("; not seen running")]
    for family in ("ALiBi", "sinks", "share rows"):
        assert any(family in line for line in unseen)
    assert not any(": off" in line and "seen" in line for line in lines)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_flash_attention_defers_whatever_it_sums(runner):
    """In version 3, which lacks ALiBi; shared rows are read within the forward."""
    families = {PLAIN, ALIBI, SINKS, SHARED}
    undone = {ALIBI, SHARED}
    rows = matrix(Facts(device="cuda", runner=runner))
    found = {
        (family, number): row.auto.policy
        for row in rows
        for (family, backend), number in product(row.kinds, row.formats)
        if backend == "FLASH_ATTN" and "one worker" in row.parallelism and family in families
    }
    for family in families:
        policy = "undo" if family in undone else "deferred"
        assert found[family, "bfloat16"] == found[family, "fp8"] == policy
        assert found[family, "float32"] == "off"


@pytest.mark.parametrize("flash", [2, 3, None])
def test_of_flash_attention_the_version_of_this_machine_counts(flash):
    """Where it is known; other backends do not care."""
    rows = matrix(Facts(device="cuda", runner="v2", flash=flash))
    for row in rows:
        for facts in row.facts:
            assert facts.flash == (flash if facts.attention == "FLASH_ATTN" else None)
    kinds = [kind for row in rows if row.auto.policy == "deferred" for kind in row.kinds]
    assert ((PLAIN, "FLASH_ATTN") in kinds) == (flash != 2)


@pytest.mark.parametrize("version", ["0.28.0", "0.32.0"])
@pytest.mark.parametrize("flash", [2, 3])
def test_the_doctor_asks_vllm_which_one_that_is(flash, version, monkeypatch):
    """On GPUs, of the releases that run there with windows."""
    asked = []
    monkeypatch.setattr(internals, "version", lambda: version)
    monkeypatch.setattr(internals, "device_type", lambda: "cuda")
    monkeypatch.setattr(inside, "flash_version", lambda config=None: asked.append(1) or flash)
    policies = report(None)["policies"]
    if version == "0.28.0":
        assert not asked
        return
    assert policies[0].startswith("auto -> deferred" if flash == 3 else "auto -> undo")


def test_what_was_seen_under_one_policy_alone_is_said(monkeypatch):
    [kind] = [kind for kind, policies in SEEN["cpu", "v1"].items() if kind[2] == "fp8"]
    monkeypatch.setitem(SEEN["cpu", "v1"], kind, ("undo",))
    lines = [str(row) for row in matrix(Facts())]
    assert any("fp8" in line and line.endswith("; undo seen running") for line in lines)


@pytest.mark.parametrize("where", SEEN)
def test_what_was_seen_is_a_kind_of_engine_that_can_be(where):
    device, runner = where
    rows = matrix(Facts(device=device, runner=runner))
    drawn = {
        (*kind, number, parallelism): row.seen
        for row in rows
        for kind, number, parallelism in product(row.kinds, row.formats, row.parallelism)
        if row.seen
    }
    assert {kind: set(seen) for kind, seen in drawn.items()} == {
        kind: set(seen) for kind, seen in SEEN[where].items()
    }


@pytest.mark.parametrize("backend", LACKS)
def test_what_vllm_lacks_is_what_it_declares(backend):
    """Types of models and formats of caches, where the backend can be imported here."""
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    try:
        found = registry.AttentionBackendEnum[backend].get_class()
    except (ImportError, AssertionError) as error:
        pytest.skip(f"{backend} cannot be imported here: {error}")
    types = {str(each).removeprefix("torch.") for each in found.supported_dtypes}
    assert types >= {"float16", "bfloat16"}
    assert ("float32" in LACKS[backend]) == ("float32" not in types)
    assert ("fp8" in LACKS[backend]) == ("fp8" not in found.supported_kv_cache_dtypes)


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
