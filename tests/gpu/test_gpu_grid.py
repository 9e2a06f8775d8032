"""Real vLLM on a GPU: tokens part from stock's at near-ties alone, as stock's own do.

One engine says the same to the last bit with its windows on and off. No policy leaves a rejected
row behind, and none loses an accepted one.
"""

from __future__ import annotations

import pytest
from gpu_jobs import JOBS, PARTIAL, STOCK, TIMED, V1, attention, scenarios
from gpu_ties import NEAR, NOISE, compare

ALL = [
    (kind, policy, scenario)
    for kind, found in JOBS.items()
    for policy in found["policies"]
    for scenario in ("unwatched", *scenarios(kind))
]
CELLS = [pytest.param(*cell, id="-".join(cell)) for cell in ALL if cell[1] not in STOCK]
STOCKS = [pytest.param(*cell, id="-".join(cell)) for cell in ALL if cell[1] in STOCK]


def reports_of(reports, kind, *policies):
    """The reports of these policies, which have to be there."""
    found = reports(kind)
    for policy in policies:
        assert "error" not in found[policy], found[policy]["log"]
    return [found[policy] for policy in policies]


@pytest.mark.parametrize(("kind", "policy", "scenario"), CELLS)
def test_a_cell(reports, kind, policy, scenario):
    """Tokens and acceptance are stock's but for near-ties; the caches are clean."""
    report, ours = reports_of(reports, kind, "stock", policy)
    stock, ours, active = report[scenario], ours[scenario], active_ranks(ours)
    near(kind, compare(ours, stock))
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
            judge(counts, seen, policy)


@pytest.mark.parametrize(("kind", "policy", "scenario"), CELLS)
def test_windows_change_no_bit(reports, kind, policy, scenario):
    """With its windows off an engine is stock, and its kernels are the same."""
    [report] = reports_of(reports, kind, policy)
    ours, stock = report[scenario], report[scenario]["off"]
    assert not any(counts.get("kvtxn_windows_total") for counts in stock["kvtxn"])
    if report["ahead"] and scenario in TIMED:
        near(kind, compare(ours, stock))
        return
    for key in ("prompts", "tokens", "logits", "stats"):
        assert ours[key] == stock[key]


@pytest.mark.parametrize(("kind", "policy", "scenario"), STOCKS)
def test_stock_next_to_stock(reports, kind, policy, scenario):
    """What is asked of kvtxn's engines is what stock keeps to, with another attention or again."""
    stock, other = reports_of(reports, kind, "stock", policy)
    near(kind, compare(other[scenario], stock[scenario]))


def near(kind, found):
    """Logits are as near as rounding allows, and so are the tokens that engines differ in."""
    assert found["noise"] <= NOISE
    assert found["gap"] <= NEAR
    assert not found["by_lot"] or JOBS[kind].get("random")


def active_ranks(report):
    """Where kvtxn is active."""
    return [bool(counts["kvtxn_active"]) for counts in report["idle"]]


def judge(counts, seen, policy):
    """What the oracle saw in one scenario, against what kvtxn counted."""
    bypassed = counts["kvtxn_bypassed_windows_total"]
    assert counts["kvtxn_windows_total_committed"] + bypassed == seen["windows"]
    # A step without a window is as in stock, and the oracle has seen it, too.
    stocks = seen["rejected"] - counts["kvtxn_rows_rejected_total"]
    drafts = seen["kept"] + seen["rejected"] - counts["kvtxn_rows_staged_total"]
    assert 0 <= stocks <= 0.1 * seen["rejected"]
    assert seen.get("rejected_written", 0) <= stocks
    assert seen.get("strays", 0) == 0 or stocks
    assert seen.get("lost", 0) == 0
    if policy == "deferred":
        assert seen.get("early", 0) <= drafts


@pytest.mark.parametrize("kind", JOBS)
def test_the_oracle_sees_rejected_rows_in_stock(reports, kind):
    """It can fail: without kvtxn rejected rows are found written."""
    [stock] = reports_of(reports, kind, "stock")
    seen = [stock[scenario]["oracle"][-1] for scenario in scenarios(kind)]
    rejected, written, strays = (
        sum(each.get(key, 0) for each in seen) for key in ("rejected", "rejected_written", "strays")
    )
    assert written > 0.3 * rejected > 0
    assert strays > 0


@pytest.mark.parametrize("kind", JOBS)
def test_the_engine_is_the_one_that_was_meant(reports, kind):
    """Attention, runner and graphs."""
    policies = ("stock", *JOBS[kind]["policies"])
    for policy, found in zip(policies, reports_of(reports, kind, *policies), strict=True):
        assert found["attention"] == attention(kind, policy)
        assert found["runner"] == ("v1" if V1.items() <= environment(kind).items() else "v2")
        assert found["graphs"] != "NONE"


def environment(kind):
    """What a kind sets; Medusa is for V1 alone, whatever is set."""
    return V1 if kind == "medusa" else JOBS[kind].get("environment", {})


@pytest.mark.parametrize("kind", [kind for kind in JOBS if kind not in PARTIAL])
def test_what_is_not_covered_has_a_reason(reports, kind):
    """A policy that a kind leaves out stays out by itself, and says why."""
    [stock] = reports_of(reports, kind, "stock")
    for policy in ("undo", "deferred"):
        outcome, reason = stock["decisions"][policy]
        assert outcome == (policy if policy in JOBS[kind]["policies"] else "off")
        assert reason


@pytest.mark.parametrize("kind", ["tp2"])
@pytest.mark.parametrize("policy", JOBS["tp2"]["policies"])
def test_two_gpus_say_what_one_says(reports, kind, policy):
    """As nearly as stock on two GPUs says what stock on one does."""
    alone = reports("trained")["stock"]["novels"]["tokens"]

    def same(found):
        return sum(a == b for a, b in zip(found["novels"]["tokens"], alone, strict=True))

    stock, ours = same(reports(kind)["stock"]), same(reports(kind)[policy])
    assert ours == stock
