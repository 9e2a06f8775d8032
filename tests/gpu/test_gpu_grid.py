"""Real vLLM on a GPU: undo changes no token, and no policy leaves a rejected row behind."""

from __future__ import annotations

import pytest
from gpu_jobs import JOBS, NEAR_TIE, TIMED, V1, scenarios

CELLS = [
    pytest.param(kind, policy, scenario, id=f"{kind}-{policy}-{scenario}")
    for kind, found in JOBS.items()
    for policy in found["policies"]
    if policy != "again"
    for scenario in ("unwatched", *scenarios(kind))
]


def reports_of(reports, kind, *policies):
    """The reports of these policies, which have to be there."""
    found = reports(kind)
    for policy in policies:
        assert "error" not in found[policy], found[policy]["log"]
    return [found[policy] for policy in policies]


@pytest.mark.parametrize(("kind", "policy", "scenario"), CELLS)
def test_a_cell(reports, kind, policy, scenario):
    """Tokens and acceptance are stock's, or under deferred nearly; the caches are clean."""
    report, ours = reports_of(reports, kind, "stock", policy)
    stock, ours, active = report[scenario], ours[scenario], active_ranks(ours)
    same = sum(a == b for a, b in zip(ours["tokens"], stock["tokens"], strict=True))
    ahead = JOBS[kind].get("options", {}).get("async_scheduling", True)
    if policy == "undo" and ahead and scenario in TIMED:
        assert same >= 0.5 * len(stock["tokens"])
    elif policy == "undo" and scenario == NEAR_TIE:
        assert same >= len(stock["tokens"]) - 1
    elif policy == "undo":
        assert same == len(stock["tokens"])
        assert ours["stats"] == stock["stats"]
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
            judge(counts, seen, policy, JOBS[kind].get("bypassed", 0.1))


def active_ranks(report):
    """Where kvtxn is active."""
    return [bool(counts["kvtxn_active"]) for counts in report["idle"]]


def judge(counts, seen, policy, most):
    """What the oracle saw in one scenario, against what kvtxn counted.

    ``most``: of the rejected rows, in steps that have no window.
    """
    bypassed = counts["kvtxn_bypassed_windows_total"]
    assert counts["kvtxn_windows_total_committed"] + bypassed == seen["windows"]
    # A step without a window is as in stock, and the oracle has seen it, too.
    stocks = seen["rejected"] - counts["kvtxn_rows_rejected_total"]
    drafts = seen["kept"] + seen["rejected"] - counts["kvtxn_rows_staged_total"]
    assert 0 <= stocks <= most * seen["rejected"]
    assert seen.get("rejected_written", 0) <= stocks
    assert seen.get("strays", 0) == 0 or stocks
    assert seen.get("kept_unwritten", 0) <= 0.3 * seen["kept"]  # the same bytes as before
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
    for found in reports_of(reports, kind, "stock", *JOBS[kind]["policies"]):
        assert found["attention"] == JOBS[kind]["attention"]
        assert found["runner"] == ("v1" if V1.items() <= environment(kind).items() else "v2")
        assert found["graphs"] != "NONE"


def environment(kind):
    """What a kind sets; Medusa is for V1 alone, whatever is set."""
    return V1 if kind == "medusa" else JOBS[kind].get("environment", {})


@pytest.mark.parametrize("kind", [kind for kind in JOBS if not kind.endswith("_steady")])
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
    assert ours == stock or (policy == "deferred" and ours >= 0.8 * stock)
