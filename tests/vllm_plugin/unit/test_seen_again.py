"""The doctor's words about what several attention backends or releases make of one engine."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from kvtxn.integrations.vllm_plugin.policy import doctor
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.matrix import (
    BACKENDS,
    CONVOLVED,
    FAST,
    MIXED,
    MIXED_FAST,
    OLMO,
    SEEN,
    STATES,
    STATES_AGAIN,
    matrix,
)
from kvtxn.integrations.vllm_plugin.policy.rules import decide

#: What real engines showed on a GPU; by the beginning of a name there, an engine's model.
RECORD = Path(__file__).parents[2] / "gpu" / "seen.json"
MODELS = {
    **{"granite": "Granite 4", "nemotron": "Nemotron-H", "falcon": "Falcon-H1"},
    **{"olmo": "OLMo Hybrid", "lfm2": "LFM2"},
}
#: Other families of states than gated delta nets', and of them what has kernels of kvtxn's.
FAMILIES = {
    **dict.fromkeys(("granite", "nemotron", "falcon"), (MIXED, MIXED_FAST)),
    **{"olmo": (OLMO, OLMO), "lfm2": (CONVOLVED, CONVOLVED)},
}
LATENT = EngineFacts(version="0.33.0", device="cuda", runner="v2", mla=True, dtype="bfloat16")
ALONE = ("bfloat16",)


@pytest.mark.parametrize("asked", ["auto", "deferred", "undo"])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_backends_that_would_change_the_policy_of_latent_attention_are_named(asked, version):
    """VLLM chooses among them when it loads the model; the plug-in decides then."""
    facts = attrs.evolve(LATENT, version=version)
    found = doctor._decide(asked, facts, None)
    assert found.policy == decide(asked, facts).policy
    for backend in BACKENDS["cuda"][1]:
        policy = decide(asked, attrs.evolve(facts, attention=backend)).policy
        clauses = [part for part in found.reason.split("; ") if part.startswith(f"{policy} with ")]
        named = [clause for clause in clauses if backend in clause.split()]
        assert bool(named) == (policy != found.policy and found.policy != "off"), backend


@pytest.mark.parametrize(
    "changes",
    [{"mla": False}, {"attention": "TRITON_MLA"}, {"device": "cpu", "version": "0.32.0"}],
)
def test_nothing_is_added_where_the_attention_is_known(changes):
    facts = attrs.evolve(LATENT, **{"runner": "v1", **changes})
    assert doctor._decide("auto", facts, None) == decide("auto", facts)


def recorded(release):
    """Return what the record says, in the form of ``STATES_AGAIN``."""
    seen = json.loads(RECORD.read_text("utf-8"))
    found = {}
    for engine, what in (*seen["states"].items(), *seen["fast"].items()):
        name, _, named = engine.partition(", vLLM ")
        if (named or "0.33.0") != release or name.startswith("vLLM"):  # the page names others
            continue
        start, policy = name.partition(".")[0].partition("_")[0], name.rpartition(".")[2]
        family = FAMILIES.get(start, (STATES, FAST))[policy == "fast"]
        kinds = found.setdefault(("cuda", what["runner"]), {})
        kinds.setdefault(family, set()).add(MODELS.get(start, "Qwen3.5"))
    return found


@pytest.mark.parametrize("release", STATES_AGAIN)
def test_hybrids_that_were_seen_with_another_release_too(release):
    """The matrix names what the record has; in the release of all others nothing is added."""
    said = {
        where: {family: set(models.split(", ")) for family, models in families.items()}
        for where, families in STATES_AGAIN[release].items()
    }
    assert said == recorded(release)
    for device, runner in said:
        facts = EngineFacts(version=release, device=device, runner=runner, flash=3)
        rows = matrix(facts)
        for family, models in STATES_AGAIN[release][device, runner].items():
            assert "deferred" in SEEN[device, runner][family, "FLASH_ATTN", *ALONE, "one worker"]
            ends = f"; deferred seen running with vLLM {release}: {models}"
            [row] = [row for row in rows if row.again and (family, "FLASH_ATTN") in row.kinds]
            assert str(row).endswith(ends)
            assert {backend for _, backend in row.kinds} == {"FLASH_ATTN"}
            assert row.parallelism == ("one worker",)
        assert not [row for row in matrix(attrs.evolve(facts, version="0.32.0")) if row.again]
