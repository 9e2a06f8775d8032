"""GRID.md is what the recorded run says, and the record covers the grid as it is now."""

from __future__ import annotations

import json

import pytest
from engine_jobs import COMPARED, JOBS, POLICIES, covered
from grid_table import RECORD, TABLE, draw
from kvtxn.integrations.vllm_plugin.policy.matrix import (
    ALIBI,
    CONVOLVED,
    LATENT,
    MIXED,
    PLAIN,
    SEEN,
    SHARED,
    SINKS,
    STATES,
)

GRID = json.loads(RECORD.read_text())


def test_the_table_is_drawn_from_the_record():
    assert TABLE.read_text() == draw(GRID)


def test_every_cell_of_the_grid_is_recorded():
    assert list(GRID) == COMPARED
    for job, found in GRID.items():
        policies = found["policies"]
        assert [*policies] == [p for p in POLICIES if p not in JOBS[job].get("left_out", ())]
        cells = [(policy, name) for policy, found in policies.items() if isinstance(found, dict)
                 for name in found]  # fmt: skip
        assert cells == covered(job)
        assert all(policies.values()), "neither cells nor a reason"


def test_the_matrix_says_what_was_seen():
    """Kinds of engines that are recorded next to stock, and under which policies."""
    families = {"deepseek": LATENT, "bloom": ALIBI, "gptoss": SINKS, "gemma3n": SHARED}
    found = {  # the engines of tests/vllm_plugin/states
        (family, "CPU_ATTN", number, parallel): {"deferred"}
        for family, number, parallel in (
            (STATES, "bfloat16", "one worker"),
            (STATES, "bfloat16", "tensor"),
            (MIXED, "bfloat16", "one worker"),
            (MIXED, "float32", "one worker"),
            (CONVOLVED, "bfloat16", "one worker"),
        )
    }
    for job, recorded in GRID.items():
        family = families.get(JOBS[job]["model"], PLAIN)
        options = JOBS[job].get("options", {})
        parallel = "tensor" if "tensor_parallel_size" in options else "one worker"
        number = options.get("kv_cache_dtype", JOBS[job].get("dtype", "float32"))
        kind = (family, JOBS[job].get("attention", "CPU_ATTN"), number, parallel)
        cells = recorded["policies"]
        seen = {policy for policy in cells if isinstance(cells[policy], dict)}
        found[kind] = found.get(kind, set()) | seen
    assert found == {kind: set(policies) for kind, policies in SEEN["cpu", "v1"].items()}


@pytest.mark.parametrize("job", COMPARED)
def test_the_record_says_what_a_run_says(reports, job):
    """Policies that stay out say today what they said then."""
    decisions = reports(job)["stock"]["decisions"]
    for policy, cells in GRID[job]["policies"].items():
        if isinstance(cells, str):
            assert decisions[policy] == ["off", cells]
        else:
            assert policy in JOBS[job]["engines"]
