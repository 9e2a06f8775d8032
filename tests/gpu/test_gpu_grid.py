"""Real vLLM on a GPU: tokens part from stock's at near-ties alone, as stock's own do.

One engine says the same to the last bit with its windows on and off. No policy leaves a rejected
row behind, and none loses an accepted one.
"""

from __future__ import annotations

import pytest
from failing_stage import STAGES
from gpu_jobs import BOTH, JOBS, NOT_HERE, PARTIAL, STOCK, attention, runner, scenarios, timed
from gpu_judge import far, miscounted, unrecovered
from gpu_ties import compare

ALL = [
    (kind, policy, scenario)
    for kind, found in JOBS.items()
    for policy in found["policies"]
    for scenario in ("unwatched", *scenarios(kind))
]
CELLS = [pytest.param(*cell, id="-".join(cell)) for cell in ALL if cell[1] not in STOCK]
STOCKS = [pytest.param(*cell, id="-".join(cell)) for cell in ALL if cell[1] in STOCK]


def reports_of(reports, kind, *policies):
    """The reports of these policies; a skip where stock cannot run on this machine either."""
    found = reports(kind)
    if NOT_HERE in (error := found.get("stock", {}).get("error", "")):
        pytest.skip(f"stock cannot run here: {error}")
    for policy in policies:
        assert "error" not in found[policy], found[policy]["error"]
    return [found[policy] for policy in policies]


@pytest.mark.parametrize(("kind", "policy", "scenario"), CELLS)
def test_a_cell(reports, kind, policy, scenario):
    """Tokens and acceptance are stock's but for near-ties; the caches are clean."""
    report, ours = reports_of(reports, kind, "stock", policy)
    stock, ours, active = report[scenario], ours[scenario], active_ranks(ours)
    assert far(kind, compare(ours, stock)) == {}
    assert 0 < ours["stats"]["accepted"] <= ours["stats"]["drafted"]
    assert active == JOBS[kind].get("active", [True] * len(active))
    seen_by_rank = ours.get("oracle", [None] * len(active))
    pairs = zip(ours["kvtxn"], seen_by_rank, strict=True)
    ranks = [pair for pair, on in zip(pairs, active, strict=True) if on]
    for counts, seen in ranks:
        assert counts == ranks[0][0]
        assert counts["kvtxn_fallbacks_total"] == 0
        assert counts["kvtxn_windows_total_committed"] == counts["kvtxn_windows_total"] > 0
        if seen is not None:
            assert miscounted(counts, seen, policy) == {}


@pytest.mark.parametrize(("kind", "policy", "scenario"), CELLS)
def test_windows_change_no_bit(reports, kind, policy, scenario):
    """With its windows off an engine is stock, and its kernels are the same."""
    [report] = reports_of(reports, kind, policy)
    ours, stock = report[scenario], report[scenario]["off"]
    assert not any(counts.get("kvtxn_windows_total") for counts in stock["kvtxn"])
    if timed(report, kind, scenario):
        assert far(kind, compare(ours, stock)) == {}
        return
    for key in ("prompts", "tokens", "logits", "stats"):
        assert ours[key] == stock[key]


@pytest.mark.parametrize(("kind", "policy", "scenario"), STOCKS)
def test_stock_next_to_stock(reports, kind, policy, scenario):
    """Stock itself, run again or with another attention, passes the rules for kvtxn's engines."""
    stock, other = reports_of(reports, kind, "stock", policy)
    assert far(kind, compare(other[scenario], stock[scenario])) == {}


def active_ranks(report):
    """Tell of each rank whether kvtxn is active."""
    return [bool(counts["kvtxn_active"]) for counts in report["idle"]]


@pytest.mark.parametrize("kind", JOBS)
def test_the_oracle_sees_rejected_rows_in_stock(reports, kind):
    """The oracle can fail: without kvtxn it finds rejected rows in the cache."""
    [stock] = reports_of(reports, kind, "stock")
    seen = [stock[scenario]["oracle"][-1] for scenario in scenarios(kind)]
    rejected, written, strays = (
        sum(each.get(key, 0) for each in seen) for key in ("rejected", "rejected_written", "strays")
    )
    assert written > 0.3 * rejected > 0
    assert strays > 0


@pytest.mark.parametrize("kind", JOBS)
def test_the_engine_is_the_one_that_was_meant(reports, kind):
    """The engine has the attention, the runner and the graphs that its job asks for."""
    policies = ("stock", *JOBS[kind]["policies"])
    for policy, found in zip(policies, reports_of(reports, kind, *policies), strict=True):
        assert found["attention"] == attention(kind, policy)
        assert found["runner"] == runner(kind, found.get("release", "0.32.0"))
        assert found["graphs"] != "NONE"


@pytest.mark.parametrize("kind", [kind for kind in JOBS if kind not in PARTIAL])
def test_what_is_not_covered_has_a_reason(reports, kind):
    """A policy that a kind leaves out stays out by itself, and says why."""
    [stock] = reports_of(reports, kind, "stock")
    taken = *JOBS[kind]["policies"], *JOBS[kind].get("elsewhere", ())
    for policy in ("undo", "deferred"):
        outcome, reason = stock["decisions"][policy]
        assert outcome == (policy if policy in taken else "off")
        assert reason


@pytest.mark.parametrize("kind", ["tp2"])
@pytest.mark.parametrize("policy", JOBS["tp2"]["policies"])
def test_two_gpus_say_what_one_says(reports, kind, policy):
    """Two GPUs give one GPU's tokens as nearly as stock on two GPUs gives stock's on one."""
    alone = reports("trained")["stock"]["novels"]["tokens"]

    def same(found):
        return sum(a == b for a, b in zip(found["novels"]["tokens"], alone, strict=True))

    stock, ours = same(reports(kind)["stock"]), same(reports(kind)[policy])
    assert ours == stock


FAULTS = [("trained", policy, stage) for policy in BOTH for stage in STAGES[policy]]


@pytest.mark.parametrize("kind", ["trained"])
@pytest.mark.parametrize("policy", BOTH)
def test_a_trained_model_says_what_stock_says(reports, kind, policy):
    """No near-tie parts them: the sums are stock's, in more than a hundred windows."""
    stock, ours = reports_of(reports, kind, "stock", policy)
    for scenario in ("unwatched", "novels"):
        assert ours[scenario]["tokens"] == stock[scenario]["tokens"]
    [seen] = ours["novels"]["oracle"]
    assert seen["windows"] >= 100
    assert seen["rejected"] > 100


@pytest.mark.parametrize("kind", ["trained"])
@pytest.mark.parametrize("policy", BOTH)
def test_nothing_compiles_after_the_start(reports, kind, policy):
    """No kernel of kvtxn's is compiled while requests wait; vLLM compiles some of its own."""
    [ours] = reports_of(reports, kind, policy)
    assert not [name for name in ours["compiled"] if "kvtxn" in name]


@pytest.mark.parametrize(("kind", "policy", "stage"), FAULTS)
def test_a_stage_that_fails(reports, kind, policy, stage):
    """A failure is counted once, changes no token and loses no row; windows come back."""
    stock, ours = reports_of(reports, kind, "stock", policy)
    assert unrecovered(ours["faults"][stage], stock["novels"]["tokens"], policy) == {}
