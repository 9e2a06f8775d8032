"""KV connectors on a GPU: requests that come back through one, and every byte that leaves.

``pytest tests/gpu -k connectors`` runs these engines alone, and prints what each of them showed.
"""

from __future__ import annotations

import pytest
from connected_jobs import JOBS, leaked, strange
from gpu_jobs import V1
from gpu_ties import compare
from kvtxn.integrations.vllm_plugin.policy.release_records import number

CELLS = [
    pytest.param(kind, policy, scenario, id=f"{kind}-{policy}-{scenario}")
    for kind, found in JOBS.items()
    for policy in ("stock", *found["policies"])
    for scenario in found["scenarios"]
]
WINDOWS = [cell for cell in CELLS if cell.values[1] != "stock"]
KINDS = [(kind, policy) for kind, found in JOBS.items() for policy in ("stock", *found["policies"])]

#: Parts of vLLM's errors for a connector whose package is not installed.
NOT_HERE = ("No module named 'cuda", "cuda.bindings")


def report_of(connected, kind, policy):
    """The report of an engine; a skip where stock cannot run on this machine either."""
    stock, found = (connected(f"{kind}.{each}") for each in ("stock", policy))
    if any(text in stock.get("error", "") for text in NOT_HERE):
        pytest.skip(f"stock cannot run here: {stock['error']}")
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize(("connected_kind", "policy"), KINDS)
def test_connectors_engine_is_the_one_that_was_meant(connected, connected_kind, policy):
    """The engine has windows if it should, the policy that was asked for, and the runner."""
    found = report_of(connected, connected_kind, policy)
    active = [bool(counts["kvtxn_active"]) for counts in found["idle"]]
    assert active == [policy != "stock"] * len(active), found.get("log")
    old = number(found["release"]) < (0, 32)  # where the V2 runner knows no n-grams
    v1 = JOBS[connected_kind].get("environment") == V1 or old
    assert found["runner"] == ("v1" if v1 else "v2")
    if policy != "stock":
        chosen = "undo" if policy == "auto" else policy  # no job has "auto" but one that takes it
        assert f"policy='{chosen}'" in found["log"], found["log"]


@pytest.mark.parametrize(("connected_kind", "policy", "scenario"), CELLS)
def test_connectors_say_what_stock_says_without_one(connected, connected_kind, policy, scenario):
    """Requests whose rows came back say what they say where every row is computed anew."""
    ours, job = report_of(connected, connected_kind, policy), JOBS[connected_kind]
    plain = connected(f"{job['plain'] or connected_kind}.stock")
    assert "error" not in plain, plain["error"]
    if job.get("loads", True):
        seen = [ours[each]["egress"].get("loaded_blocks", 0) for each in job["scenarios"]]
        assert sum(seen) > 0
    assert strange(compare(ours[scenario], plain[scenario])) == {}


@pytest.mark.parametrize(("connected_kind", "policy", "scenario"), WINDOWS)
def test_connectors_get_durable_rows_only(connected, connected_kind, policy, scenario):
    """Each byte that left was durable, and so is each row that stays; what came back had left."""
    report = report_of(connected, connected_kind, policy)
    found = report[scenario]
    assert leaked(found["egress"], found["kvtxn"][-1]) == {}, found["egress"]["told"]
    # One stores nothing, and of another one an earlier engine stored all prompts.
    if connected_kind not in ("connectors_bench", "connectors_second"):
        seen = [report[each]["egress"] for each in JOBS[connected_kind]["scenarios"]]
        assert sum(each.get("stored_bytes", 0) + each.get("stored_rows", 0) for each in seen) > 0


@pytest.mark.parametrize("connected_kind", JOBS)
def test_connectors_oracle_sees_rejected_rows_in_stock(connected, connected_kind):
    """The oracle can fail: a stock engine's cache has rows that no accepted token left there."""
    found = report_of(connected, connected_kind, "stock")
    seen = [found[scenario]["egress"] for scenario in JOBS[connected_kind]["scenarios"]]
    assert sum(each.get("residue", 0) for each in seen) > 0
