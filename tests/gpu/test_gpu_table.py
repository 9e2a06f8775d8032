"""GRID.md is what the recorded runs say, and the records are clean; no GPU needed."""

from __future__ import annotations

import json

import pytest
from gpu_jobs import JOBS, scenarios, timed
from gpu_seen import RECORD as SEEN_RECORD
from gpu_table import RECORD, draw, page_for, record_for, records, release_of
from gpu_ties import NEAR, NOISE
from kvtxn.integrations.vllm_plugin.policy import matrix as vllm_matrix
from kvtxn.integrations.vllm_plugin.policy.supported import ATTENTION, RUNNERS

GRID = json.loads(RECORD.read_text())
STAGED = json.loads(SEEN_RECORD.read_text())["stages"]
PAGE_RELEASE = "0.33.0"
GRIDS = {release_of(grid): grid for grid in (json.loads(path.read_text()) for path in records())}
SEEN = [
    pytest.param(release, kind, policy, id=f"{release}-{kind}-{policy}")
    for release, grid in GRIDS.items()
    for kind, policies in grid["jobs"].items()
    for policy in policies
    if policy in ("undo", "deferred")
]


@pytest.mark.parametrize("release", GRIDS)
def test_a_page_is_drawn_from_its_record(release):
    assert page_for(record_for(release)).read_text() == draw(GRIDS[release])


#: Engines, and policies of engines, that were added since the record was made.
NEW: tuple[str, ...] = (
    "v1_mla.deferred",
    "v1_mtp.deferred",
)


def test_what_needs_one_gpu_is_recorded():
    """Every policy and scenario of it; stock again or with another attention only explains."""
    assert set(JOBS) - set(GRID["jobs"]) == {name for name in NEW if "." not in name}
    for name, found in JOBS.items():
        if found.get("gpus", 1) == 1 and name not in NEW:
            added = {policy for policy in found["policies"] if f"{name}.{policy}" in NEW}
            wanted = {"stock", *found["policies"]} - {"again", "other"}
            assert wanted - set(GRID["jobs"][name]) == added
            for seen in GRID["jobs"][name].values():
                assert list(seen["cells"]) == ["unwatched", *scenarios(name)]


@pytest.mark.parametrize(("release", "kind", "policy"), SEEN)
def test_a_record_is_clean(release, kind, policy):
    """No rejected row left, none lost, nothing else changed, nothing early, no fallback, and ties.

    Older cells do not say what was lost, nor how near logits are.
    """
    found = GRIDS[release]["jobs"][kind][policy]
    for scenario, cell in found["cells"].items():
        if "switched" in cell and not timed(found, kind, scenario):
            assert cell["switched"] == cell["requests"]
        assert cell["fallbacks"] == 0
        assert cell.get("lost", 0) == 0
        assert cell.get("gap", 0) <= NEAR
        assert cell.get("noise", 0) <= NOISE
        bypassed = sum(cell["bypassed"].values())
        if not bypassed:
            assert not any(cell.get(key, 0) for key in ("rejected_written", "strays"))
            assert policy == "undo" or cell.get("early", 0) == 0
        elif "windows" in cell:
            # Such steps are stock's: they leave no more than their share, in a few layers each.
            share = 1.2 * bypassed / cell["windows"]
            assert cell["rejected_written"] <= share * cell["rejected"]
            assert cell["early"] <= share * cell["drafted"]
            assert cell["strays"] <= 4 * bypassed


def test_the_table_names_what_was_seen():
    """The attention backends and runners that the plug-in lets have windows on a GPU."""
    kept = [
        seen
        for policies in GRID["jobs"].values()
        for policy, seen in policies.items()
        if policy in ("undo", "deferred")
    ]
    assert {seen["attention"] for seen in kept} == set(ATTENTION["cuda"])
    assert {seen["runner"] for seen in kept} == set(RUNNERS["cuda"])


def kinds_in(grid):
    """Kinds of engines in which windows were recorded, by runner, and under which policies."""
    families = dict.fromkeys(("llama", "demo", "gemma3"), vllm_matrix.PLAIN)
    found = {}
    for name, policies in grid["jobs"].items():
        options = JOBS[name].get("options", {})
        parallel = "tensor" if "tensor_parallel_size" in options else "one worker"
        if "pipeline_parallel_size" in options:
            parallel = "pipeline (last stage)"
        for policy, seen in policies.items():
            if policy in ("deferred", "undo") and "cells" in seen:
                family = families.get(JOBS[name]["model"], vllm_matrix.LATENT)
                number = options.get("kv_cache_dtype", "bfloat16")
                kind = (family, seen["attention"], number, parallel)
                kinds = found.setdefault(("cuda", seen["runner"]), {})
                kinds[kind] = kinds.get(kind, set()) | {policy}
    return found


def kinds_on_stages(release):
    """The same of ``try_stages``' engines on several GPUs with a release."""
    found = {}
    for name, engine in STAGED.items():
        if (name.partition(", vLLM ")[2] or PAGE_RELEASE) != release or len(engine["stages"]) == 1:
            continue
        latent = engine["attention"] == "TRITON_MLA"
        number = "float32" if engine["attention"] == "TRITON_ATTN" else "bfloat16"
        for stage in engine["stages"]:
            staged = not all(each["last"] for each in engine["stages"])
            which = "last stage" if stage["last"] else "other stages"
            kind = (
                vllm_matrix.LATENT if latent else vllm_matrix.PLAIN,
                *(engine["attention"], number, f"pipeline ({which})" if staged else "tensor"),
            )
            found[kind] = found.get(kind, set()) | {stage["policy"]}
    return found


@pytest.mark.parametrize("release", vllm_matrix.RELEASES["cuda"])
def test_the_matrix_says_what_was_seen(release):
    """Exactly that of the oldest release, and of newer ones the same; hybrids are in seen.json."""
    found, without = kinds_in(GRIDS[release]), vllm_matrix.WITHOUT.get(release, ())
    for kind, policies in kinds_on_stages(release).items():
        kinds = found["cuda", "v2"]
        kinds[kind] = kinds.get(kind, set()) | policies
    for where, kinds in found.items():
        said = {
            kind: set(policies)
            for kind, policies in vllm_matrix.SEEN[where].items()
            if kind[0] in (vllm_matrix.PLAIN, vllm_matrix.LATENT) and kind[1] not in without
        }
        assert said.keys() == kinds.keys()
        assert all(said[kind] <= kinds[kind] for kind in said)
        if release == vllm_matrix.RELEASES["cuda"][-1]:
            assert said == kinds
