"""The doctor's words about what several attention backends or releases make of one engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest
from kvtxn.integrations.vllm_plugin.policy import doctor
from kvtxn.integrations.vllm_plugin.policy.engine_facts import EngineFacts
from kvtxn.integrations.vllm_plugin.policy.matrix import (
    BACKENDS,
    CHOSEN,
    CONVOLVED,
    FAST,
    LATENT,
    MIXED,
    MIXED_FAST,
    OLMO,
    ONLY,
    PLAIN,
    RELEASES,
    SEEN,
    STATES,
    WITHOUT,
    matrix,
)
from kvtxn.integrations.vllm_plugin.policy.rules import decide

#: What real engines showed on a GPU; by the beginning of a name there, an engine's model.
RECORD = Path(__file__).parents[2] / "gpu" / "seen.json"
MODELS = {
    **{"granite": "Granite 4", "nemotron": "Nemotron-H", "falcon": "Falcon-H1"},
    **{"olmo": "OLMo Hybrid", "lfm2": "LFM2", "experts": "Qwen3-Next"},
}
#: Families of one kind of model.
WHOLE = {OLMO: "OLMo Hybrid", CONVOLVED: "LFM2"}
#: Other families of states than gated delta nets', and of them what has kernels of kvtxn's.
FAMILIES = {
    **dict.fromkeys(("granite", "nemotron", "falcon"), (MIXED, MIXED_FAST)),
    **{"olmo": (OLMO, OLMO), "lfm2": (CONVOLVED, CONVOLVED)},
}
LATENT_ROWS = EngineFacts(version="0.33.0", device="cuda", runner="v2", mla=True, dtype="bfloat16")


@pytest.mark.parametrize("asked", ["auto", "deferred", "undo"])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_backends_that_would_change_the_policy_of_latent_attention_are_named(asked, version):
    """VLLM chooses among them when it loads the model; the plug-in decides then."""
    facts = attrs.evolve(LATENT_ROWS, version=version)
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
    facts = attrs.evolve(LATENT_ROWS, **{"runner": "v1", **changes})
    assert doctor._decide("auto", facts, None) == decide("auto", facts)


def recorded(release):
    """By device and runner, then family and parallelism: models that the record has."""
    seen = json.loads(RECORD.read_text("utf-8"))
    found = {}
    for engine, what in (*seen["states"].items(), *seen["fast"].items()):
        name, _, named = engine.partition(", vLLM ")
        if (named or "0.33.0") != release or name.startswith("vLLM"):  # the page names others
            continue
        start, policy = name.partition(".")[0].partition("_")[0], name.rpartition(".")[2]
        family = FAMILIES.get(start, (STATES, FAST))[policy == "fast"]
        parallel = "tensor" if start == "ranks" else "one worker"
        kinds = found.setdefault(("cuda", what["runner"]), {})
        kinds.setdefault((family, parallel), set()).add(MODELS.get(start, "Qwen3.5"))
    return found


@pytest.mark.parametrize("where", recorded("0.33.0"))
def test_hybrids_are_seen_as_the_matrix_says(where):
    """Families, models and policies are those of the record, the newest release's if not said."""
    said, found = {}, recorded("0.33.0")[where]
    for (family, *_, parallel), policies in SEEN[where].items():
        if family not in (PLAIN, LATENT, CHOSEN):
            assert "deferred" in policies
            text = ONLY[where].get((family, parallel)) or WHOLE[family]
            names, _, older = text.partition(", and with vLLM 0.32.0 ")
            assert not older or older in recorded("0.32.0")[where][family, parallel]
            models = re.split(", | and ", names.removesuffix(" with enforce_eager=True"))
            said[family, parallel] = set(models)
    assert said == found


@pytest.mark.parametrize("version", RELEASES["cuda"])
def test_the_release_is_the_engines_own(version):
    """Or the newest in which the tests could run its attention."""
    facts = EngineFacts(version=version, device="cuda", runner="v2", flash=3)
    rows = [row for row in matrix(facts) if row.seen]
    lacking = [row for row in rows if row.kinds[0][1] in WITHOUT.get(version, ())]
    assert {row.release for row in rows if row not in lacking} == {version}
    assert all(str(row).endswith("seen running with vLLM 0.32.0") for row in lacking)
    assert bool(lacking) == (version in WITHOUT)
